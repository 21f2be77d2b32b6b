"""I6: a client whose task is cancelled sees that, and the spans on both sides end and say so."""

import asyncio

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.client import AsyncClient
from tests.harness.faults import target_engine
from tests.harness.orchestrator import start_orchestrator
from tests.harness.spans import recorder
from tests.harness.workers import eventually, start_target


async def test_i6_a_task_that_is_cancelled_sees_it_and_the_spans_of_both_sides_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(seen))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    spans, exporter = recorder()
    async with (
        start_target(target_engine()) as target,
        start_orchestrator([target.address], spans=spans) as orchestrator,
        AsyncClient(orchestrator.address) as client,
    ):
        text = client.generate(token_ids=(0, 1, 2), max_tokens=100_000).text()
        task = asyncio.create_task(text)
        await eventually(lambda: any(span.name == "round" for span in exporter.get_finished_spans()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: any(span.name.endswith("/Generate") for span in exporter.get_finished_spans()))
    (ours,) = seen.get_finished_spans()
    (theirs,) = [span for span in exporter.get_finished_spans() if span.name.endswith("/Generate")]
    assert theirs.parent is not None
    assert theirs.parent.span_id == ours.get_span_context().span_id  # type: ignore[union-attr]
    for span in (ours, theirs):
        assert span.attributes is not None
        assert span.attributes["error.type"] == "CANCELLED"
    assert {span.context.trace_id for span in exporter.get_finished_spans() if span.context} == {theirs.parent.trace_id}
