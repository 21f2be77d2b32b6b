"""Where a process's spans go: an OTLP collector, as the OTEL_* variables of OpenTelemetry's specification say.

Nothing waits for the collector: spans wait in a bounded queue, what it cannot hold is dropped, and a collector that
does not answer does not hold up the end of the process.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter

from outrider import __version__
from outrider.config import ConfigError
from outrider.observe.backlog import Backlog
from outrider.observe.tracing import Spans

# Unless OTEL_BSP_* say otherwise. What waits is a call, a round, or a worker's part of one, with all its spans.
_MOST_WAITING = 16_384
_DELAY_MILLIS = 5_000
_BATCH_SPANS = 512
# For the last spans of a process to reach a collector that answers.
FLUSH_SECONDS = 3.0

_EXPORTERS: dict[str, type[GrpcExporter] | type[HttpExporter]] = {"grpc": GrpcExporter, "http/protobuf": HttpExporter}


@asynccontextmanager
async def traces(service: str) -> AsyncIterator[Spans | None]:
    """The spans of a service process, None where tracing is off; at the end the last ones are sent.

    Args:
        service: service.name, unless the environment says another one.

    Raises ConfigError naming a variable that cannot be followed.
    """
    if not _wanted():
        yield None
        return
    backlog = Backlog(
        _exporter(),
        most=_number("OTEL_BSP_MAX_QUEUE_SIZE", _MOST_WAITING),
        delay=_number("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MILLIS) / 1e3,
        batch=_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH_SPANS),
    )
    provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
    provider.add_span_processor(backlog)
    try:
        yield Spans(provider, backlog.later, service.replace("-", "."))
    finally:
        await asyncio.to_thread(backlog.close, FLUSH_SECONDS)


def _wanted() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    chosen = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if chosen not in ("otlp", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {chosen!r}, must be otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return chosen == "otlp" and any(os.environ.get(name) for name in endpoints)


def _number(variable: str, default: int) -> int:
    given = os.environ.get(variable, "").strip() or str(default)
    if not given.isdecimal() or not int(given):
        raise ConfigError(f"{variable} is {given!r}, must be a whole number above 0")
    return int(given)


def _exporter() -> SpanExporter:
    variable = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    if not os.environ.get(variable):
        variable = "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = os.environ.get(variable, "").strip() or "grpc"
    if protocol not in _EXPORTERS:
        raise ConfigError(f"{variable} is {protocol!r}, must be grpc or http/protobuf")
    try:
        return _EXPORTERS[protocol]()
    except (ValueError, OSError) as error:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_*: {error}") from error


def _resource(service: str) -> Resource:
    """What the environment says of the process, and what it leaves open."""
    resource = Resource.create()
    named = not str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service")
    instance = f"{os.uname().nodename}:{os.getpid()}" if hasattr(os, "uname") else str(os.getpid())
    ours = {SERVICE_NAME: service, SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: instance}
    given = {**resource.attributes} if named else {k: v for k, v in resource.attributes.items() if k != SERVICE_NAME}
    return Resource({**ours, **given}, resource.schema_url)
