"""The spans of a round, made of what was noted while it ran."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind

from orchestrator.choosing import name
from orchestrator.stats import Part, RoundStats
from outrider.observe.tracing import Attributes, Spans, child, epoch_nanos, new_span_id
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import PlainReason, TokenOrigin


@dataclass
class TracedStats(RoundStats):
    """Statistics that keep when the parts of the round began, in time.perf_counter()'s seconds.

    Attributes:
        began: by part.
        queued_at, left_at: when the item of the last attempt began to wait for a call, and when that left; 0 before.
        failures: (when, reason, worker) of attempts at verifying that came to nothing.
    """

    began: dict[Part, float] = field(default_factory=dict)
    queued_at: float = 0.0
    left_at: float = 0.0
    failures: list[tuple[float, str, str]] = field(default_factory=list)

    def begins(self, part: Part) -> float:
        """Notes it."""
        moment = self.began[part] = time.perf_counter()
        return moment

    def queued(self, moment: float) -> None:
        """Notes it, of the last attempt."""
        self.queued_at, self.left_at = moment, 0.0

    def left(self, moment: float) -> None:
        """Notes it."""
        self.left_at = moment

    def attempt_failed(self, reason: str, worker: str) -> None:
        """Notes it."""
        self.failures.append((time.perf_counter(), reason, worker))


@dataclass(eq=False, slots=True)
class RoundTrace:
    """A round, from asking for its block until it is committed or dropped.

    Attributes:
        call: the span that it is in.
        session_id: as clients know it.
        span_id, verify_id: of its span, and of the span in it that its Verify calls are made in.
        asked_at, ended_at: in time.perf_counter()'s seconds.
        stats: once it is waited for.
        emitted: of its tokens.
        origin: of its last token; unspecified when it was dropped.
    """

    call: SpanContext
    session_id: str
    span_id: int = field(default_factory=new_span_id)
    verify_id: int = field(default_factory=new_span_id)
    asked_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0
    stats: TracedStats | None = None
    emitted: int = 0
    origin: TokenOrigin.ValueType = orchestrator_pb2.TOKEN_ORIGIN_UNSPECIFIED


def round_spans(spans: Spans, one: RoundTrace) -> list[ReadableSpan]:
    """The span of the round, and those in it: whatever it began and did not end, ended with it."""
    stats, now = one.stats or TracedStats(0), time.perf_counter()
    context, verify = child(one.call, one.span_id), child(one.call, one.verify_id)

    def part(name: Part, micros: int, own: SpanContext | None = None, **more: object) -> None:
        began = stats.began.get(name)
        if began is not None:
            ended = began + micros / 1e6 if micros else one.ended_at
            times = epoch_nanos(began, now), epoch_nanos(ended, now)
            made.append(spans.ended(name, context, *times, context=own, **more))  # type: ignore[arg-type]

    asked, ended = epoch_nanos(one.asked_at, now), epoch_nanos(one.ended_at, now)
    made = [spans.ended("round", one.call, asked, ended, _attributes(one, stats), context=context)]
    part("draft wait", stats.draft_wait_micros)
    part(
        "verify",
        stats.verify_micros,
        verify,
        kind=SpanKind.CLIENT,
        attributes=_verify_attributes(stats),
        events=_failures(stats, now),
    )
    if stats.queued_at:
        left = epoch_nanos(stats.left_at or one.ended_at, now)
        made.append(spans.ended("batch wait", verify, epoch_nanos(stats.queued_at, now), left))
    part("accept", stats.accept_micros)
    part("commit", stats.commit_micros)
    return made


def _attributes(one: RoundTrace, stats: RoundStats) -> Attributes:
    hit = "none" if not stats.drafted_ahead else "hit" if stats.drafted_ahead == stats.drafted else "part"
    attributes: dict[str, str | int | bool] = {
        "outrider.session_id": one.session_id,
        "outrider.base_length": stats.base_length,
        "outrider.lookahead": stats.asked,
        "outrider.proposer": name(stats.proposer),
        "outrider.drafted": stats.drafted,
        "outrider.ahead": hit,
        "outrider.block_ready": stats.block_ready,
        "outrider.wire_bytes": stats.wire_bytes,
    }
    if not one.origin:
        return {**attributes, "outrider.dropped": True}
    last = TokenOrigin.Name(one.origin).removeprefix("TOKEN_ORIGIN_").lower()
    attributes |= {
        "outrider.accepted": stats.accepted,
        "outrider.emitted": one.emitted,
        "outrider.origin.accepted": stats.accepted,
        f"outrider.origin.{last}": 1,
    }
    if stats.proposer_choice:
        attributes["outrider.proposer.choice"] = stats.proposer_choice
    if stats.plain_reason:
        attributes["outrider.plain_reason"] = PlainReason.Name(stats.plain_reason).removeprefix("PLAIN_REASON_")
    return attributes


def _verify_attributes(stats: RoundStats) -> Attributes:
    return {
        "outrider.verify.queue_micros": stats.verify_queue_micros,
        "outrider.verify.forward_micros": stats.verify_forward_micros,
        "outrider.verify.passes": stats.target_passes,
    }


def _failures(stats: TracedStats, now: float) -> Sequence[Event]:
    return [
        Event("attempt failed", {"error.type": reason, "server.address": worker}, epoch_nanos(moment, now))
        for moment, reason, worker in stats.failures
    ]
