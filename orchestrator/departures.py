"""When the next call to a target worker leaves: so that the worker serves most sessions in its time.

While the worker computes, a call that came earlier would only wait there, without the sessions that are back in the
meantime; so it leaves just as the pass before is expected to end. Then it leaves with those who wait, or is held for
those who will be back soon, whichever serves more sessions for each second from then on until its pass ends. Sessions
go on together, in one pass, where they are all back within less than a pass costs beside its positions; where blocks
take longer, they fall into groups that take turns.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

# Who is late is expected after as long again as he is late, and not before so many seconds.
_SOON = 0.0005
# Passes of those who wait that nobody is held for longer.
_PATIENCE = 2.0


class Pace(Protocol):
    """What calls take, as measured, in seconds."""

    def call_seconds(self, items: int) -> float:
        """The pass over so many items; 0 while that is not known."""

    def gap_seconds(self) -> float:
        """From a call's answer until the last of its sessions is back."""

    def observe_gap(self, mean: float, last: float) -> None:
        """The sessions of a call were back after so long on average, the last of them after so long."""


@dataclass(eq=False)
class Trip:
    """The sessions of one call, from when it leaves until they are back with their next items.

    Attributes:
        out: who is not back.
        due: when the last of them is expected.
        answered: when the call returned; None before.
        gaps: how long those who are back took since then.
    """

    out: set[str]
    due: float
    answered: float | None = None
    gaps: list[float] = field(default_factory=list)


class Departures:
    """Times are those of the event loop.

    Args:
        most: items of a call.
    """

    def __init__(self, pace: Pace, most: int) -> None:
        self._pace, self._most = pace, most
        self._trips: dict[Trip, None] = {}
        self._trip_of: dict[str, Trip] = {}
        self._calls = 0
        self._busy_until = 0.0

    def left(self, sessions: Iterable[str], now: float) -> Trip:
        """A call left that holds items of these sessions."""
        trip = Trip(set(sessions), 0.0)
        self._calls += 1
        self._busy_until = max(now, self._busy_until) + self._pace.call_seconds(len(trip.out))
        trip.due = self._busy_until + self._pace.gap_seconds()
        for session in trip.out:
            self.away(session)
            self._trip_of[session] = trip
        self._trips[trip] = None
        return trip

    def answered(self, trip: Trip, now: float) -> None:
        """The call returned, or failed."""
        self._calls -= 1
        if not self._calls:
            self._busy_until = now
        trip.answered, trip.due = now, now + self._pace.gap_seconds()

    def back(self, session: str, now: float) -> None:
        """An item of the session waits for a call."""
        trip = self._trip_of.get(session)
        if trip is not None and trip.answered is not None:
            trip.gaps.append(now - trip.answered)
        self.away(session)

    def away(self, session: str) -> None:
        """The session is not expected, whatever call it was in."""
        trip = self._trip_of.pop(session, None)
        if trip is None:
            return
        trip.out.remove(session)
        if not trip.out:
            del self._trips[trip]
            if trip.gaps:
                self._pace.observe_gap(sum(trip.gaps) / len(trip.gaps), max(trip.gaps))

    def delay(self, waiting: int, now: float) -> float:
        """In how many seconds the next call should leave, as it looks now; `waiting` items would go along at once."""
        seconds = self._pace.call_seconds
        if not seconds(waiting):
            return 0.0
        if now < self._busy_until:
            return self._busy_until - now
        self._give_up(now)
        items, best = min(waiting, self._most), 0.0
        alone = seconds(items)
        served = items / alone
        for due, out in sorted((self._expected(trip, now), len(trip.out)) for trip in self._trips):
            if due >= _PATIENCE * alone:
                # Passes without them are over by then.
                break
            items = min(items + out, self._most)
            if items > served * (due + seconds(items)):
                served, best = items / (due + seconds(items)), due
        return best

    def _give_up(self, now: float) -> None:
        """Forgets who does not come back: a client may take its time to read."""
        latest = now - self._pace.gap_seconds() - self._pace.call_seconds(1)
        for trip in [trip for trip in self._trips if trip.answered is not None and trip.due < latest]:
            for session in list(trip.out):
                self.away(session)

    def _expected(self, trip: Trip, now: float) -> float:
        """In how many seconds."""
        return trip.due - now if trip.due > now else max(now - trip.due, _SOON)
