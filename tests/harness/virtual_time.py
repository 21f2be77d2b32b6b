"""An event loop whose clock jumps: what only sleeps takes no time, and runs the same way every time."""

import asyncio
import selectors
from typing import Any


class _Skipping(selectors.SelectSelector):
    """Selects without waiting; the loop's clock moves on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in virtual time. For what does no input or output and uses no threads."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._skipping.now
