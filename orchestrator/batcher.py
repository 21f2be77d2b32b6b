"""Turns the verify items of many sessions into few calls to one target worker.

A call leaves when the worker is about to be free, with those who wait and those who will be back soon (departures.py).
Items that carry a long prefix go in calls of their own, because a call is answered when its last item is done.

A call that cannot hold all that waits takes the oldest. Among several tenants it takes no more than the worker computes
in one pass, from the tenant that was served least first.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from orchestrator.departures import Departures, Pace, Trip
from orchestrator.fairness import Shares, in_turn
from orchestrator.stats import RoundStats
from orchestrator.tenants import ANYONE, Caller
from outrider.net.answers import MAX_ROWS_BYTES
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, VerifyItem, VerifyResponse, VerifyResult, VerifyTiming

# With the seconds after which nobody waits for the answer any more.
Send = Callable[[Sequence[VerifyItem], float], Awaitable[VerifyResponse]]

# Items with more new tokens than this do not share a call: its neighbours would wait for a prompt.
SHORT_ITEM_TOKENS = 128
_BYTES_PER_TOKEN = 4
# What a worker can have taken for one item: twelve days.
_MOST_MICROS, _MOST_PASSES = 1 << 40, 1 << 20
# A tenant counts as present for so long after its last item.
_PRESENT_SECONDS = 5.0
# Told of items that belong to no round; keeps nothing.
_NO_ROUND = RoundStats(0)


@dataclass(eq=False)
class _Call:
    """A call that was sent.

    Attributes:
        task: ends with the call.
        left: how many of its items are waited for.
    """

    task: "asyncio.Task[None]"
    left: int

    def leave(self) -> None:
        """An item is not waited for any more; without any the call is cancelled."""
        self.left -= 1
        if not self.left:
            self.task.cancel()


@dataclass(eq=False)
class _Waiting:
    """An item on its way.

    Attributes:
        since: when it began to wait for a call.
        caller: for whom.
        rows: positions whose logits the answer holds.
        stats: of its round.
        call: the one that it is in.
        wait: for that one, in seconds.
    """

    item: VerifyItem
    future: "asyncio.Future[VerifyResult]"
    since: float
    caller: Caller
    rows: int
    stats: RoundStats
    call: _Call | None = None
    wait: float = 0.0

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.caller.tenant

    @property
    def positions(self) -> int:
        """Positions that the target computes for it."""
        return (len(self.item.prefix_tokens) + len(self.item.draft_tokens)) // _BYTES_PER_TOKEN

    @property
    def price(self) -> float:
        """What it costs its tenant."""
        return self.positions / self.caller.weight


@dataclass
class _Lane:
    """One kind of call.

    Attributes:
        max_items: most items of a call.
        free_calls: how many more the worker may hold.
        waiting: the items that wait for the next one, oldest first.
        tenants: whose items came, and when the last one did.
        shares: what each was served.
        looked_at: whether the loop looks at what waits in its next turn.
        timer: when to look again whether it is time for the next call.
    """

    max_items: int
    free_calls: int
    waiting: dict["asyncio.Future[VerifyResult]", _Waiting] = field(default_factory=dict)
    tenants: dict[str, float] = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)
    looked_at: bool = False
    timer: asyncio.TimerHandle | None = None

    def add(self, waiting: _Waiting) -> None:
        """The item waits."""
        self.waiting[waiting.future] = waiting
        self.tenants[waiting.tenant] = waiting.since

    def take(self, now: float, max_rows: float, max_positions: float) -> list[_Waiting]:
        """The items of the next call, at least one: with so many dense rows at most, and with so many positions where
        there are several tenants. One that is on its way back would wait behind the passes of a longer call.
        """
        waiting: Iterable[_Waiting] = self.waiting.values()
        if self._several(now):
            waiting = in_turn(waiting, self.shares)
        else:
            max_positions = math.inf
        taken: list[_Waiting] = []
        for each in waiting:
            max_rows -= each.rows
            max_positions -= each.positions
            if taken and (len(taken) == self.max_items or max_rows < 0 or max_positions < 0):
                break
            taken.append(each)
        for each in taken:
            del self.waiting[each.future]
        return taken

    def _several(self, now: float) -> bool:
        """Whether more than one tenant has been here of late."""
        if len(self.tenants) > 1:
            gone = now - _PRESENT_SECONDS
            self.tenants = {tenant: since for tenant, since in self.tenants.items() if since > gone}
        return len(self.tenants) > 1


class Batcher:
    """Batches items for one target worker.

    Args:
        send: one Verify call; raises OutriderError when the call as a whole failed.
        pace: what calls take, as measured by others; the time between them is measured here.
        max_items: most items of one call.
        waited: told how long each item that was answered waited for its call, in seconds.
        calls_in_flight: calls that the worker may hold at once: one that it computes and one that waits for it.
        prefills_in_flight: calls with a long prefix that the worker may hold at once.
        clock: seconds, of everything here but deadlines; the event loop's own may count whole milliseconds.

    Attributes:
        row_bytes: of the logits of one position; 0 while unknown.
        max_positions: most positions that the worker computes in a pass; 0 while unknown.
    """

    def __init__(
        self,
        send: Send,
        pace: Pace,
        *,
        waited: Callable[[float], None] = lambda _: None,
        max_items: int = 256,
        calls_in_flight: int = 2,
        prefills_in_flight: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._send, self._waited, self._clock = send, waited, clock
        self._short = _Lane(max_items, calls_in_flight)
        self._long = _Lane(1, prefills_in_flight)
        self._calls: set[asyncio.Task[None]] = set()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._departures = Departures(pace, max_items)
        self.row_bytes = self.max_positions = 0

    async def verify(self, item: VerifyItem, caller: Caller = ANYONE, stats: RoundStats | None = None) -> VerifyResult:
        """The result of one item; its queue time is that here and at the worker together.

        Args:
            stats: of its round.

        Raises OutriderError when its call failed; cancelling drops the item.
        """
        loop = asyncio.get_running_loop()
        lane = self._short if len(item.prefix_tokens) <= SHORT_ITEM_TOKENS * _BYTES_PER_TOKEN else self._long
        future: asyncio.Future[VerifyResult] = loop.create_future()
        rows = len(item.draft_tokens) // _BYTES_PER_TOKEN + 1 if item.row_format == ROW_FORMAT_LOGITS else 0
        waiting = _Waiting(item, future, self._clock(), caller, rows, stats or _NO_ROUND)
        waiting.stats.queued(waiting.since)
        lane.add(waiting)
        self._departures.back(item.session_id, waiting.since)
        # Not at once: what other sessions add in this turn of the loop goes along.
        if not lane.looked_at:
            lane.looked_at = True
            loop.call_soon(self._look, lane)
        try:
            return await future
        except asyncio.CancelledError:
            lane.waiting.pop(future, None)
            if waiting.call is not None:
                waiting.call.leave()
            raise

    @property
    def waiting(self) -> int:
        """Items that wait for a call."""
        return len(self._short.waiting) + len(self._long.waiting)

    @property
    def in_flight(self) -> int:
        """Items in calls that are not answered."""
        return len(self._under_way)

    async def answered(self, session_id: str, within: float) -> None:
        """Returns when no call is under way that holds an item of the session, at the latest after `within` seconds.

        An item that was dropped travels on in its call when neighbours wait for that one.
        """
        call = self._under_way.get(session_id)
        if call is not None:
            await asyncio.wait({call}, timeout=within)

    def abandon(self) -> None:
        """Ends what waits and what is in flight with NO_WORKER."""
        for lane in (self._short, self._long):
            _fail(list(lane.waiting), _abandoned())
            lane.waiting.clear()
            if lane.timer is not None:
                lane.timer.cancel()
        for call in self._calls:
            call.cancel()

    async def close(self) -> None:
        """Ends what waits and what is in flight, and returns when it has ended."""
        self.abandon()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def away(self, session_id: str) -> None:
        """The session will not be back soon: no call is held for it."""
        self._departures.away(session_id)
        self._pump(self._short)

    def _look(self, lane: _Lane) -> None:
        lane.looked_at = False
        self._pump(lane)

    def _pump(self, lane: _Lane) -> None:
        """Sends what waits once the worker has room and it is time."""
        if lane.timer is not None:
            lane.timer.cancel()
        while lane.free_calls and lane.waiting:
            now = self._clock()
            delay = self._departures.delay(len(lane.waiting), now) if lane is self._short else 0.0
            if delay > 0.0:
                lane.timer = asyncio.get_running_loop().call_later(delay, self._pump, lane)
                return
            self._leave(lane, now)

    def _leave(self, lane: _Lane, now: float) -> None:
        lane.free_calls -= 1
        batch = lane.take(now, MAX_ROWS_BYTES // (self.row_bytes or 1), self.max_positions or math.inf)
        trip = self._departures.left([each.item.session_id for each in batch], now) if lane is self._short else None
        task = asyncio.create_task(self._call(batch))
        call = _Call(task, len(batch))
        for waiting in batch:
            waiting.call, waiting.wait = call, now - waiting.since
            waiting.stats.left(now)
            self._under_way[waiting.item.session_id] = task
        self._calls.add(task)
        task.add_done_callback(partial(self._returned, lane, batch, trip))

    def _returned(self, lane: _Lane, batch: list[_Waiting], trip: Trip | None, call: "asyncio.Task[None]") -> None:
        # A call that was cancelled or has a bug leaves nobody waiting.
        _fail([waiting.future for waiting in batch], _abandoned())
        self._calls.discard(call)
        for waiting in batch:
            if self._under_way.get(waiting.item.session_id) is call:
                del self._under_way[waiting.item.session_id]
        lane.free_calls += 1
        if trip is not None:
            self._departures.answered(trip, self._clock())
        self._pump(lane)

    async def _call(self, batch: list[_Waiting]) -> None:
        left = max(waiting.caller.deadline for waiting in batch) - asyncio.get_running_loop().time()
        try:
            _deliver(batch, await self._send([waiting.item for waiting in batch], left), self._waited)
        except OutriderError as error:
            _fail([waiting.future for waiting in batch], error)


def _deliver(batch: list[_Waiting], response: VerifyResponse, waited: Callable[[float], None]) -> None:
    """Pairs results with items by position, and checks that they are about the same round."""
    results = list(response.results)
    for index, waiting in enumerate(batch):
        item, future = waiting.item, waiting.future
        if future.done():
            continue
        result = results[index] if index < len(results) else None
        if result is None or (result.session_id, result.base_length) != (item.session_id, item.base_length):
            future.set_exception(
                OutriderError(types_pb2.ERROR_REASON_NO_PROGRESS, "the target answered for another session or round")
            )
        else:
            _bound(result.timing)
            result.timing.queue_micros += int(waiting.wait * 1e6)
            waited(waiting.wait)
            future.set_result(result)


def _bound(timing: VerifyTiming) -> None:
    """Holds a worker's numbers to what can be added up."""
    timing.queue_micros = min(timing.queue_micros, _MOST_MICROS)
    timing.forward_micros = min(timing.forward_micros, _MOST_MICROS)
    timing.passes = min(timing.passes, _MOST_PASSES)


def _abandoned() -> OutriderError:
    return OutriderError(types_pb2.ERROR_REASON_NO_WORKER, "the verify call was abandoned")


def _fail(futures: list["asyncio.Future[VerifyResult]"], error: OutriderError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
