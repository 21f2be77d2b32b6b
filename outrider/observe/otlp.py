"""Where a process's spans go: an OTLP collector, as the OTEL_* variables of OpenTelemetry's specification say.

Nothing waits for the collector: spans wait in a bounded queue, what it cannot hold is dropped, and a collector that
does not answer does not hold up the end of the process.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from outrider import __version__
from outrider.config import ConfigError
from outrider.observe.tracing import SpanIds, Spans

# What waits for the collector; a round has some fifteen spans in three services.
_QUEUE_SPANS = 16_384
# For the last spans of a process to reach a collector that answers.
FLUSH_SECONDS = 3.0
# An export that takes longer, at the end of a process, is not waited for.
_SLOW_SECONDS, _LOOK_SECONDS = 1.0, 0.05

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
    exporter = _Exporter(_exporter())
    ids = SpanIds()
    provider = TracerProvider(resource=_resource(service), id_generator=ids, shutdown_on_exit=False)
    size = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else _QUEUE_SPANS
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=size))
    try:
        yield Spans(provider, ids, service.replace("-", "."))
    finally:
        await _shut_down(provider, exporter)


def _wanted() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    chosen = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if chosen not in ("otlp", "none"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {chosen!r}, must be otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return chosen == "otlp" and any(os.environ.get(name) for name in endpoints)


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


class _Exporter(SpanExporter):
    """An exporter of which one can ask whether its collector answers."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._began: float | None = None
        self._failed = False

    @property
    def answers(self) -> bool:
        """Whether the last export came to an end soon, and to a good one; true before the first."""
        began = self._began
        return not self._failed and (began is None or time.monotonic() - began < _SLOW_SECONDS)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans; called by the processor's thread."""
        self._began = time.monotonic()
        result = self._exporter.export(spans)
        self._failed, self._began = result is not SpanExportResult.SUCCESS, None
        return result

    def shutdown(self) -> None:
        """Ends what is under way."""
        self._exporter.shutdown()


async def _shut_down(provider: TracerProvider, exporter: _Exporter) -> None:
    """Sends what is left while the collector answers. The SDK would wait for half a minute."""
    flushing = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
    flushing.start()
    ends = time.monotonic() + FLUSH_SECONDS
    while flushing.is_alive() and exporter.answers and time.monotonic() < ends:
        await asyncio.to_thread(flushing.join, _LOOK_SECONDS)
    if flushing.is_alive():
        exporter.shutdown()
