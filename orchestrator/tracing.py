"""The spans of a request: one for the call, one for each round of its sessions, and in these what the round waited for.

A request that is not recorded has no RequestTrace, and its sessions no SessionTrace: nothing is done for their rounds.
What is told of a request is numbers and names, never its text or its tokens.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import grpc
from opentelemetry.context import Context, attach
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode, set_span_in_context

from orchestrator.ending import answer, error_type
from orchestrator.latency import RESUME
from orchestrator.names import told
from orchestrator.request import GenerationPlan
from orchestrator.stats import RoundStats
from orchestrator.text.output import Kept
from outrider.observe.tracing import HEADER, Event, Spans, epoch_nanos, remote_context, traceparent
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import Acceptance, FinishReason, PlainReason, TokenOrigin

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
def traced(spans: Spans | None, operation: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterator[None]:
    """The span of a call, which is the current one in its task and those that it starts; log records carry its ids.

    Args:
        operation: CHAT, COMPLETION or RESUME.
        metadata: what the client sent; its trace is gone on with.
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
    span = spans.begin(method, _parent(metadata), SpanKind.SERVER, attributes)
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
        self._prompt = self._output = self._rounds = self._drafted = self._accepted = 0
        self._finishes: list[str] = []

    @staticmethod
    def current() -> "RequestTrace | None":
        """That of the call that is being handled, if it is recorded."""
        return _current.get()

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


@dataclass(eq=False)
class RoundTrace:
    """A round that is under way.

    Attributes:
        context: of its span.
        verify: of the span in it that its Verify calls are made in.
        asked_at: when its block was asked for, in time.perf_counter()'s seconds.
        stats: of the round, once it is waited for.
    """

    context: SpanContext
    verify: SpanContext
    asked_at: float = field(default_factory=time.perf_counter)
    stats: RoundStats | None = None


class SessionTrace:
    """The rounds of a session."""

    def __init__(self, request: RequestTrace, session_id: str) -> None:
        self._request, self._spans, self._session_id = request, request.spans, session_id
        # The one that is committed, and the one that was begun meanwhile.
        self._rounds: list[RoundTrace] = []

    def next_round(self) -> tuple[str, str]:
        """The next round begins with asking for its block: the traceparents of its commands and its Verify calls."""
        context, verify = self._spans.child(self._request.context), self._spans.child(self._request.context)
        self._rounds.append(RoundTrace(context, verify))
        return traceparent(context), traceparent(verify)

    def waits(self, stats: RoundStats) -> None:
        """The newest round is waited for from now on."""
        self._rounds[-1].stats = stats

    def committed(self, stats: RoundStats, kept: Kept, origin: TokenOrigin.ValueType) -> None:
        """A round is done: its spans are made."""
        self._request.committed(stats, kept)
        one = next(each for each in self._rounds if each.stats is stats)
        self._rounds.remove(one)
        last = TokenOrigin.Name(origin).removeprefix("TOKEN_ORIGIN_").lower()
        attributes: dict[str, str | int | bool] = {
            "outrider.accepted": stats.accepted,
            "outrider.emitted": len(kept.tokens),
            f"outrider.origin.{last}": 1,
            "outrider.origin.accepted": stats.accepted,
        }
        if stats.plain_reason:
            attributes["outrider.plain_reason"] = PlainReason.Name(stats.plain_reason).removeprefix("PLAIN_REASON_")
        self._record(one, stats, attributes)

    def close(self) -> None:
        """What was begun is not done any more."""
        rounds, self._rounds = self._rounds, []
        for each in rounds:
            self._record(each, each.stats or RoundStats(0), {"outrider.dropped": True})

    def _record(self, one: RoundTrace, stats: RoundStats, attributes: dict[str, str | int | bool]) -> None:
        """The spans of a round: whatever it began and did not end, ends now."""
        now, moments = time.perf_counter(), stats.moments

        def phase(
            name: str,
            parent: SpanContext,
            began: float,
            micros: int,
            context: SpanContext | None = None,
            **more: object,
        ) -> None:
            if began:
                end = began + micros / 1e6 if micros else now
                self._spans.record(
                    name,
                    parent,
                    epoch_nanos(began, now),
                    epoch_nanos(end, now),
                    context=context,
                    **more,  # type: ignore[arg-type]
                )

        failures: list[Event] = [
            ("attempt failed", epoch_nanos(moment, now), {"error.type": reason, "server.address": address})
            for moment, reason, address in moments.failures
        ]
        verify = {
            "outrider.verify.queue_micros": stats.verify_queue_micros,
            "outrider.verify.forward_micros": stats.verify_forward_micros,
            "outrider.verify.passes": stats.target_passes,
        }
        phase("draft wait", one.context, moments.draft_wait, stats.draft_wait_micros)
        phase(
            "verify",
            one.context,
            moments.verify,
            stats.verify_micros,
            one.verify,
            kind=SpanKind.CLIENT,
            attributes=verify,
            events=failures,
        )
        if moments.queued:
            sent = int(max(0.0, (moments.sent or now) - moments.queued) * 1e6)
            phase("batch wait", one.verify, moments.queued, sent)
        phase("accept", one.context, moments.accept, stats.accept_micros)
        phase("commit", one.context, moments.commit, stats.commit_micros)
        hit = "none" if not stats.drafted_ahead else "hit" if stats.drafted_ahead == stats.drafted else "part"
        self._spans.record(
            "round",
            self._request.context,
            epoch_nanos(one.asked_at, now),
            epoch_nanos(now, now),
            {
                "outrider.session_id": self._session_id,
                "outrider.base_length": stats.base_length,
                "outrider.lookahead": moments.lookahead,
                "outrider.drafted": stats.drafted,
                "outrider.ahead": hit,
                "outrider.block_ready": stats.block_ready,
                "outrider.wire_bytes": stats.wire_bytes,
                **attributes,
            },
            context=one.context,
        )
