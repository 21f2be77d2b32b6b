"""Trace context, ids that are drawn beforehand, and the status of a call's span."""

import asyncio

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import INVALID_SPAN_CONTEXT, StatusCode

from orchestrator.tracing import RequestTrace, traced
from outrider.config import ConfigError
from outrider.net.errors import OutriderError
from outrider.observe.otlp import traces
from outrider.observe.tracing import child, remote_context, traceparent
from outrider.v1 import types_pb2
from tests.harness.spans import recorder

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_context_survives_the_wire() -> None:
    context = remote_context(SENT)
    assert context.is_remote
    assert context.trace_flags.sampled
    assert traceparent(context) == SENT
    assert remote_context("01" + SENT[2:] + "-later").is_valid


@pytest.mark.parametrize(
    "header", ["", "x", SENT[:-1], SENT.upper(), "ff" + SENT[2:], SENT + " ", f"00-{'0' * 32}-{'0' * 16}-01"]
)
def test_what_is_no_context_is_none(header: str) -> None:
    assert not remote_context(header).is_valid


def test_a_span_that_has_ended_is_as_it_was_told() -> None:
    spans, _ = recorder()
    parent = remote_context(SENT)
    context = child(parent)
    one = spans.ended("one", parent, 1, 2, {"a": 1}, context=context, links=[parent], error="BAD")
    other = spans.ended("other", context, 2, 1)
    assert (one.parent, other.parent) == (parent, context)
    assert (one.start_time, one.end_time, other.start_time, other.end_time) == (1, 2, 2, 2)
    assert (one.context, one.status.status_code) == (context, StatusCode.ERROR)
    assert one.attributes == {"a": 1, "error.type": "BAD"}
    assert [link.context for link in one.links] == [parent]
    assert other.context is not None
    assert (other.context.trace_id, other.context.trace_flags) == (parent.trace_id, parent.trace_flags)
    assert len({parent.span_id, context.span_id, other.context.span_id}) == 3


async def ended_with(error: BaseException | None) -> ReadableSpan:
    """The span of a call that ended so."""
    spans, exporter = recorder()

    async def call() -> None:
        with traced(spans, "chat", (("traceparent", SENT), ("baggage", "a=b"))):
            assert RequestTrace.current() is not None
            if isinstance(error, asyncio.CancelledError):
                task.cancel()
                await asyncio.sleep(0)
            if error is not None:
                raise error

    task = asyncio.create_task(call())
    await asyncio.gather(task, return_exceptions=True)
    (span,) = exporter.get_finished_spans()
    assert span.parent == remote_context(SENT)
    return span


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (None, "OK", StatusCode.UNSET),
        (OutriderError(types_pb2.ERROR_REASON_INVALID_FIELD, "secret"), "INVALID_ARGUMENT", StatusCode.UNSET),
        (OutriderError(types_pb2.ERROR_REASON_NO_WORKER, "secret"), "UNAVAILABLE", StatusCode.ERROR),
        (OutriderError(types_pb2.ERROR_REASON_NON_FINITE_LOGITS, "secret"), "INTERNAL", StatusCode.ERROR),
        (asyncio.CancelledError(), "CANCELLED", StatusCode.UNSET),
        (grpc.aio.UsageError("secret"), "CANCELLED", StatusCode.UNSET),
        (ValueError("secret"), "UNAVAILABLE", StatusCode.ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
async def test_i6_a_call_has_the_status_that_its_client_sees(
    error: BaseException | None, code: str, status: StatusCode
) -> None:
    span = await ended_with(error)
    assert span.attributes is not None
    assert span.attributes["rpc.response.status_code"] == code
    assert span.status.status_code is status
    assert "secret" not in span.to_json()


async def test_a_request_that_is_not_sampled_has_ids_for_logs_and_nothing_else() -> None:
    spans, exporter = recorder(ALWAYS_OFF)

    async def call() -> None:
        with traced(spans, "chat", (("traceparent", SENT),)):
            assert RequestTrace.current() is None
            assert trace.get_current_span().get_span_context().trace_id == remote_context(SENT).trace_id

    await asyncio.create_task(call())
    assert not exporter.get_finished_spans()


async def test_without_tracing_a_call_has_no_span() -> None:
    with traced(None, "chat", (("traceparent", SENT),)):
        assert trace.get_current_span().get_span_context() == INVALID_SPAN_CONTEXT


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "0.5"}, "OTEL_BSP_SCHEDULE_DELAY is '0.5', must be a whole number above 0"),
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER is 'jaeger'"),
    ],
)
async def test_a_variable_that_cannot_be_followed_is_named(
    environment: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=complaint):
        async with traces("outrider-test"):
            pass


@pytest.mark.parametrize("environment", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
async def test_tracing_is_off_unless_there_is_an_endpoint(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with traces("outrider-test") as spans:
        assert spans is None
