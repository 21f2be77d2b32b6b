"""Store URLs: which servers, how to reach them, and what people may read of it.

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DB]                             one server
    redis+sentinel://[USER[:PASSWORD]@]HOST[:PORT],.../SERVICE[/DB]        the master that Sentinels name
    redis+cluster://[USER[:PASSWORD]@]HOST[:PORT],...                      a cluster, by some of its nodes
    rediss://, rediss+sentinel://, rediss+cluster://                       the same over TLS
    unix://PATH

The query has redis-py's connection options, among them ssl_ca_certs, ssl_certfile and ssl_keyfile (paths);
sentinel_username and sentinel_password are for the Sentinels themselves.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from redis.asyncio.connection import parse_url
from redis.credentials import CredentialProvider

from outrider.net.address import without_credentials

Kind = Literal["single", "sentinel", "cluster"]

_KINDS: dict[str, Kind] = {"": "single", "sentinel": "sentinel", "cluster": "cluster"}
SCHEMES = ("redis", "rediss", "unix", *(f"{base}+{kind}" for base in ("redis", "rediss") for kind in _KINDS if kind))
_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True)
class StorePlace:
    """A store URL, taken apart.

    Attributes:
        address: for people: no credentials, no query.
        nodes: hosts and ports of Sentinels or of a cluster; empty for a single server.
        service: what the Sentinels call the master.
        options: of redis-py's connections to the servers.
        sentinel_options: of those to the Sentinels.
    """

    kind: Kind
    address: str
    nodes: tuple[tuple[str, int], ...]
    service: str
    options: dict[str, Any] = field(repr=False)
    sentinel_options: dict[str, Any] = field(repr=False)


class PasswordFile(CredentialProvider):
    """A password that is read from a file whenever a connection is made, so that it may change."""

    def __init__(self, path: str, user: str | None) -> None:
        self._path, self._user = Path(path), user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """(user, password), or (password,) for the default user. Raises OSError."""
        password = self._path.read_text().rstrip("\r\n")
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same; the base class's warns at every connection. The file is a line, the wait that of a cached read."""
        return self.get_credentials()


def parse_store_url(url: str, password_file: str = "") -> StorePlace:
    """Raises ValueError with one sentence, without credentials, when the URL or the file is bad."""
    try:
        address = without_credentials(url)
    except ValueError as error:
        raise ValueError(f"store URL is invalid: {error}") from None
    try:
        place = _parse(url, address)
        if password_file:
            _take_password_from(password_file, place.options)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"store URL {address} is invalid: {error}") from error
    return place


def _parse(url: str, address: str) -> StorePlace:
    parts = urlsplit(url)
    base, _, word = parts.scheme.partition("+")
    kind = _KINDS[word]
    if kind == "single":
        return StorePlace(kind, address, (), "", dict(parse_url(url)), {})
    user, at, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_node(host, _PORTS[kind]) for host in hosts.split(","))
    service, _, db = parts.path.strip("/").partition("/")
    if kind == "cluster" and service:
        raise ValueError("a cluster has no databases")
    if kind == "sentinel" and (not service or not (db or "0").isdecimal()):
        raise ValueError("it must end with /SERVICE or /SERVICE/DB, SERVICE being the master's name at the Sentinels")
    # redis-py reads credentials, database and options as those of one server.
    options: dict[str, Any] = dict(parse_url(f"{base}://{user}{at}host/{db}?{parts.query}"))
    del options["host"]
    given = {key.removeprefix("sentinel_"): options.pop(key) for key in list(options) if key.startswith("sentinel_")}
    return StorePlace(kind, address, nodes, service, options, given)


def _node(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    return parts.hostname, parts.port or default_port


def _take_password_from(path: str, options: dict[str, Any]) -> None:
    if "password" in options:
        raise ValueError("it has a password, and there is a password file")
    provider = PasswordFile(path, options.pop("username", None))
    try:
        provider.get_credentials()
    except (OSError, ValueError) as error:
        raise ValueError(f"password file {path} cannot be read: {error}") from error
    options["credential_provider"] = provider
