"""What a wait is told from."""

import pytest

from orchestrator.throughput import Throughput


def busy(throughput: Throughput, begin: float, seconds: float, each: float) -> float:
    """Something waits for so many seconds, and a request ends every so often."""
    throughput.waits(True, begin)
    for index in range(round(seconds / each)):
        throughput.ended(begin + (index + 1) * each)
    return begin + seconds


def test_a_wait_is_told_from_the_ends_of_late() -> None:
    one = Throughput()
    now = busy(one, 0.0, 2.0, 0.1)
    assert one.seconds_for(5, now) == pytest.approx(0.5, rel=0.1)
    now = busy(one, now, 60.0, 0.5)
    assert one.seconds_for(4, now) == pytest.approx(2.0, rel=0.1)


def test_too_little_tells_nothing() -> None:
    one = Throughput()
    now = busy(one, 0.0, 0.3, 0.1)
    assert one.seconds_for(5, now) == 0.0


def test_time_in_which_nothing_waits_does_not_count() -> None:
    one = Throughput()
    now = busy(one, 0.0, 5.0, 0.1)
    one.waits(False, now)
    one.ended(now + 1_000.0)
    one.waits(True, now + 1_000.0)
    assert one.seconds_for(5, now + 1_000.0) == pytest.approx(0.5, rel=0.1)


def test_when_nothing_ends_any_more_the_wait_grows() -> None:
    one = Throughput()
    now = busy(one, 0.0, 10.0, 0.1)
    assert one.seconds_for(1, now + 60.0) > 20.0
