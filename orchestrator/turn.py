"""What many sessions ask for in one turn of the event loop, done in one call.

The rows of a Verify response wake their sessions together, and so do the blocks of one draft message; what each of them
then needs is the same small work on other arrays.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from orchestrator.futures import settle
from orchestrator.running import interrupted

Work = TypeVar("Work")
Result = TypeVar("Result")


class Turn(Generic[Work, Result]):
    """Lives on the event loop.

    Args:
        do: results of some works, in their order; an exception in the place of a result is raised where it was asked
            for, and one that is raised, wherever something was.
        size: of one work.
        largest: sum of sizes that one call gets, unless a single work has more; the rest waits for the next turn.
    """

    def __init__(
        self, do: Callable[[Sequence[Work]], Sequence[Result | Exception]], size: Callable[[Work], int], largest: int
    ) -> None:
        self._do, self._size, self._largest = do, size, largest
        self._waiting: dict[asyncio.Future[Result], Work] = {}

    async def result(self, work: Work) -> Result:
        """The result of one work. Cancelling drops it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting[future] = work
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    def close(self) -> None:
        """Ends what waits, with OutriderError."""
        for future in self._waiting:
            settle(future, interrupted())
        self._waiting.clear()

    def _flush(self) -> None:
        futures, works = self._take()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        if not works:
            return
        try:
            results = self._do(works)
        except Exception as error:
            results = [error] * len(works)
        for future, result in zip(futures, results, strict=True):
            settle(future, result)

    def _take(self) -> tuple[list["asyncio.Future[Result]"], list[Work]]:
        """The oldest that fit into one call."""
        taken: list[asyncio.Future[Result]] = []
        total = 0
        for future, work in self._waiting.items():
            total += self._size(work)
            if taken and total > self._largest:
                break
            taken.append(future)
        works = [self._waiting.pop(future) for future in taken]
        return taken, works
