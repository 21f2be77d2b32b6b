"""The spans of a round, from what was noted; and nothing is noted of a round that is not traced."""

import time

from orchestrator.round_spans import RoundTrace, TracedStats, round_spans
from orchestrator.stats import RoundStats
from outrider.observe.tracing import remote_context
from outrider.v1.orchestrator_pb2 import TOKEN_ORIGIN_BONUS
from tests.harness.spans import recorder

CALL = remote_context("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def ended(stats: TracedStats | None, seconds: float, **more: object) -> dict[str, tuple[float, float, int | None]]:
    """By name: begin and end in seconds after the block was asked for, and the parent's id."""
    one = RoundTrace(CALL, "name", 1, 2, stats=stats, **more)  # type: ignore[arg-type]
    one.ended_at = one.asked_at + seconds
    made = round_spans(recorder()[0], one)
    (begin,) = [span.start_time for span in made if span.name == "round"]
    assert begin is not None
    assert abs(time.time_ns() / 1e9 - (time.perf_counter() - one.asked_at) - begin / 1e9) < 0.05
    return {
        span.name: (
            round(((span.start_time or 0) - begin) / 1e9, 3),
            round(((span.end_time or 0) - begin) / 1e9, 3),
            span.parent.span_id if span.parent else None,
        )
        for span in made
    }


def noted() -> TracedStats:
    stats, now = TracedStats(7), time.perf_counter()
    stats.began = {"draft wait": now, "verify": now + 1, "accept": now + 4, "commit": now + 5}
    stats.draft_wait_micros, stats.verify_micros, stats.accept_micros, stats.commit_micros = (10**6,) * 4
    stats.queued_at, stats.left_at = now + 1, now + 1.5
    return stats


def test_a_round_is_as_long_as_what_it_waited_for() -> None:
    assert ended(noted(), 6.0, origin=TOKEN_ORIGIN_BONUS) == {
        "round": (0.0, 6.0, CALL.span_id),
        "draft wait": (0.0, 1.0, 1),
        "verify": (1.0, 2.0, 1),
        "batch wait": (1.0, 1.5, 2),
        "accept": (4.0, 5.0, 1),
        "commit": (5.0, 6.0, 1),
    }


def test_what_a_dropped_round_began_ends_with_it() -> None:
    stats = TracedStats(7)
    start = stats.begins("verify")
    stats.queued(start)
    stats.attempt_failed("NO_WORKER", "h:1")
    found = ended(stats, 3.0)
    assert found == {"round": (0.0, 3.0, CALL.span_id), "verify": (0.0, 3.0, 1), "batch wait": (0.0, 3.0, 2)}
    assert ended(None, 3.0) == {"round": (0.0, 3.0, CALL.span_id)}


def test_the_last_attempt_is_the_one_that_waited() -> None:
    stats = TracedStats(0)
    for moment in (1.0, 5.0):
        stats.queued(moment)
        stats.left(moment + 1)
    stats.queued(9.0)
    assert (stats.queued_at, stats.left_at) == (9.0, 0.0)


def test_a_round_that_is_not_traced_keeps_its_counts_alone() -> None:
    plain, traced = RoundStats(3), TracedStats(3)
    before = vars(plain).copy()
    for stats in (plain, traced):
        stats.begins("verify")
        stats.queued(1.0)
        stats.left(2.0)
        stats.attempt_failed("NO_WORKER", "h:1")
    assert vars(plain) == before
    assert plain.message() == traced.message()
