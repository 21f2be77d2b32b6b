"""Spans as a test reads them."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from outrider.observe.tracing import Make, Spans


def recorder(sampler: Sampler = ALWAYS_ON) -> tuple[Spans, InMemorySpanExporter]:
    """What makes spans, and where they are once they have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def at_once(make: Make) -> None:
        exporter.export(make())

    return Spans(provider, at_once, "test"), exporter
