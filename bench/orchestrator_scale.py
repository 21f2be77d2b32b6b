"""How many sessions and rounds one orchestrator process carries.

    python -m bench.orchestrator_scale

Scripted workers (bench/scripted_workers.py), a real store and so many streaming clients (bench/http2.py). Where there
are two cores the orchestrator has one for itself and all others share the rest. Workers set the pace: a target worker
answers one call after the other. The default is that of some 3,200 rounds a second; faster workers fill the
orchestrator's core, and what they measure is then its queue. Exits with 1 when a figure misses its limit.

Figures: rounds per second of the orchestrator's CPU time (3,000); 99th percentile of the time that the client sees from
round to round beyond what the workers took and let wait (25 ms): all queues for the orchestrator's core, the wires, the
client's own delay; memory that the process gains for each session beyond the first ten (50 kB).
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import uvloop

from bench.http2 import Connection
from bench.wire_bytes import announced, service, until_linked
from outrider.net.channel import connect
from outrider.v1 import orchestrator_pb2_grpc
from outrider.v1.orchestrator_pb2 import (
    GenerateRequest,
    GenerateResponse,
    Round,
    Speculation,
    StopConditions,
    TokenIds,
)

# grpc's servers take about a hundred without queueing.
STREAMS_PER_CONNECTION = 100
# Those that run before memory is counted.
FIRST_SESSIONS = 10
GENERATE = "/outrider.v1.OrchestratorService/Generate"


@dataclass
class Load:
    """What the clients saw while counting."""

    counting: bool = False
    rounds: int = 0
    tokens: int = 0
    own_micros: list[int] = field(default_factory=list)

    def add(self, one: Round, tokens: int, interval: float) -> None:
        """A round and the time since the session's round before."""
        if self.counting:
            self.rounds += 1
            self.tokens += tokens
            waited = one.draft_forward_micros + one.verify_queue_micros + one.verify_forward_micros
            self.own_micros.append(max(0, int(interval * 1e6) - waited))


class Clients:
    """The sessions of one connection: each begins anew when it has ended.

    Attributes:
        failed: why there are no more.
    """

    def __init__(self, address: str, request: GenerateRequest, load: Load) -> None:
        self._request, self._load = request.SerializeToString(), load
        self._last: dict[int, float] = {}
        self._connection = Connection(address, self._message, self._ended)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self, address: str, sessions: int) -> None:
        """Begins the sessions."""
        host, _, port = address.rpartition(":")
        await asyncio.get_running_loop().create_connection(lambda: self._connection, host, int(port))
        for _ in range(sessions):
            self._connection.call(GENERATE, self._request)

    def close(self) -> None:
        """Ends them."""
        self.failed.cancel()
        self._connection.close()

    def _message(self, stream: int, data: bytes) -> None:
        response = GenerateResponse.FromString(data)
        if not response.HasField("round"):
            return
        now = time.perf_counter()
        if stream in self._last:
            self._load.add(response.round, len(response.tokens), now - self._last[stream])
        self._last[stream] = now

    def _ended(self, stream: int) -> None:
        if self._last.pop(stream, None) is not None:
            self._connection.call(GENERATE, self._request)
        elif not self.failed.done():
            self.failed.set_exception(RuntimeError("a call failed before its first round, or the connection was lost"))


@asynccontextmanager
async def system(options: argparse.Namespace) -> AsyncIterator[tuple[str, int]]:
    """Address and process id of an orchestrator with its workers and its store; alone on the first core where there is
    another."""
    from tests.harness.valkey import valkey_server

    cores = sorted(os.sched_getaffinity(0))
    others = cores[1:] or cores
    async with AsyncExitStack() as stack:
        os.sched_setaffinity(0, others)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        store = stack.enter_context(valkey_server(Path(directory))).url
        names = ("targets", "drafts", "vocabulary", "verify_ms", "draft_ms")
        flags = (f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names)
        workers = await stack.enter_async_context(announced("bench.scripted_workers", *flags))
        targets, drafts = workers.split("/")
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        os.sched_setaffinity(0, cores[:1])
        orchestrator = await stack.enter_async_context(
            service(
                "orchestrator",
                *("--targets", targets, "--drafts", drafts, "--store", store),
                *("--tokenizer", f"synthetic:vocab_size={options.vocabulary},order=0"),
                *("--max-sessions", str(2 * options.sessions), "--draft-timeout", "30"),
            )
        )
        os.sched_setaffinity(0, others)
        (process,) = (child for child in psutil.Process().children(recursive=True) if child.pid not in before)
        yield orchestrator, process.pid


