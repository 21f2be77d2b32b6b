"""Whom a client calls, what it shows them and how it checks them."""

from outrider.net.address import is_loopback, parse_addresses
from outrider.net.tls import ClientTls
from outrider.net.tokens import bearer


class Access:
    """Settings of a client.

    Args:
        addresses: HOST:PORT, several separated by commas.
        token: bearer token, "" for none.
        tls: how the orchestrators are checked; None speaks plain text.
        plain_token: whether the token may leave this machine in plain text.

    Raises ValueError naming an address that is none, or a token that anybody on the way could read.
    """

    def __init__(
        self, addresses: str, token: str = "", tls: ClientTls | None = None, *, plain_token: bool = False
    ) -> None:
        self.addresses = parse_addresses(addresses)
        if not self.addresses:
            raise ValueError("at least one address is required")
        self.tls = tls
        self.metadata = bearer(token)
        for address in self.addresses if token and tls is None and not plain_token else ():
            if not is_loopback(address.rpartition(":")[0]):
                raise ValueError(f"the token would travel to {address} in plain text: use TLS")

    @property
    def version(self) -> int:
        """Grows when certificates were renewed: channels made before do not know them."""
        return self.tls.version if self.tls is not None else 0
