"""Settings of the orchestrator."""

from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from orchestrator.discovery import parse_sources
from outrider.config import ServiceConfig
from outrider.net.bounds import MAX_LOOKAHEAD
from outrider.net.tls import ClientTls, TlsError
from outrider.net.tokens import Keys

AUTO = "auto"


class OrchestratorConfig(ServiceConfig):
    """Flags and OUTRIDER_ environment variables of `python -m orchestrator`."""

    model_config = SettingsConfigDict(cli_prog_name="python -m orchestrator")

    port: int = Field(7800, ge=0, le=65_535, description="port to listen on; 0 chooses a free one")
    targets: str = Field(min_length=1, description="target workers, HOST:PORT or dns:NAME:PORT, separated by commas")
    drafts: str = Field(
        "", description="draft workers, HOST:PORT or dns:NAME:PORT, separated by commas; none: plain decoding"
    )
    tokenizer: str = Field(min_length=1, description="MODEL whose tokenizer the targets use")
    target_model: str = Field(
        "", description="MODEL that a target must have been started with to be used; none: any of that tokenizer"
    )
    store: str = Field(
        "memory://",
        min_length=1,
        repr=False,
        description="session store: memory://, redis://HOST:PORT/DB, ... (reliability.md)",
    )
    store_password_file: str = Field("", description="file with the store's password, read at every new connection")
    store_timeout: float = Field(15.0, gt=0, description="seconds that a write to the store may take, repeats included")
    store_wait_replicas: int = Field(0, ge=0, description="replicas that must have a write before it counts")
    lookahead: str = Field(
        AUTO, description="block length of requests that do not choose one, 0 to 64; auto: by goodput, every round"
    )
    max_lookahead: int = Field(16, ge=0, le=MAX_LOOKAHEAD, description="longest block of any request")
    tree_nodes: int = Field(
        0,
        ge=0,
        le=MAX_LOOKAHEAD,
        description="most tokens of a block as a tree, where a request does not say; 0: chains alone",
    )
    draft_timeout: float = Field(1.0, gt=0, le=60, description="seconds that a round waits for its block")
    draft_hedge: float = Field(
        0.0,
        ge=0,
        le=0.1,
        description="part of the blocks that rounds wait for for which a second draft worker may be asked too",
    )
    verify_timeout: float = Field(120.0, gt=0, description="seconds that one Verify call may take")
    failover_timeout: float = Field(30.0, gt=0, description="seconds that a round looks for a target that answers")
    session_ttl: float = Field(3_600.0, gt=0, description="seconds that the store keeps an untouched session")
    worker_tls_ca: str = Field("", description="PEM file with the CA of the workers; none: plain text to them")
    worker_tls_cert: str = Field("", description="PEM file with the certificate that is shown to workers")
    worker_tls_key: str = Field("", description="PEM file with its key")
    target_tls_name: str = Field("", description="name in the targets' certificates; none: the host of the address")
    draft_tls_name: str = Field("", description="name in the drafts' certificates; none: the host of the address")
    keys_file: str = Field("", description="file of NAME:SHA256 lines; with keys, calls need a token")
    keys: SecretStr = Field(SecretStr(""), description="such lines themselves, instead of a file or beside it")
    max_sessions: int = Field(1_024, ge=1, description="generations that run at once; more wait")
    max_running_tokens: int = Field(
        16_777_216, ge=1, description="tokens of the prompts and outputs (max_tokens) of what runs at once; more wait"
    )
    max_waiting: int = Field(256, ge=0, description="requests that wait for one to end; more are refused")
    max_waiting_tokens: int = Field(
        16_777_216, ge=0, description="prompt tokens of the requests that wait, a byte of text counting as one"
    )
    queue_timeout: float = Field(5.0, gt=0, description="seconds that a request may wait before it is refused")
    reader_timeout: float = Field(
        300.0, gt=0, description="seconds that a session waits for a client that does not read"
    )
    connection_age: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="seconds after which clients connect anew, so that new replicas get their share; 0: never",
    )
    client_traces: Literal["follow", "link"] = Field(
        "follow",
        description="the trace of a request that names one: follow: that one, traced or not as the client says; "
        "link: one of its own, which points to it",
    )
    tenants: str = Field("", description="TOML file of the tenants' weights and limits; none: all are alike")
    tenant_metadata: str = Field(
        "", description="request metadata that name the tenant, where a proxy sets them and clients cannot"
    )

    @field_validator("lookahead", mode="before")
    @classmethod
    def _auto_or_number(cls, value: object) -> str:
        text = str(value)
        if text != AUTO and not (text.isascii() and text.isdigit() and int(text) <= MAX_LOOKAHEAD):
            raise ValueError(f"{text!r} is neither {AUTO} nor a number from 0 to {MAX_LOOKAHEAD}")
        return text

    @property
    def fixed_lookahead(self) -> int | None:
        """Block length of requests that do not choose one; None where every round's is chosen by measured goodput."""
        return None if self.lookahead == AUTO else int(self.lookahead)

    def worker_tls(self, server_name: str) -> ClientTls | None:
        """How workers of that name are checked; None for plain text. Raises TlsError."""
        if self.worker_tls_ca:
            pair = self.worker_tls_cert, self.worker_tls_key
            return ClientTls(self.worker_tls_ca, *pair, server_name, flags="--worker-tls")
        if self.worker_tls_cert or self.worker_tls_key or server_name:
            raise TlsError("--worker-tls-ca is required with what else is said about TLS to workers")
        return None

    def accepted_keys(self) -> Keys | None:
        """Whose tokens are accepted; None where none is asked for. Raises KeysError."""
        given = self.keys.get_secret_value()
        return Keys(given, self.keys_file) if given or self.keys_file else None

    @field_validator("targets", "drafts")
    @classmethod
    def _addresses(cls, value: str) -> str:
        parse_sources(value)
        return value
