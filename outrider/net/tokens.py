"""Bearer tokens: who calls. A token's name is its tenant's; the service knows only hashes.

SHA-256 once, not a slow hash: those make guessable passwords costly to guess. A token of ours has 256 random bits,
which nobody guesses at any speed, and a slow hash on every call would be a way to keep the service busy.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc

log = logging.getLogger(__name__)

METADATA_KEY = "authorization"
_SCHEME = "Bearer "
# Scanners for leaked secrets, and people, see by it what a string is.
_PREFIX = "outrider_"
_RANDOM_BYTES = 32
TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_LINE = re.compile(rf"({TENANT.pattern}):([0-9a-f]{{64}})")
# Kubernetes asks for health without a token, and it says nothing else.
_OPEN = "/grpc.health.v1.Health/"

_tenant: ContextVar[str] = ContextVar("tenant", default="")


class KeysError(Exception):
    """Keys cannot be read; the message names the file and the line, never a hash."""


def tenant() -> str:
    """The tenant of the call that is being handled, proved by its token; "" where no token is asked for.

    Tasks that a handler starts have it too, other threads do not.
    """
    return _tenant.get()


def new_token(name: str) -> tuple[str, str]:
    """(a token, the line that makes a service accept it as `name`). Raises ValueError when it is no tenant's name."""
    if not TENANT.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a tenant: 1 to 32 of a-z, 0-9 and -, not - at first")
    token = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    return token, f"{name}:{_hash(token)}"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that a call carries; nothing without a token."""
    return ((METADATA_KEY, _SCHEME + token),) if token else ()


def parse_keys(text: str) -> list[tuple[str, str]]:
    """(tenant, hash) of each line NAME:SHA256; several of one name are several tokens of one tenant.

    Raises KeysError naming the line.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if words:
            found = _LINE.fullmatch(words)
            if found is None:
                raise KeysError(f"line {number} is not NAME:SHA256, as `outrider keys new NAME` prints it")
            keys.append((found[1], found[2]))
    return keys


class Keys:
    """The hashes that are accepted. A file is read again when it has changed; one that cannot be read is logged, and
    what was accepted before stays so.

    Args:
        text: lines NAME:SHA256.
        file: a file of more such lines; "" for none.

    Raises KeysError.
    """

    def __init__(self, text: str = "", file: str = "") -> None:
        self._given, self._file = parse_keys(text), file
        self._seen = _stamp(file)
        self._from_file = _read(file)
        self._complaint = ""

    def tenant_of(self, token: str) -> str | None:
        """Whose token it is; None for nobody's. Takes as long for a wrong one as for a right one."""
        self._renew()
        hashed, found = _hash(token), None
        for name, known in (*self._given, *self._from_file):
            if hmac.compare_digest(hashed, known):
                found = name
        return found

    def _renew(self) -> None:
        try:
            stamp = _stamp(self._file)
            if stamp == self._seen:
                return
            self._seen = stamp
            self._from_file = _read(self._file)
            self._complaint = ""
            log.info("keys were read again from %s", self._file)
        except KeysError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("changed keys are not used: %s", error)


class RequireToken(grpc.aio.ServerInterceptor):
    """Ends calls without a good token with UNAUTHENTICATED, and says no more; health may be asked by anybody."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Runs in the call's own task, so that what handles the call sees the tenant."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN):
            return handler
        name = self._keys.tenant_of(_token(handler_call_details.invocation_metadata))
        if name is None:
            return _MAKE[handler.request_streaming, handler.response_streaming](_refuse)
        _tenant.set(name)
        return handler


_MAKE = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


async def _refuse(_: object, context: "grpc.aio.ServicerContext[object, object]") -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid token is required")


def _token(metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
    values = [value for key, value in metadata or () if key == METADATA_KEY]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith(_SCHEME):
        return ""
    return values[0].removeprefix(_SCHEME)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _stamp(file: str) -> tuple[int, int, int] | None:
    if not file:
        return None
    try:
        status = os.stat(file)
    except OSError as error:
        raise KeysError(f"{file} cannot be read: {error.strerror}") from error
    # Not the time of the content alone: a file that could not be read may be made readable.
    return status.st_ino, status.st_size, status.st_ctime_ns


def _read(file: str) -> list[tuple[str, str]]:
    if not file:
        return []
    try:
        return parse_keys(Path(file).read_text())
    except OSError as error:
        raise KeysError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeysError(f"{file} is not text") from error
    except KeysError as error:
        raise KeysError(f"{file}: {error}") from error
