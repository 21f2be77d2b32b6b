"""The spans of a request: one for the call, one for each round of its sessions, and in these what the round waited for.

A request that is not recorded has no RequestTrace, and its sessions no SessionTrace: nothing is done for their rounds.
For one that is, a round costs some readings of the clock; its spans are made of them when they are sent.
What is told of a request is numbers and names, never its text or its tokens.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import grpc
from opentelemetry.context import Context, attach
from opentelemetry.trace import INVALID_SPAN_CONTEXT, Span, SpanContext, SpanKind, StatusCode, set_span_in_context

from orchestrator.ending import answer, error_type
from orchestrator.latency import RESUME
from orchestrator.names import told
from orchestrator.request import GenerationPlan
from orchestrator.round_spans import RoundTrace, TracedStats, round_spans
from orchestrator.stats import RoundStats
from orchestrator.text.output import Kept
from outrider.observe.tracing import HEADER, Spans, remote_context
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import Acceptance, FinishReason, TokenOrigin

_SERVICE = orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name

# Codes that are the server's fault, by OpenTelemetry's conventions; any other is an answer.
_ERRORS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}

_current: "ContextVar[RequestTrace | None]" = ContextVar("request_trace", default=None)


@contextmanager
def traced(
    spans: Spans | None, operation: str, metadata: Iterable[tuple[str, str | bytes]] | None, *, follows: bool = True
) -> Iterator[None]:
    """The span of a call, which is the current one in its task and those that it starts; log records carry its ids.

    Args:
        operation: CHAT, COMPLETION or RESUME.
        metadata: what the client sent, the trace that it is in included.
        follows: whether that trace is gone on with, and recorded if the client records it. Otherwise another one is
            begun, which the sampler decides on, and which is linked to the client's.
    """
    if spans is None:
        yield
        return
    method = f"{_SERVICE}/{'Resume' if operation == RESUME else 'Generate'}"
    attributes = {
        "rpc.system.name": "grpc",
        "rpc.method": method,
        "gen_ai.provider.name": "outrider",
        "gen_ai.operation.name": operation,
    }
    client = _parent(metadata)
    parent, links = (client, ()) if follows else (INVALID_SPAN_CONTEXT, (client,) if client.is_valid else ())
    span = spans.begin(method, parent, SpanKind.SERVER, attributes, links)
    # Never detached: the context is the call's own task's, and ends with it.
    attach(set_span_in_context(span, Context()))
    if not span.is_recording():
        yield
        return
    request = RequestTrace(spans, span)
    _current.set(request)
    try:
        yield
    except BaseException as error:
        request.failed(error)
        raise
    else:
        request.answered(grpc.StatusCode.OK)
    finally:
        request.end()


def _parent(metadata: Iterable[tuple[str, str | bytes]] | None) -> SpanContext:
    values = [value for key, value in metadata or () if key == HEADER]
    return remote_context(values[0] if len(values) == 1 and isinstance(values[0], str) else "")


class RequestTrace:
    """The span of a call while it runs, and what its sessions come to together."""

    def __init__(self, spans: Spans, span: Span) -> None:
        self.spans, self._span = spans, span
        self.context = span.get_span_context()
        self._trace = f"00-{self.context.trace_id:032x}-", f"-{self.context.trace_flags:02x}"
        self._prompt = self._output = self._rounds = self._drafted = self._accepted = 0
        self._finishes: list[str] = []

    @staticmethod
    def current() -> "RequestTrace | None":
        """That of the call that is being handled, if it is recorded."""
        return _current.get()

    def traceparent(self, span_id: int) -> str:
        """Of a span in its trace."""
        begin, end = self._trace
        return f"{begin}{span_id:016x}{end}"

    def session(self, plan: GenerationPlan) -> "SessionTrace":
        """A session of the call begins."""
        self._prompt = len(plan.prompt)
        self._span.set_attributes(
            {
                "gen_ai.request.max_tokens": plan.stop.max_tokens,
                "gen_ai.request.temperature": plan.law.temperature,
                "gen_ai.request.top_p": plan.law.top_p,
                "gen_ai.request.top_k": plan.law.top_k,
                "outrider.acceptance": Acceptance.Name(plan.acceptance).removeprefix("ACCEPTANCE_"),
                "outrider.lookahead": plan.lookahead,
                "outrider.lookahead.adaptive": plan.adaptive,
                "outrider.resumable": plan.resumable,
            }
        )
        return SessionTrace(self, told(plan.session_id))

    def resumed(self, generated: int) -> None:
        """The call goes on with a session that has so many tokens."""
        self._span.set_attributes({"outrider.resumed": True, "outrider.resumed.tokens": generated})

    def committed(self, stats: RoundStats, kept: Kept) -> None:
        """A round of one of its sessions is done."""
        if not self._rounds:
            self._span.add_event("first token")
        self._rounds += 1
        self._drafted += stats.drafted
        self._accepted += stats.accepted
        self._output += len(kept.tokens)
        if kept.finish is not None:
            self._finishes.append(FinishReason.Name(kept.finish.reason).removeprefix("FINISH_REASON_").lower())

    def failed(self, error: BaseException) -> None:
        """The call ends with the status that the service makes of an error."""
        failure = answer(error)
        self.answered(failure.code if failure is not None else grpc.StatusCode.CANCELLED, error_type(error))

    def answered(self, code: grpc.StatusCode, error: str = "") -> None:
        """The call has this status."""
        self._span.set_attributes({"rpc.grpc.status_code": code.value[0], "rpc.response.status_code": code.name})
        if error:
            self._span.set_attribute("error.type", error)
        if code in _ERRORS:
            self._span.set_status(StatusCode.ERROR, error)

    def end(self) -> None:
        """The call is over."""
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": self._prompt,
                "gen_ai.usage.output_tokens": self._output,
                "gen_ai.response.finish_reasons": self._finishes,
                "outrider.rounds": self._rounds,
                "outrider.drafted": self._drafted,
                "outrider.accepted": self._accepted,
            }
        )
        self._span.end()


class SessionTrace:
    """The rounds of a session."""

    def __init__(self, request: RequestTrace, session_id: str) -> None:
        self._request, self._session_id = request, session_id
        # The one that is committed, and the one that was begun meanwhile.
        self._rounds: list[RoundTrace] = []

    def next_round(self) -> tuple[str, str]:
        """The next round begins with asking for its block: the traceparents of its commands and its Verify calls."""
        one = RoundTrace(self._request.context, self._session_id)
        self._rounds.append(one)
        return self._request.traceparent(one.span_id), self._request.traceparent(one.verify_id)

    def stats(self, base_length: int) -> TracedStats:
        """Those of the newest round, which is waited for from now on."""
        stats = self._rounds[-1].stats = TracedStats(base_length)
        return stats

    def committed(self, stats: RoundStats, kept: Kept, origin: TokenOrigin.ValueType) -> None:
        """A round is done."""
        self._request.committed(stats, kept)
        one = next(each for each in self._rounds if each.stats is stats)
        self._rounds.remove(one)
        one.emitted, one.origin = len(kept.tokens), origin
        self._end(one)

    def close(self) -> None:
        """What was begun is not done any more."""
        for each in self._rounds:
            self._end(each)
        self._rounds = []

    def _end(self, one: RoundTrace) -> None:
        one.ended_at = time.perf_counter()
        spans = self._request.spans
        spans.later(partial(round_spans, spans, one))
