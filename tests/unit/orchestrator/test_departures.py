"""When calls leave: once the worker is about to be free, with whom that serves most sessions in its time."""

from collections.abc import Sequence

import pytest

from orchestrator.departures import Departures


class Fixed:
    """Passes of 1 s and 0.1 s an item; sessions are back after `gap`."""

    def __init__(self, gap: float = 0.0, *, known: bool = True) -> None:
        self.gap, self.known = gap, known
        self.seen: list[tuple[float, float]] = []

    def call_seconds(self, items: int) -> float:
        return 1.0 + 0.1 * items if self.known else 0.0

    def gap_seconds(self) -> float:
        return self.gap

    def observe_gap(self, mean: float, last: float) -> None:
        self.seen.append((mean, last))


def after_a_call(gap: float, sessions: Sequence[str], most: int = 100) -> Departures:
    """A call of these sessions left at 0 and returned at 2."""
    departures = Departures(Fixed(gap), most)
    departures.answered(departures.left(sessions, 0.0), 2.0)
    return departures


def test_nothing_is_held_while_nothing_is_known() -> None:
    departures = Departures(Fixed(known=False), 100)
    departures.left(["a"], 0.0)
    assert departures.delay(1, 0.1) == 0.0


def test_a_call_leaves_as_the_pass_before_ends() -> None:
    departures = Departures(Fixed(10.0), 100)
    departures.left(["a", "b"], 0.0)
    assert departures.delay(1, 0.5) == pytest.approx(0.7)
    departures.left(["c"], 1.2)
    assert departures.delay(1, 1.3) == pytest.approx(1.0)


def test_who_is_back_sooner_than_a_pass_costs_is_waited_for() -> None:
    together = after_a_call(0.9, "abcd")
    together.back("a", 2.5)
    assert together.delay(1, 2.5) == pytest.approx(0.4)
    for session in "bcd":
        together.back(session, 2.6)
    assert together.delay(4, 2.6) == 0.0


def test_two_groups_of_which_one_takes_longer_than_a_pass_costs_take_turns() -> None:
    """Four wait, four others are back in 1.1 s: 4 in 1.4 s are more than 8 in 2.9 s; in 0.9 s they would be fewer."""
    assert after_a_call(1.1, "abcd").delay(4, 2.0) == 0.0
    assert after_a_call(0.9, "abcd").delay(4, 2.0) == pytest.approx(0.9)


def test_nobody_is_waited_for_who_comes_two_passes_later() -> None:
    many = [str(number) for number in range(100)]
    assert after_a_call(2.3, many).delay(1, 2.0) == 0.0
    assert after_a_call(2.0, many).delay(1, 2.0) == pytest.approx(2.0)


def test_who_is_late_is_waited_for_a_while() -> None:
    departures = after_a_call(0.5, "abcd")
    for session in "abc":
        departures.back(session, 2.4)
    assert departures.delay(3, 2.5) > 0.0
    assert departures.delay(3, 2.6) == pytest.approx(0.1)
    assert departures.delay(3, 3.0) == 0.0


def test_who_is_away_is_not_waited_for() -> None:
    departures = after_a_call(0.5, "ab")
    departures.back("a", 2.2)
    assert departures.delay(1, 2.2) > 0.0
    departures.away("b")
    assert departures.delay(1, 2.2) == 0.0
    departures.away("b")
    departures.away("unknown")


def test_who_does_not_come_back_is_forgotten_and_tells_nothing() -> None:
    departures = after_a_call(0.5, "ab")
    departures.back("a", 2.2)
    assert departures.delay(1, 5.0) == 0.0
    departures.back("b", 5.0)
    assert departures._trips == {}
    assert departures._pace.seen == [(pytest.approx(0.2), pytest.approx(0.2))]  # type: ignore[attr-defined]


def test_the_gap_is_measured_from_the_answer_until_the_last_is_back() -> None:
    departures = after_a_call(0.5, "ab")
    departures.back("a", 2.2)
    departures.back("b", 2.4)
    assert departures._pace.seen == [(pytest.approx(0.3), pytest.approx(0.4))]  # type: ignore[attr-defined]


def test_a_full_call_is_not_held() -> None:
    departures = after_a_call(0.1, "abcd", most=2)
    assert departures.delay(2, 2.0) == 0.0
    assert departures.delay(1, 2.0) == pytest.approx(0.1)


def test_a_call_that_failed_leaves_the_worker_free() -> None:
    departures = Departures(Fixed(0.5), 100)
    trip = departures.left(["a"], 0.0)
    departures.answered(trip, 0.1)
    departures.back("a", 0.1)
    assert departures.delay(1, 0.1) == 0.0
