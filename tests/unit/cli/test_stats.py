"""FAILURES I1, I2, I4 where the numbers are shown: ratios from raw counts of verified positions."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.cli.stats import RunStats, ratio, total
from outrider.v1 import orchestrator_pb2 as pb


def counted(*rounds: pb.Round, tokens: int = 0, seconds: float = 0.0) -> RunStats:
    stats = RunStats(tokens=tokens, seconds=seconds)
    for each in rounds:
        stats.add_round(each)
    return stats


def test_i1_acceptance_of_scripted_rounds() -> None:
    stats = counted(*(pb.Round(drafted=4, accepted=accepted, target_passes=1) for accepted in (0, 2, 4)), tokens=9)
    assert (stats.drafted, stats.accepted, stats.rounds) == (12, 6, 3)
    assert stats.acceptance == 0.5
    assert stats.tokens_per_pass == 3.0
    assert stats.acceptance_by_position == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3])


def test_i2_only_verified_positions_count_as_drafted() -> None:
    dropped = pb.Round(plain_reason=pb.PLAIN_REASON_DRAFT_LATE, target_passes=1)
    stats = counted(pb.Round(drafted=2, accepted=2), dropped, pb.Round(drafted=4, accepted=1))
    assert stats.acceptance_by_position == [1.0, 0.5, 0.0, 0.0]
    assert stats.plain == {pb.PLAIN_REASON_DRAFT_LATE: 1}


@pytest.mark.parametrize("stats", [RunStats(), counted(pb.Round(target_passes=1), tokens=1), counted(pb.Round())])
def test_i4_no_division_by_zero_without_drafts(stats: RunStats) -> None:
    assert stats.acceptance is None
    assert stats.acceptance_by_position == []
    assert stats.tokens_per_second is None
    assert ratio(0, 0) is None


def test_times_and_bytes() -> None:
    rounds = (pb.Round(draft_wait_micros=2000, verify_micros=20_000, wire_bytes=500), pb.Round(verify_micros=10_000))
    stats = counted(*rounds, tokens=4, seconds=0.5)
    assert stats.draft_ms == pytest.approx(1.0)
    assert stats.verify_ms == pytest.approx(15.0)
    assert stats.bytes_per_token == 125
    assert stats.tokens_per_second == 8


@st.composite
def rounds(draw: st.DrawFn) -> pb.Round:
    drafted = draw(st.integers(0, 8))
    return pb.Round(drafted=drafted, accepted=draw(st.integers(0, drafted)), wire_bytes=draw(st.integers(0, 100)))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(st.lists(st.lists(rounds(), max_size=6), max_size=4))
def test_total_of_parts_is_the_count_of_all_rounds(parts: list[list[pb.Round]]) -> None:
    whole = counted(*(each for part in parts for each in part))
    assert total(counted(*part) for part in parts) == whole
    assert all(0 <= share <= 1 for share in whole.acceptance_by_position)
    assert sum(whole.accepted_at.values()) == whole.accepted <= whole.drafted == sum(whole.drafted_at.values())


def test_total_does_not_change_its_parts() -> None:
    part = counted(pb.Round(drafted=1, accepted=1))
    assert total([part, part]).accepted_at == {0: 2}
    assert part.accepted_at == {0: 1}
