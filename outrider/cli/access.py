"""How the commands reach an orchestrator: TLS and the token."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import typer

from outrider.cli.run import Failure
from outrider.client.access import Access
from outrider.net.channel import connect
from outrider.net.tls import ClientTls, TlsError

_FILE = "FILE"
Tls = Annotated[bool, typer.Option("--tls", help="TLS, checked by the public CAs unless --tls-ca says another.")]
TlsCa = Annotated[
    str, typer.Option(envvar="OUTRIDER_CLIENT_TLS_CA", help="PEM file with the orchestrator's CA.", metavar=_FILE)
]
TlsCert = Annotated[
    str, typer.Option(envvar="OUTRIDER_CLIENT_TLS_CERT", help="PEM file with your certificate.", metavar=_FILE)
]
TlsKey = Annotated[str, typer.Option(envvar="OUTRIDER_CLIENT_TLS_KEY", help="PEM file with its key.", metavar=_FILE)]
TlsServerName = Annotated[str, typer.Option(help="Name in the orchestrator's certificate.", metavar="NAME")]
TokenFile = Annotated[str, typer.Option(help="File with your token; else OUTRIDER_TOKEN is one.", metavar=_FILE)]
PlainToken = Annotated[bool, typer.Option("--plain-token", help="Send the token without TLS, for anybody to read.")]


@dataclass(frozen=True)
class Reach:
    """What was said about it; fields as the options above."""

    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    token_file: str = ""
    plain_token: bool = False

    def to(self, address: str) -> "Connection":
        """Does not connect yet. Raises Failure."""
        try:
            access = Access(address, self._token(), self.client_tls(), plain_token=self.plain_token)
        except (TlsError, ValueError) as error:
            raise Failure(str(error)) from None
        return Connection(connect(address, access.tls), access.metadata)

    def _token(self) -> str:
        if not self.token_file:
            return os.environ.get("OUTRIDER_TOKEN", "")
        try:
            return Path(self.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(f"--token-file: {self.token_file} cannot be read: {error}") from None

    def client_tls(self) -> ClientTls | None:
        """How the orchestrator is checked; None: plain text. Raises TlsError."""
        if not (self.tls or self.tls_ca or self.tls_cert or self.tls_key or self.tls_server_name):
            return None
        return ClientTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name, flags="--tls")


@dataclass(frozen=True)
class Connection:
    """A channel, and what every call on it carries."""

    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = ()
