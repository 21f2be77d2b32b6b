"""A second worker joins the pool that is short, takes its share, shortens the waits, and leaves again (J1, J9)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from outrider.v1.orchestrator_pb2 import FINISH_REASON_LENGTH
from tests.harness.exporting import Process, generate, service
from tests.harness.orchestrator import Generation, ask
from tests.harness.processes import free_ports
from tests.harness.scrape import until

LAW = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5"
# Passes sleep in proportion to the sessions that share them: half the sessions, half the time, and no CPU.
SLOW = f"{LAW},pass_ms=2,item_us=6000"
CLIENTS = 8
SHARE_SECONDS = 60.0
# Drafts: rebalancing alone stops with a quarter at the new one; placement of new ones leads to 50 %. Targets keep what
# runs, and get there as it ends. Sessions that begin and end between two scrapes make it more or less.
LOWEST, HIGHEST = 0.2, 0.7


pytestmark = pytest.mark.timeout(600)


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, address: str) -> None:
        self._address, self._ended = address, False
        self._clients: list[asyncio.Task[None]] = []
        self.generations: list[Generation] = []

    def double(self) -> None:
        """Twice the clients, or the first ones."""
        begin = len(self._clients)
        self._clients += [asyncio.create_task(self._client(one)) for one in range(begin, 2 * begin or CLIENTS)]

    async def _client(self, number: int) -> None:
        turn = 0
        while not self._ended:
            turn += 1
            tokens = 8 + (5 * number + 7 * turn) % 13
            self.generations += await generate(self._address, [ask([number % 26, 2], max_tokens=tokens, seed=turn)])

    async def end(self) -> None:
        """No client asks again; each is answered."""
        self._ended = True
        await asyncio.gather(*self._clients)


@asynccontextmanager
async def loaded(orchestrator: Process) -> AsyncIterator[Load]:
    load = Load(orchestrator.address)
    load.double()
    try:
        yield load
    finally:
        await load.end()


async def mean(process: Process, histogram: str, count: int = 100) -> float:
    """Over so many further observations, in seconds."""
    before = await process.seen()
    enough = before.sum(f"{histogram}_count") + count
    after = await until(process.metrics, lambda seen: seen.sum(f"{histogram}_count") >= enough)
    sums, counts = (after.sum(f"{histogram}_{part}") - before.sum(f"{histogram}_{part}") for part in ("sum", "count"))
    return sums / counts


async def share_taken(pool: str, old: Process, new: Process) -> None:
    """Returns when the second worker has its share of the sessions; fails after a minute."""
    async with asyncio.timeout(SHARE_SECONDS):
        while True:
            first, second = [(await one.seen()).sum(f"outrider_{pool}_sessions") for one in (old, new)]
            if first + second >= CLIENTS and LOWEST <= second / (first + second) <= HIGHEST:
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("pool", "histogram", "queue", "least"),
    [
        ("draft", "outrider_round_draft_wait_seconds", "outrider_awaited_blocks", CLIENTS),
        ("target", "outrider_round_verify_seconds", "outrider_verify_queue", 0),
    ],
)
async def test_a_second_worker_relieves_the_pool_that_is_short(
    pool: str, histogram: str, queue: str, least: int
) -> None:
    [port] = free_ports(1)
    models = {"draft": f"{LAW},agree=0.7", "target": LAW, pool: SLOW}
    async with AsyncExitStack() as stack:
        draft, target = await asyncio.gather(
            stack.enter_async_context(service("draft_service", "--model", models["draft"])),
            stack.enter_async_context(service("target_service", "--model", models["target"])),
        )
        old = draft if pool == "draft" else target
        addresses = {"draft": draft.address, "target": target.address}
        addresses[pool] += f",127.0.0.1:{port}"
        workers = ("--targets", addresses["target"], "--drafts", addresses["draft"])
        fixed = ("--lookahead", "3", "--draft-timeout", "30", "--tokenizer", LAW)
        orchestrator = await stack.enter_async_context(service("orchestrator", *workers, *fixed))
        await until(orchestrator.metrics, lambda seen: seen.sum("outrider_workers", state="ready") == 2)
        async with loaded(orchestrator) as load:
            load.double()
            await until(old.metrics, lambda seen: seen.sum(f"outrider_{pool}_queue") > CLIENTS)
            await until(old.metrics, lambda seen: seen.sum(f"outrider_{pool}_sessions") > CLIENTS)
            await until(orchestrator.metrics, lambda seen: seen.sum(queue) > least)
            before = await mean(orchestrator, histogram)
            async with service(f"{pool}_service", "--model", SLOW, port=port) as new:
                await share_taken(pool, old, new)
                # Half the sessions are half the time; the share grows from the least to that.
                async with asyncio.timeout(SHARE_SECONDS):
                    while (after := await mean(orchestrator, histogram)) > 0.75 * before:
                        pass
                print(f"{pool}: {before * 1000:.0f} ms alone, {after * 1000:.0f} ms with a second worker")
                await new.ended()
            gone = {"pool": pool, "state": "unavailable"}
            await until(orchestrator.metrics, lambda seen: seen.sum("outrider_workers", **gone) == 1)
            await mean(orchestrator, histogram, count=50)
        assert load.generations
        assert all(one.finish.reason == FINISH_REASON_LENGTH for one in load.generations)
        for name in ("outrider_awaited_blocks", "outrider_verify_queue", "outrider_verify_in_flight"):
            await until(orchestrator.metrics, lambda seen, name=name: seen.sum(name) == 0)
        await until(old.metrics, lambda seen: seen.sum(f"outrider_{pool}_queue") == 0)
