"""Settings of a service: flags before environment variables (OUTRIDER_*) before defaults; checked once, then frozen."""

from collections.abc import Sequence
from typing import Literal, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from outrider.net.address import host_and_port
from outrider.net.tls import TlsFiles


class ConfigError(Exception):
    """A setting is missing or outside its range; the message is one line that names it."""


class ServiceConfig(BaseSettings):
    """What every service has."""

    model_config = SettingsConfigDict(
        frozen=True,
        env_prefix="OUTRIDER_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
    )

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(0, ge=0, le=65_535, description="port to listen on; 0 chooses a free one")
    grace: float = Field(10.0, ge=0, le=3_600, description="seconds that running work may take after SIGTERM")
    health_address: str = Field(
        "", description="HOST:PORT for health alone, in plain text: probes of Kubernetes speak no TLS; none: not apart"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe record to log")
    log_format: Literal["text", "json"] = Field("text", description="a line of text, or a JSON object a line")
    metrics_address: str = Field("", description="HOST:PORT to serve Prometheus metrics on (metrics.md); none: nowhere")
    tls_cert: str = Field("", description="PEM file with the certificate to serve with; none: plain text")
    tls_key: str = Field("", description="PEM file with its key")
    tls_ca: str = Field("", description="PEM file with the CA of clients; those without a certificate are refused")

    @field_validator("health_address", "metrics_address")
    @classmethod
    def _address(cls, value: str) -> str:
        if value:
            host_and_port(value)
        return value

    @property
    def tls(self) -> TlsFiles:
        """What the service serves with; false for plain text."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)


class WorkerConfig(ServiceConfig):
    """What the two workers share."""

    model: str = Field(min_length=1, description="Hugging Face id, directory, gguf:FILE or synthetic:KEY=VALUE,...")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="numeric type of the weights")
    device: str = Field("auto", min_length=1, description="auto, cpu, cuda or cuda:N")
    threads: int = Field(0, ge=0, le=1_024, description="CPU threads of the model; 0 leaves torch's own choice")
    context_length: int = Field(0, ge=0, description="longest sequence in tokens; 0 takes the model's")
    kv_pages: int = Field(0, ge=0, description="pages of the KV cache; 0 chooses from context and memory")
    page_size: int = Field(0, ge=0, le=1_024, description="tokens of a KV page; 0 takes 16 on a CPU, 64 on CUDA")
    attention: Literal["auto", "gather", "flex"] = Field(
        "auto", description="gather copies pages together; flex reads them where they lie (CUDA); auto: flex on CUDA"
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="record passes of up to 256 positions at start and play them; auto: with flex on CUDA"
    )
    token_budget: int = Field(512, ge=1, description="positions of one forward pass; longer prompts go in chunks")
    max_queue_items: int = Field(1_024, ge=1, description="items that may wait for the model")
    session_ttl: float = Field(600.0, gt=0, description="seconds after which an unused session is freed")
    stall_timeout: float = Field(60.0, gt=0, description="seconds in one pass after which the worker counts as stuck")


Config = TypeVar("Config", bound=ServiceConfig)


def parse_config(config_class: type[Config], arguments: Sequence[str]) -> Config:
    """Reads flags and environment. Raises ConfigError; exits with 0 after printing --help."""
    try:
        return CliApp.run(config_class, cli_args=list(arguments))
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(item["loc"], item["msg"]) for item in error.errors())) from error
    except SettingsError as error:
        raise ConfigError(str(error).removeprefix("error parsing CLI: ")) from error


def _sentence(location: tuple[int | str, ...], message: str) -> str:
    flag = "--" + "-".join(str(part) for part in location).replace("_", "-") + ": " if location else ""
    plain = message.removeprefix("Value error, ")
    return f"{flag}{plain[:1].lower()}{plain[1:]}"
