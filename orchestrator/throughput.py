"""How many requests end a second while others wait for them: what a wait is told from."""

import math

# Seconds of waiting over which the rate is averaged.
_MEMORY = 10.0
# Ends before the rate is believed.
_LEAST_ENDS = 4


class Throughput:
    """A decaying mean over the time in which something waited: an idle hour says nothing about a busy one."""

    def __init__(self) -> None:
        self._counted_to: float | None = None
        self._seconds = self._ended = 0.0
        self._ends = 0

    def waits(self, waiting: bool, now: float) -> None:
        """Whether something waits from now on."""
        self._pass(now)
        self._counted_to = now if waiting else None

    def ended(self, now: float) -> None:
        """A request has ended; one that nobody waited for does not count."""
        if self._counted_to is not None:
            self._pass(now)
            self._ended += 1.0
            self._ends += 1

    def seconds_for(self, requests: float, now: float) -> float:
        """How long so many take to end; 0 while too few have ended to know."""
        self._pass(now)
        if self._ends < _LEAST_ENDS or not self._seconds:
            return 0.0
        return requests * self._seconds / max(self._ended, 1e-9)

    def _pass(self, now: float) -> None:
        """Counts the time since; what is older weighs less."""
        if self._counted_to is None:
            return
        kept = math.exp((self._counted_to - now) / _MEMORY)
        self._seconds = self._seconds * kept + _MEMORY * (1.0 - kept)
        self._ended *= kept
        self._counted_to = now
