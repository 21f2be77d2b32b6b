"""What ten times the load does that an orchestrator can carry.

    python -m bench.overload

Scripted workers (bench/scripted_workers.py) and an orchestrator that runs few generations at once. A few more clients
than that, of one tenant, come again when they are told to: what they get alone is what the system can do. Then another
tenant sends so many times as many requests a second and does not care for the answers. Exits with 1 when a figure
misses its limit; when a request ends in any other way than with its tokens or with RESOURCE_EXHAUSTED and RetryInfo;
and when the process dies.

Figures: tokens per second under that load against those before (0.9); the first tenant's tokens against its share, half
of all (0.9); median and 90th percentile of the time in which requests are refused (20 and 100 ms); seconds after the
load until the first tenant is served again (10); MB that the process gained under the load (64).
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
import psutil
import uvloop

from bench.wire_bytes import announced, service, until_linked
from outrider.net.channel import connect
from outrider.net.errors import OutriderError, from_rpc_error
from outrider.v1 import orchestrator_pb2_grpc, types_pb2
from outrider.v1.orchestrator_pb2 import GenerateRequest, Speculation, StopConditions, TokenIds

TENANT = "x-tenant"
POLITE, RUDE = "polite", "rude"
# A server's connection takes about a hundred streams without queueing.
STREAMS_PER_CONNECTION = 90
SAMPLE_SECONDS = 0.1


@dataclass
class Phase:
    """What the clients have seen since it began."""

    began: float = field(default_factory=time.perf_counter)
    tokens: Counter[str] = field(default_factory=Counter)
    refused_ms: list[float] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def end(self) -> "Phase":
        self.seconds = time.perf_counter() - self.began
        return self

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens.total() / self.seconds


class Clients:
    """Calls over a few connections; what they see goes into the present phase."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], request: GenerateRequest, timeout: float) -> None:
        self._stubs = [orchestrator_pb2_grpc.OrchestratorServiceStub(channel) for channel in channels]
        self._request, self._timeout, self._next = request, timeout, 0
        self.phase = Phase()

    async def generate(self, tenant: str) -> OutriderError | None:
        """One generation; the refusal when it was refused."""
        self._next = (self._next + 1) % len(self._stubs)
        began = time.perf_counter()
        call = self._stubs[self._next].Generate(self._request, timeout=self._timeout, metadata=[(TENANT, tenant)])
        try:
            async for response in call:
                self.phase.tokens[tenant] += len(response.tokens)
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error)
            if refusal is None or refusal.reason != types_pb2.ERROR_REASON_QUEUE_FULL or not refusal.retry_after:
                self.phase.strange.append(f"{error.code().name}: {error.details()}")
            self.phase.refused_ms.append((time.perf_counter() - began) * 1e3)
            return refusal
        return None

    async def polite(self) -> None:
        """One generation after the other, not before the time that a refusal tells."""
        while True:
            refusal = await self.generate(POLITE)
            if refusal is not None:
                await asyncio.sleep(refusal.retry_after or 1.0)

    async def rude(self, per_second: float) -> None:
        """Requests at a rate, whatever becomes of them; those under way end with this."""
        async with asyncio.TaskGroup() as group:
            began, sent = time.perf_counter(), 0
            while True:
                due = int((time.perf_counter() - began) * per_second)
                for _ in range(due - sent):
                    group.create_task(self.generate(RUDE))
                sent = due
                await asyncio.sleep(0.01)

    async def during(self, seconds: float) -> Phase:
        """A phase of so many seconds."""
        self.phase = Phase()
        await asyncio.sleep(seconds)
        return self.phase.end()


@asynccontextmanager
async def running(*works: "asyncio._CoroutineLike[None]") -> AsyncIterator[None]:
    """Meanwhile these go on. Raises what one of them raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def system(options: argparse.Namespace) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Address and process of an orchestrator with its workers."""
    async with AsyncExitStack() as stack:
        flags = (f"--verify-ms={options.verify_ms}", "--draft-ms=2")
        targets, drafts = (await stack.enter_async_context(announced("bench.scripted_workers", *flags))).split("/")
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        address = await stack.enter_async_context(
            service(
                "orchestrator",
                *("--targets", targets, "--drafts", drafts, "--draft-timeout", "30"),
                *("--tokenizer", "synthetic:vocab_size=1000,order=0", "--tenant-metadata", TENANT),
                *("--max-sessions", str(options.sessions), "--max-waiting", str(4 * options.sessions)),
            )
        )
        (process,) = (child for child in psutil.Process().children(recursive=True) if child.pid not in before)
        yield address, process


async def watch(process: psutil.Process, seen: list[int]) -> None:
    """Notes the process's memory."""
    while True:
        seen.append(process.memory_info().rss)
        await asyncio.sleep(SAMPLE_SECONDS)


