"""Trace context, ids that are drawn beforehand, and the status of a call's span."""

import asyncio

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import INVALID_SPAN_CONTEXT, StatusCode

from draft_service.commands import Ask, Peer, parse_command
from orchestrator.tracing import RequestTrace, traced
from outrider.config import ConfigError
from outrider.net.errors import OutriderError
from outrider.observe.otlp import traces
from outrider.observe.tracing import Spans, child, kept, remote_context, traceparent
from outrider.observe.worker_spans import Item, WorkerSpans
from outrider.v1 import draft_pb2, types_pb2
from tests.harness.spans import recorder

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_context_survives_the_wire() -> None:
    context = remote_context(SENT)
    assert context.is_remote
    assert context.trace_flags.sampled
    assert traceparent(context) == SENT
    assert remote_context("01" + SENT[2:] + "-later").is_valid


@pytest.mark.parametrize(
    "header",
    [
        *("", "x", SENT[:-1], SENT.upper(), "ff" + SENT[2:], SENT + " ", f"00-{'0' * 32}-{'0' * 16}-01"),
        *(SENT + "-later", "01" + SENT[2:] + "-" + "x" * 1_000_000, SENT + "\n", "0" * 1_000_000),
    ],
    ids=lambda header: header[:70],
)
def test_what_is_no_context_is_none_and_not_kept(header: str) -> None:
    context = remote_context(header)
    assert not context.is_valid
    # All zeros and a flag would begin a trace for every item of the message.
    assert not context.trace_flags.sampled
    assert kept(header) == ""


def test_of_what_messages_carry_the_contexts_of_recorded_traces_are_kept() -> None:
    assert kept(SENT) == SENT
    assert kept(SENT[:-2] + "00") == ""
    assert traceparent(remote_context(SENT[:-2] + "fd")) == SENT
    message = draft_pb2.DraftCommand(session_id="a", epoch=1, traceparent="x" * 1_000_000)
    message.open.tokens = b"\0\0\0\0"
    command = parse_command(message, Peer(1), 4, (draft_pb2.PROPOSER_PROMPT_LOOKUP,))
    assert isinstance(command, Ask)
    assert command.traceparent == ""


def test_a_worker_makes_no_span_for_a_context_that_is_none() -> None:
    spans, exporter = recorder()
    worker = WorkerSpans(spans)
    for header in (f"00-{'0' * 32}-{'0' * 16}-01", SENT[:-2] + "00", "x"):
        worker.item(Item("verify block", header, 0.0, None, [], {}))
    assert not exporter.get_finished_spans()
    worker.item(Item("verify block", SENT, 0.0, None, [], {}))
    assert [span.name for span in exporter.get_finished_spans()] == ["verify block"]


@pytest.mark.parametrize(("follows", "names"), [(True, ["/Generate"]), (False, [])])
async def test_a_stranger_decides_what_is_recorded_only_where_traces_are_followed(
    follows: bool, names: list[str]
) -> None:
    """The sampler says no to whoever has no parent that was sampled."""
    spans, exporter = recorder(ParentBased(ALWAYS_OFF))
    await call(spans, (("traceparent", SENT),), follows=follows)
    await call(spans, (), follows=follows)
    told = [span.name.removeprefix("outrider.v1.OrchestratorService") for span in exporter.get_finished_spans()]
    assert told == names


async def test_a_trace_of_its_own_points_to_the_clients() -> None:
    spans, exporter = recorder()
    client = remote_context(SENT)
    for header in (SENT, SENT[:-2] + "00", "x"):
        await call(spans, (("traceparent", header),), follows=False)
    ours = exporter.get_finished_spans()
    assert [span.parent for span in ours] == [None] * 3
    assert client.trace_id not in {span.get_span_context().trace_id for span in ours}
    assert [[link.context.span_id for link in span.links] for span in ours] == [[client.span_id], [client.span_id], []]


async def call(spans: Spans, metadata: tuple[tuple[str, str], ...], *, follows: bool) -> None:
    """A call in a task of its own, as the server makes them."""

    async def handle() -> None:
        with traced(spans, "chat", metadata, follows=follows):
            pass

    await asyncio.create_task(handle())


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
