"""Turns the verify items of many sessions into few calls to one target worker.

Continuous: a call leaves as soon as the worker has room, with whatever waits at that moment; there is no window to wait
for. Items that carry a long prefix go in calls of their own, because a call is answered when its last item is done.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from orchestrator.running import being_cancelled
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2
from outrider.v1.target_pb2 import VerifyItem, VerifyResponse, VerifyResult

Send = Callable[[Sequence[VerifyItem]], Awaitable[VerifyResponse]]

# Items with more new tokens than this do not share a call: its neighbours would wait for a prompt.
SHORT_ITEM_TOKENS = 128
_BYTES_PER_TOKEN = 4


_Waiting = tuple[VerifyItem, "asyncio.Future[VerifyResult]"]


@dataclass
class _Lane:
    """One kind of call: how many more the worker may hold, and the items that wait for the next one, oldest first."""

    max_items: int
    free_calls: int
    waiting: dict["asyncio.Future[VerifyResult]", VerifyItem] = field(default_factory=dict)

    def take(self) -> list[_Waiting]:
        """The items of the next call."""
        taken = list(islice(self.waiting, self.max_items))
        return [(self.waiting.pop(future), future) for future in taken]


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
        self._short = _Lane(max_items, calls_in_flight)
        self._long = _Lane(1, prefills_in_flight)
        self._calls: set[asyncio.Task[None]] = set()
        self._under_way: dict[str, asyncio.Future[VerifyResponse]] = {}

    async def verify(self, item: VerifyItem) -> VerifyResult:
        """The result of one item. Raises OutriderError when its call failed; cancelling drops the item."""
        loop = asyncio.get_running_loop()
        lane = self._short if len(item.prefix_tokens) <= SHORT_ITEM_TOKENS * _BYTES_PER_TOKEN else self._long
        future: asyncio.Future[VerifyResult] = loop.create_future()
        lane.waiting[future] = item
        # Not at once: what other sessions add in this turn of the loop goes along.
        loop.call_soon(self._pump, lane)
        try:
            return await future
        finally:
            lane.waiting.pop(future, None)

    async def answered(self, session_id: str, within: float) -> None:
        """Returns when no call is under way that holds an item of the session, at the latest after `within` seconds.

        An item that was dropped travels on in its call when neighbours wait for that one.
        """
        call = self._under_way.get(session_id)
        if call is not None:
            await asyncio.wait({call}, timeout=within)

    async def close(self) -> None:
        """Ends what waits and what is in flight."""
        for lane in (self._short, self._long):
            _fail(list(lane.waiting), _abandoned())
            lane.waiting.clear()
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _pump(self, lane: _Lane) -> None:
        """Sends what waits as long as the worker has room."""
        while lane.free_calls and lane.waiting:
            lane.free_calls -= 1
            call = asyncio.create_task(self._call(lane.take()))
            self._calls.add(call)
            call.add_done_callback(partial(self._returned, lane))

    def _returned(self, lane: _Lane, call: "asyncio.Task[None]") -> None:
        self._calls.discard(call)
        lane.free_calls += 1
        self._pump(lane)

    async def _call(self, batch: list[_Waiting]) -> None:
        futures = [future for _, future in batch]
        call = asyncio.ensure_future(self._send([item for item, _ in batch]))  # noqa: RUF006, awaited below
        _cancel_when_all_done(futures, call)
        sessions = [item.session_id for item, _ in batch]
        self._under_way.update(dict.fromkeys(sessions, call))
        try:
            _deliver(batch, await call)
        except OutriderError as error:
            _fail(futures, error)
        except asyncio.CancelledError:
            if being_cancelled():
                raise
        finally:
            _fail(futures, _abandoned())
            for session_id in sessions:
                if self._under_way.get(session_id) is call:
                    del self._under_way[session_id]


def _cancel_when_all_done(
    futures: list["asyncio.Future[VerifyResult]"], call: "asyncio.Future[VerifyResponse]"
) -> None:
    """Cancels the call when every session that waits for it has gone."""
    waiting = len(futures)

    def on_done(_: "asyncio.Future[VerifyResult]") -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:
            call.cancel()

    for future in futures:
        future.add_done_callback(on_done)


def _deliver(batch: list[_Waiting], response: VerifyResponse) -> None:
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


def _abandoned() -> OutriderError:
    return OutriderError(types_pb2.ERROR_REASON_NO_WORKER, "the verify call was abandoned")


def _fail(futures: list["asyncio.Future[VerifyResult]"], error: OutriderError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
