"""A circuit breaker: stop asking a worker that keeps failing, and find out cheaply when it is well again."""

import time
from collections.abc import Callable


class Breaker:
    """Opens after `threshold` failures in a row; after the cooldown one probe at a time may pass.

    A success closes it, a failed probe doubles the cooldown up to `max_cooldown`. Times in seconds.
    """

    def __init__(
        self,
        threshold: int = 3,
        cooldown: float = 1.0,
        max_cooldown: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_cooldown = self._cooldown = cooldown
        self._max_cooldown = max_cooldown
        self._clock = clock
        self._failures = 0
        self._retry_at = 0.0
        self._probing = False

    @property
    def closed(self) -> bool:
        """Whether calls pass freely."""
        return self._failures < self._threshold

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self._probing

    @property
    def ripe(self) -> bool:
        """Whether it is open and the next call may be the probe."""
        return not self.closed and self._clock() >= self._retry_at

    def allows(self) -> bool:
        """Whether a call may pass now. While open, the call that gets True is the probe."""
        if self.closed:
            return True
        now = self._clock()
        if now < self._retry_at:
            return False
        self._retry_at = now + self._cooldown
        self._probing = True
        return True

    def success(self) -> None:
        """A call went well."""
        self._failures, self._probing = 0, False
        self._cooldown = self._first_cooldown

    def failure(self) -> None:
        """A call failed. While open only a probe's failure counts: the others began before it opened."""
        if self.closed:
            self._failures += 1
            if self.closed:
                return
        elif self._probing:
            self._cooldown = min(2 * self._cooldown, self._max_cooldown)
        else:
            return
        self._probing = False
        self._retry_at = self._clock() + self._cooldown
