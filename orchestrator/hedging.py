"""Asking a second draft worker for a block that is late: when, and how often. Policy over numbers.

Exact by construction. Whether and when a second worker is asked follows from waits of the past and the clock, and the
block that came first is used, whatever is in it. Both workers draw with the noise of seed, position and base length,
which knows no worker, and each ships the law that it drew from: whichever block is used, it is a draw from its own law.
"""

from collections import deque

# Waits of a worker that are looked at, the fewest to begin with, and which of them a block must outlast.
_MEMORY, _FEWEST, _QUANTILE = 128, 32, 0.98
# A prefix that the second worker would have to read first takes too long beyond so many tokens.
MOST_TOKENS = 1_024
# Hedges saved up while nothing was late.
_MOST_CREDIT = 2.0


class Waits:
    """How long rounds waited for the blocks of one worker, those that were there before aside. In seconds."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_MEMORY)

    def observe(self, seconds: float) -> None:
        """One more."""
        self._waits.append(seconds)

    @property
    def patience(self) -> float | None:
        """How long nearly all took; None while too little is known."""
        if len(self._waits) < _FEWEST:
            return None
        return sorted(self._waits)[int(_QUANTILE * len(self._waits))]


class HedgeBudget:
    """Bounds hedges to a share of the blocks that rounds wait for. At a share of 0 there are none."""

    def __init__(self, share: float = 0.0) -> None:
        self._share = share
        self._credit = 0.0

    @property
    def open(self) -> bool:
        """Whether there may be any."""
        return self._share > 0.0

    def waited(self) -> None:
        """A round waits for its block."""
        self._credit = min(self._credit + self._share, _MOST_CREDIT)

    def spend(self) -> bool:
        """Whether one more is within the bound; it is then counted."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True