async def measure(options: argparse.Namespace) -> bool:
    """Prints the figures; whether all keep their limits."""
    async with AsyncExitStack() as stack:
        address, pid = await stack.enter_async_context(system(options))
        process = psutil.Process(pid)
        async with connect(address) as channel:
            await until_linked(orchestrator_pb2_grpc.OrchestratorServiceStub(channel))
        request = GenerateRequest(
            token_ids=TokenIds(ids=range(32)),
            stop=StopConditions(max_tokens=options.tokens, ignore_eos=True),
            speculation=Speculation(lookahead=options.lookahead),
        )
        load = Load()

        async def begun(sessions: int) -> Clients:
            one = Clients(address, request, load)
            stack.callback(one.close)
            await one.connect(address, sessions)
            return one

        # What the first sessions bring with them is the process's own.
        clients = [await begun(FIRST_SESSIONS)]
        await asyncio.sleep(options.warm_up)
        few = process.memory_info().rss
        rest = options.sessions - FIRST_SESSIONS
        for start in range(0, rest, STREAMS_PER_CONNECTION):
            clients.append(await begun(min(STREAMS_PER_CONNECTION, rest - start)))
        await asyncio.sleep(options.warm_up)
        began, cpu = time.perf_counter(), cpu_seconds(process)
        load.counting = True
        done, _ = await asyncio.wait(
            [one.failed for one in clients], timeout=options.seconds, return_when=asyncio.FIRST_COMPLETED
        )
        load.counting = False
        wall, cpu = time.perf_counter() - began, cpu_seconds(process) - cpu
        memory = (process.memory_info().rss - few) / 1024 / rest
        for failed in done:
            failed.result()
    return report(options, load, wall, cpu, memory)


def report(options: argparse.Namespace, load: Load, wall: float, cpu: float, memory: float) -> bool:
    """Prints the figures; whether all keep their limits."""
    p50, p99 = np.percentile(load.own_micros, [50, 99]) / 1e3
    print(f"{options.sessions} sessions, lookahead {options.lookahead}, {load.rounds / wall:,.0f} rounds/s and")
    print(f"{load.tokens / wall:,.0f} tokens/s on the whole machine, {cpu / wall:.2f} cores of it the orchestrator's")
    figures = [
        (
            "rounds per second of its CPU",
            load.rounds / cpu,
            options.rounds_limit,
            load.rounds / cpu >= options.rounds_limit,
        ),
        ("p99 of its own time a round, ms", p99, options.added_limit, p99 <= options.added_limit),
        ("kB a session", memory, options.memory_limit, memory <= options.memory_limit),
    ]
    print(f"CPU a round: {cpu / load.rounds * 1e6:,.0f} us; own time a round: median {p50:.1f} ms")
    for name, value, limit, kept in figures:
        print(f"{name}: {value:,.1f} (limit {limit:,g}){'' if kept else '  MISSED'}")
    return all(kept for *_, kept in figures)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--targets", type=int, default=20, help="target workers")
    parser.add_argument("--drafts", type=int, default=4, help="draft workers")
    parser.add_argument("--verify-ms", type=float, default=250.0, help="scripted time of a target pass")
    parser.add_argument("--draft-ms", type=float, default=8.0, help="scripted time of a draft pass")
    parser.add_argument("--tokens", type=int, default=400, help="of one generation")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before counting")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds that are counted")
    parser.add_argument("--rounds-limit", type=float, default=3000.0)
    parser.add_argument("--added-limit", type=float, default=25.0, help="ms")
    parser.add_argument("--memory-limit", type=float, default=50.0, help="kB")
    parser.add_argument("--smoke", action="store_true", help="few sessions for a moment: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.sessions, options.warm_up, options.seconds, options.verify_ms = 20, 0.5, 1.0, 5.0
        options.targets, options.drafts = 1, 1
    return 0 if uvloop.run(measure(options)) else 1


if __name__ == "__main__":
    sys.exit(main())
