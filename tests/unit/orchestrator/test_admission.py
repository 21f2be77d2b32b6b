"""Who runs, who waits, and who is told when to come again. No clock is read: what ends a wait is somebody's end."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from orchestrator.admission import Admission
from orchestrator.config import OrchestratorConfig
from orchestrator.metrics import Metrics
from orchestrator.places import Demand, Place
from orchestrator.tenants import ANYONE, Caller, TenantLimits, Tenants
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2

ONE = Demand(1, 10, 90)
LONG = 1e6  # seconds: no test waits so long


def admission(tenants: Tenants | None = None, **settings: object) -> Admission:
    config = OrchestratorConfig(targets="t:1", tokenizer="x", **{"queue_timeout": LONG, **settings})  # type: ignore[arg-type]
    return Admission(config, tenants or Tenants(), Metrics())


class Request:
    """A request on its way through an admission, let go by the test."""

    def __init__(self, to: Admission, demand: Demand = ONE, caller: Caller = ANYONE) -> None:
        self._end = asyncio.Event()
        self.place: Place | None = None
        self.task = asyncio.create_task(self._run(to, demand, caller))

    async def _run(self, to: Admission, demand: Demand, caller: Caller) -> None:
        async with to.admitted(caller, demand) as self.place:
            await self._end.wait()

    @property
    def runs(self) -> bool:
        return self.place is not None and not self.task.done()

    async def end(self) -> None:
        self._end.set()
        await self.task

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def refusal(self) -> OutriderError:
        with pytest.raises(OutriderError) as refused:
            await self.task
        assert refused.value.reason == types_pb2.ERROR_REASON_QUEUE_FULL
        assert refused.value.retry_after is not None
        return refused.value


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def requests(
    to: Admission, count: int, demand: Demand = ONE, caller: Caller = ANYONE
) -> AsyncIterator[list[Request]]:
    """So many, as far as they got; those that are left over at the end leave."""
    ones = [Request(to, demand, caller) for _ in range(count)]
    await settled()
    try:
        yield ones
    finally:
        for one in ones:
            await one.leave()
        assert not any(one.runs for one in ones)


def empty(one: Admission) -> bool:
    return (one.sessions, one.tokens, one.waiting, one._prompts) == (0, 0, 0, 0)


async def test_requests_wait_for_room_in_their_order() -> None:
    one = admission(max_sessions=2)
    async with requests(one, 5) as ones:
        assert [each.runs for each in ones] == [True, True, False, False, False]
        await ones[1].end()
        await settled()
        assert [each.runs for each in ones] == [True, False, True, False, False]
        await ones[3].leave()
        await ones[0].end()
        await settled()
        assert [each.runs for each in ones] == [False, False, True, False, True]
    assert empty(one)
    await one.wait_idle()


async def test_tokens_are_room_as_well_and_what_is_larger_than_all_room_runs_alone() -> None:
    one = admission(max_running_tokens=250)
    async with requests(one, 3) as ones:
        assert [each.runs for each in ones] == [True, True, False]
        huge = Request(one, Demand(1, 10, 10_000))
        await settled()
        for each in ones:
            assert not huge.runs
            await each.end()
            await settled()
        assert huge.runs
        async with requests(one, 1) as (small,):
            assert not small.runs
            await huge.end()
            await settled()
            assert small.runs
    assert empty(one)


async def test_a_prompt_that_comes_to_less_lets_the_next_in() -> None:
    one = admission(max_running_tokens=250)
    async with requests(one, 2, Demand(1, 150, 50)) as (first, second):
        assert not second.runs
        assert first.place is not None
        one.settle(first.place, Demand(1, 10, 40))
        await settled()
        assert second.runs
        assert one.tokens == 50 + 200
    assert empty(one)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_again() -> None:
    one = admission(max_sessions=1, max_waiting=2)
    async with requests(one, 3) as ones:
        error = await Request(one).refusal()
        assert "2 requests wait" in error.message
        assert one.waiting == 2
        await ones[0].end()
        await settled()
        async with requests(one, 1):
            assert one.waiting == 2
    assert empty(one)


async def test_prompts_that_wait_are_bounded_together() -> None:
    one = admission(max_sessions=1, max_waiting_tokens=100)
    async with requests(one, 1), requests(one, 2, Demand(1, 50, 50)):
        error = await Request(one, Demand(1, 1, 1)).refusal()
        assert "101 tokens of prompts wait" in error.message
    assert empty(one)


async def test_more_at_once_than_ever_run_is_refused() -> None:
    one = admission(max_sessions=4)
    assert "limit is 4" in (await Request(one, Demand(5, 1, 1)).refusal()).message
    assert empty(one)


async def test_the_wait_ends_in_time_and_what_has_no_time_left_never_begins() -> None:
    one = admission(max_sessions=1, queue_timeout=0.05)
    async with requests(one, 1):
        assert "time to wait is over" in (await Request(one).refusal()).message
        past = Caller(deadline=asyncio.get_running_loop().time() - 1.0)
        await Request(one, caller=past).refusal()
    await Request(one, caller=past).refusal()
    assert empty(one)


async def test_who_waited_behind_one_that_is_refused_goes_in_where_there_is_room() -> None:
    one = admission(max_running_tokens=250, queue_timeout=1.0)
    async with requests(one, 1):
        long = Request(one, Demand(1, 200, 0))
        await settled()
        one._config = one._config.model_copy(update={"queue_timeout": LONG})
        async with requests(one, 1) as (short,):
            assert not short.runs
            await long.refusal()
            await settled()
            assert short.runs
    assert empty(one)


async def test_a_request_that_is_called_and_leaves_in_the_same_moment_leaves_nothing() -> None:
    one = admission(max_sessions=1)
    async with requests(one, 3) as ones:
        ones[0]._end.set()
        await asyncio.sleep(0)
        ones[1].task.cancel()
        await settled()
        assert ones[2].runs
    assert empty(one)


async def test_a_closed_house_refuses_what_waits_and_what_comes_and_lets_the_rest_end() -> None:
    one = admission(max_sessions=1)
    closed = OutriderError(types_pb2.ERROR_REASON_DRAINING, "closed")
    async with requests(one, 2) as (runs, waits):
        one.close(closed)
        for each in (waits, Request(one)):
            with pytest.raises(OutriderError, match="closed"):
                await each.task
        assert runs.runs
        await runs.end()
    assert empty(one)


async def test_what_would_wait_longer_than_it_may_is_refused_at_once() -> None:
    one = admission(max_sessions=1, queue_timeout=1.0)
    async with requests(one, 2):
        # As if one had ended every second of late.
        one._throughput._ends, one._throughput._ended, one._throughput._seconds = 9, 10.0, 10.0
        error = await Request(one).refusal()
        assert "wait too long" in error.message
        assert error.retry_after == pytest.approx(2.0, rel=0.2)
    assert empty(one)


async def completions(one: Admission, demands: dict[str, tuple[int, Demand]], ends: int) -> Counter[str]:
    """How many of each tenant's requests ran, of tenants with so many clients that send the next one when one ended."""
    ran: Counter[str] = Counter()
    turns: asyncio.Queue[tuple[str, asyncio.Event]] = asyncio.Queue()

    async def client(tenant: str, demand: Demand) -> None:
        weight = one._known.limits(tenant).weight
        while True:
            async with one.admitted(Caller(tenant, weight), demand) as place:
                ended = asyncio.Event()
                await turns.put((tenant, ended))
                await ended.wait()
                place.generated = demand.output

    clients = [
        asyncio.create_task(client(tenant, demand)) for tenant, (count, demand) in demands.items() for _ in range(count)
    ]
    for _ in range(ends):
        tenant, ended = await turns.get()
        ran[tenant] += 1
        ended.set()
        await settled()
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    assert empty(one)
    return ran


