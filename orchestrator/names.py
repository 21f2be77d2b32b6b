"""What sessions are called.

A tenant's session is called TENANT/ID wherever it is kept, and ID when the tenant is spoken to. Another tenant's
session is thus one that does not exist: no call can tell the two apart, and two tenants may use one id.
"""

import re
import secrets
from string import ascii_letters, digits

from outrider.net.bounds import MAX_SESSION_ID
from outrider.net.errors import invalid_field

# 71 bits: short on the wire, where the id travels four times a round, beyond guessing, never the same twice.
_ID_LENGTH, _ID_LETTERS = 12, ascii_letters + digits
_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_SESSION_ID}}}")
_BETWEEN = "/"  # in no id that a client may choose


def new_id() -> str:
    """A random id."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


def owned(session_id: str, tenant: str) -> str:
    """What the tenant's session of that id is called; the id itself for the tenant "".

    Raises OutriderError(INVALID_FIELD) when it cannot be an id.
    """
    if not _ID.fullmatch(session_id):
        raise invalid_field(
            f"session_id is {session_id[:32]!r}, must be 1 to {MAX_SESSION_ID} characters of [A-Za-z0-9._-]"
        )
    name = f"{tenant}{_BETWEEN}{session_id}" if tenant else session_id
    if len(name) > MAX_SESSION_ID:
        room = MAX_SESSION_ID - len(tenant) - len(_BETWEEN)
        raise invalid_field(f"session_id has {len(session_id)} characters, this tenant's limit is {room}")
    return name


def told(name: str) -> str:
    """The id by which its tenant knows a session."""
    return name.rpartition(_BETWEEN)[2]


def drafts_for(proved: str, said: str) -> str:
    """Whom draft workers are told that a session is for: sessions that they take for the same tenant's may be drafted
    from one another's outputs.

    Args:
        proved: the tenant of the call's token; empty where none is asked for.
        said: the tenant that the call is served for, which a proxy may name.
    """
    return proved if said == proved else f"{proved}{_BETWEEN}{said}"
