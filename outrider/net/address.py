"""HOST:PORT lists and URLs as people write them."""

import ipaddress
from urllib.parse import urlsplit


def parse_addresses(text: str) -> list[str]:
    """Splits `HOST:PORT,HOST:PORT`. Raises ValueError naming the entry that is no address."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise ValueError(f"{address!r} is not HOST:PORT")
    return addresses


def host_and_port(address: str) -> tuple[str, int]:
    """Where to listen, as HOST:PORT says; port 0 chooses a free one, and IPv6 hosts stand in brackets.

    Raises ValueError when it is no such address.
    """
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare) != (bare != host) or not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError(f"{address!r} is not HOST:PORT")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host stays on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def without_credentials(url: str) -> str:
    """A URL for people: no user, no password, no query. Raises ValueError when it is no URL at all."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