@pytest.mark.parametrize(
    ("weights", "price_of_a", "share_of_b"),
    # A hundred clients against four; eight run at once.
    [((1, 1), 100, 1 / 2), ((3, 1), 100, 1 / 4), ((1, 1), 300, 3 / 4)],
)
async def test_f_a_tenant_of_few_sessions_keeps_its_share_beside_one_of_many(
    weights: tuple[int, int], price_of_a: int, share_of_b: float
) -> None:
    known = {name: TenantLimits(weight=weight) for name, weight in zip("ab", weights, strict=True)}
    one = admission(Tenants(tenants=known), max_sessions=4)
    demands = {"a": (100, Demand(1, 0, price_of_a)), "b": (4, Demand(1, 0, 100))}
    ran = await completions(one, demands, 400)
    # Of what runs one after the other; four clients never wait for more than the next end.
    assert ran["b"] / 400 >= 0.9 * min(share_of_b, 1 / 2), ran


async def test_a_queue_full_of_one_tenant_makes_room_for_another() -> None:
    one = admission(max_sessions=1, max_waiting=4)
    async with requests(one, 5, caller=Caller("a")) as many, requests(one, 2, caller=Caller("b")) as few:
        assert [each.task.done() for each in many] == [False, False, False, True, True]
        await many[3].refusal()
        await many[4].refusal()
        await Request(one, caller=Caller("b")).refusal()
        await many[0].end()
        await settled()
        assert few[0].runs
    assert empty(one)


async def test_limits_of_a_tenant_hold_it_back_and_nobody_else() -> None:
    known = {"a": TenantLimits(max_sessions=2), "b": TenantLimits(tokens_per_second=1.0, burst=50)}
    one = admission(Tenants(tenants=known))
    async with requests(one, 4, caller=Caller("a")) as a, requests(one, 3, caller=Caller("b")) as b:
        assert [each.runs for each in a] == [True, True, False, False]
        assert [each.runs for each in b] == [True, False, False]
        async with requests(one, 5, caller=Caller("c")) as c:
            assert all(each.runs for each in c)
        assert (await Request(one, Demand(3, 1, 1), Caller("a")).refusal()).message.endswith("the limit is 2")
        await a[0].end()
        await settled()
        assert a[2].runs
        # It had not generated anything: its tenant gets its tokens back, and the next one goes in at once.
        await b[0].end()
        await settled()
        assert b[1].runs
    assert empty(one)


async def test_a_tenant_that_waits_for_its_rate_alone_is_woken_by_it() -> None:
    known = {"a": TenantLimits(tokens_per_second=100.0, burst=50)}
    one = admission(Tenants(tenants=known))
    async with requests(one, 2, caller=Caller("a")) as (first, second):
        assert first.runs
        assert not second.runs
        async with asyncio.timeout(20.0):
            while not second.runs:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_rate_that_lets_nothing_in_within_the_wait_refuses_at_once() -> None:
    known = {"a": TenantLimits(tokens_per_second=1.0, burst=50)}
    one = admission(Tenants(tenants=known), queue_timeout=10.0)
    async with requests(one, 1, Demand(1, 0, 75), Caller("a")):
        error = await Request(one, caller=Caller("a")).refusal()
        assert error.retry_after == pytest.approx(25.0, rel=0.1)


async def test_tenants_that_have_nothing_here_are_forgotten() -> None:
    one = admission()
    for index in range(1_100):
        async with one.admitted(Caller(str(index)), ONE):
            pass
    assert len(one._tenants) <= 1_024