async def measure(options: argparse.Namespace) -> bool:
    """Prints the figures; whether all keep their limits."""
    async with AsyncExitStack() as stack:
        address, process = await stack.enter_async_context(system(options))
        connections = 1 + options.times * 5 * options.sessions // STREAMS_PER_CONNECTION
        channels = [await stack.enter_async_context(connect(address)) for _ in range(connections)]
        await until_linked(orchestrator_pb2_grpc.OrchestratorServiceStub(channels[0]))
        request = GenerateRequest(
            token_ids=TokenIds(ids=range(32)),
            stop=StopConditions(max_tokens=options.tokens, ignore_eos=True),
            speculation=Speculation(lookahead=4),
        )
        clients, seen = Clients(channels, request, options.timeout), [process.memory_info().rss]
        async with running(*(clients.polite() for _ in range(options.sessions + 4))):
            await clients.during(options.calm_seconds / 2)
            calm = await clients.during(options.calm_seconds)
            asked = options.times * calm.rate / options.tokens
            async with running(clients.rude(asked), watch(process, seen)):
                await clients.during(options.calm_seconds / 2)
                loaded = await clients.during(options.seconds)
            recovered = await recovery(clients, options.recovery_limit)
        if not process.is_running():
            raise RuntimeError("the orchestrator died")
    print(f"{options.sessions} generations at once: {calm.rate:,.0f} tokens/s; then {asked:,.0f} requests/s more, for")
    print(
        f"{loaded.seconds:.0f} s: {loaded.rate:,.0f} tokens/s, {len(loaded.refused_ms)} requests refused; memory ",
        end="",
    )
    print(f"{seen[0] / 1e6:.0f} MB before, at most {max(seen) / 1e6:.0f} MB")
    return report(options, calm, loaded, recovered, (max(seen) - seen[0]) / 1e6)


async def recovery(clients: Clients, limit: float) -> float:
    """Seconds until one is served that is not refused."""
    began = time.perf_counter()
    while time.perf_counter() - began < 3 * limit:
        refusal = await clients.generate(POLITE)
        if refusal is None:
            break
        await asyncio.sleep(refusal.retry_after or 1.0)
    return time.perf_counter() - began


def report(options: argparse.Namespace, calm: Phase, loaded: Phase, recovered: float, memory: float) -> bool:
    """Prints the figures; whether all keep their limits."""
    p50, p90 = np.percentile(loaded.refused_ms or [0.0], [50, 90])
    goodput, share = loaded.rate / calm.rate, 2.0 * loaded.tokens[POLITE] / loaded.tokens.total()
    figures = [
        ("goodput against before", goodput, options.goodput_limit, goodput >= options.goodput_limit),
        ("first tenant's tokens against its share", share, options.share_limit, share >= options.share_limit),
        ("median ms to a refusal", p50, options.refusal_limit, p50 <= options.refusal_limit),
        ("p90 ms to a refusal", p90, 5 * options.refusal_limit, p90 <= 5 * options.refusal_limit),
        ("s until served as before", recovered, options.recovery_limit, recovered <= options.recovery_limit),
        ("MB gained", memory, options.memory_limit, memory <= options.memory_limit),
        ("other ends of requests", len(loaded.strange), 0, not loaded.strange),
    ]
    for line in Counter(loaded.strange).most_common(3):
        print(f"ended otherwise: {line[1]} times {line[0]}")
    for name, value, limit, kept in figures:
        print(f"{name}: {value:,.2f} (limit {limit:,g}){'' if kept else '  MISSED'}")
    return all(kept for *_, kept in figures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=8, help="generations at once")
    parser.add_argument("--tokens", type=int, default=40, help="of one generation")
    parser.add_argument("--times", type=int, default=10, help="requests a second, in those that are served")
    parser.add_argument("--verify-ms", type=float, default=40.0, help="scripted time of a target pass")
    parser.add_argument("--calm-seconds", type=float, default=15.0, help="that are counted before the load")
    parser.add_argument("--seconds", type=float, default=60.0, help="that are counted under it")
    parser.add_argument("--timeout", type=float, default=60.0, help="of one request, in seconds")
    parser.add_argument("--goodput-limit", type=float, default=0.9)
    parser.add_argument("--share-limit", type=float, default=0.9)
    parser.add_argument(
        "--refusal-limit", type=float, default=20.0, help="ms; five times as many for the 90th percentile"
    )
    parser.add_argument("--recovery-limit", type=float, default=10.0, help="seconds")
    parser.add_argument("--memory-limit", type=float, default=64.0, help="MB")
    parser.add_argument("--smoke", action="store_true", help="a moment's load: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.sessions, options.tokens, options.verify_ms = 4, 10, 10.0
        options.calm_seconds, options.seconds, options.times = 1.0, 2.0, 3
    return 0 if uvloop.run(measure(options)) else 1


if __name__ == "__main__":
    sys.exit(main())
