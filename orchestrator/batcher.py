"""Turns the verify items of many sessions into few calls to one target worker.

Continuous: a call leaves as soon as the worker has room, with whatever waits at that moment; there is no window to wait
for. Items that carry a long prefix go in calls of their own, because a call is answered when its last item is done.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2
from outrider.v1.target_pb2 import VerifyItem, VerifyResponse, VerifyResult

Send = Callable[[Sequence[VerifyItem]], Awaitable[VerifyResponse]]

# Items with more new tokens than this do not share a call: its neighbours would wait for a prompt.
SHORT_ITEM_TOKENS = 128
_BYTES_PER_TOKEN = 4


@dataclass
class _Lane:
    """Items that wait for one kind of call."""

    max_items: int
    slots: asyncio.Semaphore
    waiting: deque[tuple[VerifyItem, "asyncio.Future[VerifyResult]"]] = field(default_factory=deque)


class Batcher:
    """Batches items for one target worker.

    Args:
        send: one Verify call; raises OutriderError when the call as a whole failed.
        max_items: most items of one call.
        calls_in_flight: calls that the worker may hold at once: one that it computes and one that waits for it.
        prefills_in_flight: calls with a long prefix that the worker may hold at once.
    """

    def __init__(
        self, send: Send, *, max_items: int = 256, calls_in_flight: int = 2, prefills_in_flight: int = 8
    ) -> None:
        self._send = send
        self._short = _Lane(max_items, asyncio.Semaphore(calls_in_flight))
        self._long = _Lane(1, asyncio.Semaphore(prefills_in_flight))
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: dict[str, asyncio.Future[VerifyResponse]] = {}

    async def verify(self, item: VerifyItem) -> VerifyResult:
        """The result of one item. Raises OutriderError when its call failed; cancelling drops the item."""
        lane = self._short if len(item.prefix_tokens) <= SHORT_ITEM_TOKENS * _BYTES_PER_TOKEN else self._long
        future: asyncio.Future[VerifyResult] = asyncio.get_running_loop().create_future()
        lane.waiting.append((item, future))
        self._spawn(self._pump(lane))
        return await future

    async def answered(self, session_id: str, within: float) -> None:
        """Returns when no call is under way that holds an item of the session, at the latest after `within` seconds.

        An item that was dropped travels on in its call when neighbours wait for that one.
        """
        call = self._under_way.get(session_id)
        if call is not None:
            await asyncio.wait({call}, timeout=within)

    async def close(self) -> None:
        """Cancels what waits and what is in flight."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, lane: _Lane) -> None:
        """Waits for room, then sends everything that waits by then."""
        async with lane.slots:
            batch = self._take(lane)
            if batch:
                await self._call(batch)

    def _take(self, lane: _Lane) -> list[tuple[VerifyItem, "asyncio.Future[VerifyResult]"]]:
        batch: list[tuple[VerifyItem, asyncio.Future[VerifyResult]]] = []
        while lane.waiting and len(batch) < lane.max_items:
            item, future = lane.waiting.popleft()
            if not future.done():
                batch.append((item, future))
        return batch

    async def _call(self, batch: list[tuple[VerifyItem, "asyncio.Future[VerifyResult]"]]) -> None:
        futures = [future for _, future in batch]
        call = asyncio.ensure_future(self._send([item for item, _ in batch]))  # noqa: RUF006, awaited below
        abandon = _cancel_when_all_done(futures, call)
        sessions = [item.session_id for item, _ in batch]
        self._under_way.update(dict.fromkeys(sessions, call))
        try:
            _deliver(batch, await call)
        except OutriderError as error:
            _fail(futures, error)
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
        finally:
            _fail(futures, OutriderError(types_pb2.ERROR_REASON_NO_WORKER, "the verify call was abandoned"))
            for future in futures:
                future.remove_done_callback(abandon)
            for session_id in sessions:
                if self._under_way.get(session_id) is call:
                    del self._under_way[session_id]


def _being_cancelled() -> bool:
    """Whether the running task is to end, as opposed to something that it awaited having been cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancel_when_all_done(
    futures: list["asyncio.Future[VerifyResult]"], call: "asyncio.Future[VerifyResponse]"
) -> Callable[["asyncio.Future[VerifyResult]"], None]:
    """Cancels the call when every session that waits for it has gone."""

    def on_done(_: "asyncio.Future[VerifyResult]") -> None:
        if all(future.done() for future in futures):
            call.cancel()

    for future in futures:
        future.add_done_callback(on_done)
    return on_done


def _deliver(batch: list[tuple[VerifyItem, "asyncio.Future[VerifyResult]"]], response: VerifyResponse) -> None:
    """Pairs results with items by position, and checks that they are about the same round."""
    results = list(response.results)
    for index, (item, future) in enumerate(batch):
        if future.done():
            continue
        result = results[index] if index < len(results) else None
        if result is None or (result.session_id, result.base_length) != (item.session_id, item.base_length):
            future.set_exception(
                OutriderError(types_pb2.ERROR_REASON_NO_PROGRESS, "the target answered for another session or round")
            )
        else:
            future.set_result(result)


def _fail(futures: list["asyncio.Future[VerifyResult]"], error: OutriderError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
