import asyncio
import math
from collections import Counter
from collections.abc import Sequence

import pytest

from orchestrator.batcher import SHORT_ITEM_TOKENS, Batcher
from orchestrator.round_spans import TracedStats
from orchestrator.tenants import Caller
from outrider.net.answers import MAX_ROWS_BYTES, row_bytes
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, VerifyItem, VerifyResponse, VerifyResult

DEADLINE = 5.0


def item(name: str, tokens: int = 1) -> VerifyItem:
    return VerifyItem(session_id=name, base_length=tokens, prefix_tokens=b"\0" * 4 * tokens)


def answer(items: Sequence[VerifyItem]) -> VerifyResponse:
    return VerifyResponse(
        results=[VerifyResult(session_id=one.session_id, base_length=one.base_length) for one in items]
    )


class Worker:
    """Holds every call until released, as a busy worker does."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gates: list[asyncio.Event] = []
        self.cancelled = 0
        self.arrived = asyncio.Condition()

    async def send(self, items: Sequence[VerifyItem], left: float) -> VerifyResponse:
        gate = asyncio.Event()
        async with self.arrived:
            self.calls.append([one.session_id for one in items])
            self.gates.append(gate)
            self.arrived.notify_all()
        try:
            async with asyncio.timeout(DEADLINE):
                await gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return answer(items)

    async def wait_for_calls(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE), self.arrived:
            await self.arrived.wait_for(lambda: len(self.calls) >= count)


class Steady:
    """Calls take so long, whatever they hold, and sessions are back after `gap`."""

    def __init__(self, call: float = 0.0, gap: float = 0.0) -> None:
        self.call, self.gap = call, gap

    def call_seconds(self, items: int) -> float:
        return self.call

    def gap_seconds(self) -> float:
        return self.gap

    def observe_gap(self, mean: float, last: float) -> None:
        pass


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_waits_while_the_worker_is_full_leaves_in_one_call() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    first = asyncio.create_task(batcher.verify(item("a")))
    await worker.wait_for_calls(1)
    rest = [asyncio.create_task(batcher.verify(item(name))) for name in "bcd"]
    await settle()
    assert worker.calls == [["a"]]
    worker.gates[0].set()
    await worker.wait_for_calls(2)
    assert worker.calls[1] == ["b", "c", "d"]
    worker.gates[1].set()
    results = await asyncio.gather(first, *rest)
    assert [result.session_id for result in results] == list("abcd")
    await batcher.close()


async def test_the_wait_for_a_call_is_measured_once_for_metric_answer_and_span() -> None:
    now, waits, worker = 100.0, [], Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1, waited=waits.append, clock=lambda: now)
    first = asyncio.create_task(batcher.verify(item("a")))
    await worker.wait_for_calls(1)
    stats = TracedStats(0)
    second = asyncio.create_task(batcher.verify(item("b"), stats=stats))
    await settle()
    assert (stats.queued_at, stats.left_at) == (100.0, 0.0)
    now = 100.5
    worker.gates[0].set()
    await worker.wait_for_calls(2)
    now = 107.0
    worker.gates[1].set()
    assert [(await one).timing.queue_micros for one in (first, second)] == [0, 500_000]
    assert waits == [0.0, 0.5]
    assert (stats.queued_at, stats.left_at) == (100.0, 100.5)
    await batcher.close()


async def test_a_long_prefix_travels_alone_and_does_not_hold_up_short_items() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    long = asyncio.create_task(batcher.verify(item("long", SHORT_ITEM_TOKENS + 1)))
    await worker.wait_for_calls(1)
    short = asyncio.create_task(batcher.verify(item("short")))
    await worker.wait_for_calls(2)
    worker.gates[1].set()
    assert (await short).session_id == "short"
    assert not long.done()
    worker.gates[0].set()
    await long
    await batcher.close()


async def test_calls_hold_at_most_max_items() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), max_items=2, calls_in_flight=1)
    tasks = [asyncio.create_task(batcher.verify(item(str(index)))) for index in range(5)]
    for number in range(3):
        await worker.wait_for_calls(number + 1)
        worker.gates[number].set()
    await asyncio.gather(*tasks)
    assert [len(call) for call in worker.calls] == [2, 2, 1]
    await batcher.close()


async def test_h1_a_cancelled_item_is_not_sent_and_an_abandoned_call_is_cancelled() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    first = asyncio.create_task(batcher.verify(item("a")))
    await worker.wait_for_calls(1)
    second = asyncio.create_task(batcher.verify(item("b")))
    await settle()
    second.cancel()
    first.cancel()
    await settle()
    assert worker.cancelled == 1
    third = asyncio.create_task(batcher.verify(item("c")))
    await worker.wait_for_calls(2)
    assert worker.calls[1] == ["c"]
    worker.gates[1].set()
    await third
    await batcher.close()


async def test_h1_items_that_are_cancelled_while_the_worker_hangs_leave_nothing_behind() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    hanging = asyncio.create_task(batcher.verify(item("x")))
    await worker.wait_for_calls(1)
    before = len(asyncio.all_tasks())
    for _ in range(50):
        gone = asyncio.create_task(batcher.verify(item("gone")))
        await settle()
        gone.cancel()
    await settle()
    assert not batcher._short.waiting
    assert len(asyncio.all_tasks()) == before
    worker.gates[0].set()
    await hanging
    assert worker.calls == [["x"]]
    await batcher.close()


async def test_one_cancelled_item_does_not_cancel_its_neighbours() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    blocker = asyncio.create_task(batcher.verify(item("x")))
    await worker.wait_for_calls(1)
    pair = [asyncio.create_task(batcher.verify(item(name))) for name in "ab"]
    await settle()
    worker.gates[0].set()
    await worker.wait_for_calls(2)
    pair[0].cancel()
    worker.gates[1].set()
    assert (await pair[1]).session_id == "b"
    await blocker
    await batcher.close()


async def test_c8_a_dropped_item_is_answered_when_the_call_that_holds_it_is() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    blocker = asyncio.create_task(batcher.verify(item("x")))
    await worker.wait_for_calls(1)
    pair = [asyncio.create_task(batcher.verify(item(name))) for name in "ab"]
    await settle()
    worker.gates[0].set()
    await worker.wait_for_calls(2)
    pair[0].cancel()
    answered = asyncio.create_task(batcher.answered("a", DEADLINE))
    await batcher.answered("x", DEADLINE)
    await batcher.answered("unknown", DEADLINE)
    await batcher.answered("a", 0.01)
    assert not answered.done()
    worker.gates[1].set()
    await answered
    assert (await pair[1]).session_id == "b"
    await blocker
    await batcher.close()
    assert batcher._under_way == {}


async def test_a_failed_call_fails_every_item_with_its_reason() -> None:
    async def send(items: Sequence[VerifyItem], left: float) -> VerifyResponse:
        raise OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "full", retry_after=0.5)

    batcher = Batcher(send, Steady())
    outcomes = await asyncio.gather(*(batcher.verify(item(name)) for name in "ab"), return_exceptions=True)
    assert [getattr(outcome, "retry_after", None) for outcome in outcomes] == [0.5, 0.5]
    await batcher.close()


@pytest.mark.parametrize("results", [[], [VerifyResult(session_id="other", base_length=1)]])
async def test_f1_an_answer_for_another_session_or_none_is_an_error(results: list[VerifyResult]) -> None:
    async def send(items: Sequence[VerifyItem], left: float) -> VerifyResponse:
        return VerifyResponse(results=results)

    batcher = Batcher(send, Steady())
    with pytest.raises(OutriderError, match="another session"):
        await batcher.verify(item("a"))
    await batcher.close()


async def test_a_bug_in_the_call_never_leaves_an_item_waiting() -> None:
    async def send(items: Sequence[VerifyItem], left: float) -> VerifyResponse:
        raise ZeroDivisionError

    batcher = Batcher(send, Steady())
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(OutriderError, match="abandoned"):
            await batcher.verify(item("a"))
    await batcher.close()


async def test_close_ends_waiting_items() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    tasks = [asyncio.create_task(batcher.verify(item(name))) for name in "ab"]
    await worker.wait_for_calls(1)
    await batcher.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, OutriderError) for outcome in outcomes)


async def test_a_call_is_held_for_those_who_will_be_back_soon() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(call=4 * DEADLINE, gap=DEADLINE))
    first = [asyncio.create_task(batcher.verify(item(name))) for name in "ab"]
    await worker.wait_for_calls(1)
    worker.gates[0].set()
    await asyncio.gather(*first)
    back = asyncio.create_task(batcher.verify(item("a")))
    await settle()
    assert len(worker.calls) == 1
    late = asyncio.create_task(batcher.verify(item("b")))
    await worker.wait_for_calls(2)
    assert worker.calls[1] == ["a", "b"]
    worker.gates[1].set()
    await asyncio.gather(back, late)
    back = asyncio.create_task(batcher.verify(item("a")))
    await settle()
    assert len(worker.calls) == 2
    batcher.away("b")
    await worker.wait_for_calls(3)
    assert worker.calls[2] == ["a"]
    worker.gates[2].set()
    await back
    await batcher.close()


async def test_a_call_leaves_by_itself_when_its_time_has_come() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(call=0.05, gap=DEADLINE))
    start = asyncio.get_running_loop().time()
    first = asyncio.create_task(batcher.verify(item("a")))
    await worker.wait_for_calls(1)
    second = asyncio.create_task(batcher.verify(item("b")))
    await worker.wait_for_calls(2)
    # Not before the one under way was expected to be done, and though it does not return.
    assert asyncio.get_running_loop().time() - start >= 0.05
    for gate in worker.gates:
        gate.set()
    await asyncio.gather(first, second)
    await batcher.close()


async def test_f_a_call_that_cannot_hold_all_is_shared_by_weight_and_nobody_waits_behind_another_tenant() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    batcher.max_positions = 8
    callers = {"a": Caller("a", 1.0), "b": Caller("b", 1.0), "c": Caller("c", 2.0)}
    names = [f"a{index}" for index in range(100)] + [f"b{index}" for index in range(4)] + ["c0", "c1", "c2", "c3", "c4"]
    sessions = [asyncio.create_task(rounds(batcher, name, callers[name[0]])) for name in names]
    for number in range(40):
        await worker.wait_for_calls(number + 1)
        await settle()
        worker.gates[number].set()
        await settle()
    # The first call left with whoever came in the first turn of the loop.
    tenants = [Counter(name[0] for name in call) for call in worker.calls[2:40]]
    assert all(sum(call.values()) == 8 for call in tenants)
    total = sum(tenants, Counter())
    shares = {name: total[name] / total.total() for name in "abc"}
    assert shares["b"] >= 0.9 / 4, shares
    assert shares["c"] >= 0.9 / 2, shares
    assert shares["a"] >= 0.9 / 4, shares
    for session in sessions:
        session.cancel()
    await batcher.close()


async def rounds(batcher: Batcher, name: str, caller: Caller) -> None:
    while True:
        await batcher.verify(item(name), caller)


async def test_f_one_tenant_alone_fills_its_calls_whatever_a_pass_holds() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    batcher.max_positions = 8
    tasks = [asyncio.create_task(batcher.verify(item(str(index)))) for index in range(20)]
    await worker.wait_for_calls(1)
    assert len(worker.calls[0]) == 20
    worker.gates[0].set()
    await asyncio.gather(*tasks)
    await batcher.close()


async def test_dense_rows_are_counted_so_that_every_answer_fits_its_message() -> None:
    worker = Worker()
    batcher = Batcher(worker.send, Steady(), calls_in_flight=1)
    batcher.row_bytes = row_bytes(152_064, "float32")

    def dense(name: str) -> VerifyItem:
        one = item(name)
        one.draft_tokens, one.row_format = b"\0" * 16, ROW_FORMAT_LOGITS
        return one

    tasks = [asyncio.create_task(batcher.verify(dense(str(index)))) for index in range(200)]
    tasks += [asyncio.create_task(batcher.verify(item(f"compact {index}"))) for index in range(50)]
    for number in range(3):
        await worker.wait_for_calls(number + 1)
        worker.gates[number].set()
    await asyncio.gather(*tasks)
    most = MAX_ROWS_BYTES // (5 * batcher.row_bytes)
    assert [len(call) for call in worker.calls] == [most, most, 250 - 2 * most]
    await batcher.close()


async def test_a_call_is_told_until_when_anybody_waits_for_it() -> None:
    lefts: list[float] = []

    async def send(items: Sequence[VerifyItem], left: float) -> VerifyResponse:
        lefts.append(left)
        return answer(items)

    batcher = Batcher(send, Steady())
    now = asyncio.get_running_loop().time()
    for deadlines in ([now + 100.0, now + 200.0], [now + 100.0, math.inf]):
        await asyncio.gather(
            *(batcher.verify(item(str(index)), Caller(deadline=deadline)) for index, deadline in enumerate(deadlines))
        )
    assert lefts == [pytest.approx(200.0, abs=60.0), math.inf]
    assert lefts[0] <= 200.0
    await batcher.close()
