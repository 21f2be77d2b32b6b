"""A second worker joins the pool that is short, takes its share, shortens the waits, and leaves again (J1, J9)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.harness.exporting import Process, service
from tests.harness.orchestrator import ask
from tests.harness.processes import free_ports
from tests.harness.scrape import until

LAW = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5,context_length=40000"
# Passes sleep in proportion to the sessions that share them: half the sessions, half the time, and no CPU.
SLOW = f"{LAW},pass_ms=2,item_us=6000"
CLIENTS = 8
# Of a stream: more than there is time for.
TOKENS = 30_000
SHARE_SECONDS = 60.0
LOWEST, HIGHEST = 0.2, 0.45
# As long as nothing ends, a target that joins gets nothing: so many of the streams end, and their clients ask again.
RENEWED = 6

pytestmark = pytest.mark.timeout(600)


class Load:
    """Clients with a stream each that does not end by itself.

    Attributes:
        tokens: what each client got.
    """

    def __init__(self, stub: OrchestratorServiceStub, group: asyncio.TaskGroup) -> None:
        self._stub, self._group = stub, group
        self._streams: dict[int, asyncio.Task[None]] = {}
        self.tokens: Counter[int] = Counter()

    def double(self) -> None:
        """Twice the clients, or the first ones."""
        for number in range(len(self._streams), 2 * len(self._streams) or CLIENTS):
            self._begin(number)

    async def renew(self, count: int) -> None:
        """So many clients end their streams and ask again, one after the other."""
        for number in range(count):
            await self._end(number)
            self._begin(number)
            await self.go_on(number)

    async def go_on(self, *numbers: int) -> None:
        """Returns when these clients, or all of them, have got something more."""
        before = self.tokens.copy()
        for number in numbers or self._streams:
            while self.tokens[number] == before[number]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Every client ends its stream."""
        for number in list(self._streams):
            await self._end(number)

    def _begin(self, number: int) -> None:
        self._streams[number] = self._group.create_task(self._stream(number))

    async def _stream(self, number: int) -> None:
        async for response in self._stub.Generate(ask([number % 26, 2], max_tokens=TOKENS, seed=number)):
            self.tokens[number] += len(response.tokens)
        raise AssertionError(f"stream {number} has ended")

    async def _end(self, number: int) -> None:
        stream = self._streams.pop(number)
        stream.cancel()
        await asyncio.wait({stream})


@asynccontextmanager
async def loaded(orchestrator: Process) -> AsyncIterator[Load]:
    """A stream that fails, or ends by itself, ends the block."""
    async with connect(orchestrator.address) as channel, asyncio.TaskGroup() as group:
        load = Load(OrchestratorServiceStub(channel), group)
        load.double()
        yield load
        await load.end()


async def mean(process: Process, histogram: str, count: int = 100) -> float:
    """Over so many further observations, in seconds."""
    before = await process.seen()
    enough = before.sum(f"{histogram}_count") + count
    after = await until(process.metrics, lambda seen: seen.sum(f"{histogram}_count") >= enough)
    sums, counts = (after.sum(f"{histogram}_{part}") - before.sum(f"{histogram}_{part}") for part in ("sum", "count"))
    return sums / counts


async def share(pool: str, old: Process, new: Process) -> float:
    """The part of the live sessions that the second worker has, once it and the first have all of them."""
    while True:
        first, second = [(await one.seen()).sum(f"outrider_{pool}_sessions") for one in (old, new)]
        if first + second == 2 * CLIENTS:
            return second / (first + second)
        await asyncio.sleep(0.1)


async def share_taken(pool: str, old: Process, new: Process) -> None:
    """Returns when the second worker has its share of the sessions; fails after a minute."""
    async with asyncio.timeout(SHARE_SECONDS):
        while not LOWEST <= (taken := await share(pool, old, new)) <= HIGHEST:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    print(f"{pool}: {taken:.0%} of the sessions are with the second worker")


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
                if pool == "target":
                    await until(orchestrator.metrics, lambda seen: seen.sum("outrider_workers", state="ready") == 3)
                    await load.renew(RENEWED)
                await share_taken(pool, old, new)
                async with asyncio.timeout(SHARE_SECONDS):
                    while (after := await mean(orchestrator, histogram)) > 0.75 * before:
                        pass
                # Nothing has ended since: who stayed with the first worker is there still.
                assert LOWEST <= await share(pool, old, new) <= HIGHEST
                print(f"{pool}: {before * 1000:.0f} ms alone, {after * 1000:.0f} ms with a second worker")
                await new.ended()
            gone = {"pool": pool, "state": "unavailable"}
            await until(orchestrator.metrics, lambda seen: seen.sum("outrider_workers", **gone) == 1)
            await load.go_on()
        for name in ("outrider_awaited_blocks", "outrider_verify_queue", "outrider_verify_in_flight"):
            await until(orchestrator.metrics, lambda seen, name=name: seen.sum(name) == 0)
        await until(old.metrics, lambda seen: seen.sum(f"outrider_{pool}_queue") == 0)
