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
