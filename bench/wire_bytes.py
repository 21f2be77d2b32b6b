"""Bytes on the wire per session and round, for every row format.

    python -m bench.wire_bytes

Three services as processes over synthetic models, every hop through a TCP proxy that counts: payload, protobuf, gRPC
and HTTP/2 framing and headers, both directions, in the middle of generations all of whose blocks are full. Sessions at
the same time share frames and headers, so the table has one session alone and eight together. Drafting ahead is off
unless asked for: its blocks carry the tokens that they build on. Exits with 1 when draft and target hop together exceed
the limit of their format in any line: 4000 bytes for SUPPORT and 400 for SAMPLE at lookahead 5.
"""

import argparse
import asyncio
import contextlib
import math
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpc.aio import EOF

from outrider.cli.child import LISTENING
from outrider.cli.tether import tethered
from outrider.net.channel import connect
from outrider.v1 import orchestrator_pb2_grpc
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_RATIO,
    GenerateRequest,
    OrchestratorServiceGetInfoRequest,
    Round,
    Speculation,
    StopConditions,
    TokenIds,
)
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, ROW_FORMAT_SAMPLE, ROW_FORMAT_SUPPORT, RowFormat

START_SECONDS, ROUND_SECONDS = 120.0, 60.0
LIMITS = {ROW_FORMAT_SUPPORT: 4000, ROW_FORMAT_SAMPLE: 400}
# Rounds before the count begins: the prefill, and what HTTP/2 sends once.
WARM_UP = 5


@dataclass
class Proxy:
    """Forwards TCP to one address and counts what passes, both ways together."""

    target: str
    address: str = ""
    count: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._pump(reader, onward_writer), self._pump(onward_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                self.count += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


def service(module: str, *flags: str) -> AbstractAsyncContextManager[str]:
    """A service as a process; yields its address."""
    return announced(module, "--port", "0", "--log-level", "error", *flags)


@asynccontextmanager
async def announced(module: str, *flags: str) -> AsyncIterator[str]:
    """A module that runs as a process; yields what it says that it listens on."""
    command = tethered((sys.executable, "-m", module, *flags))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            line = (await process.stdout.readline()).decode().strip()
        said = LISTENING.match(line)
        if said is None:
            raise RuntimeError(f"{module} said {line!r}")
        yield said[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@asynccontextmanager
async def proxied(address: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(address)
    server = await proxy.start()
    try:
        yield proxy
    finally:
        server.close()


@dataclass(frozen=True)
class Bytes:
    """Per round, by hop."""

    draft: float
    target: float
    client: float

    @property
    def workers(self) -> float:
        return self.draft + self.target


@dataclass(frozen=True)
class Hops:
    """The running services and the proxies between them."""

    stub: orchestrator_pb2_grpc.OrchestratorServiceStub
    draft: Proxy
    target: Proxy
    client: Proxy

    def counts(self) -> tuple[int, int, int]:
        return self.draft.count, self.target.count, self.client.count

    async def measure(self, row_format: "RowFormat.ValueType", lookahead: int, rounds: int, sessions: int) -> Bytes:
        """Mean bytes of a round with a full block, with so many sessions at a time; `rounds` of each are counted."""
        count = _Count(self, sessions * WARM_UP, sessions * (WARM_UP + rounds), lookahead)
        # Twice as long as needed: no session ends before the last round that counts.
        wanted = request(row_format, lookahead, 2 * (WARM_UP + rounds + 2) * (lookahead + 1))
        calls = [self.stub.Generate(wanted) for _ in range(sessions)]
        readers = [asyncio.create_task(count.read(call)) for call in calls]
        try:
            async with asyncio.timeout(START_SECONDS + rounds * ROUND_SECONDS):
                await asyncio.wait([*readers, asyncio.create_task(count.done.wait())], return_when="FIRST_COMPLETED")
            if not count.done.is_set():
                await asyncio.gather(*readers)
                raise RuntimeError("a generation ended before it was counted")
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        parts = zip(count.after, count.before, strict=True)
        return Bytes(*((after - before) / (rounds * sessions) for after, before in parts))


class _Count:
    """The rounds of all sessions, and what had crossed the wire when counting began and ended."""

    def __init__(self, hops: Hops, first: int, last: int, lookahead: int) -> None:
        self._hops, self._first, self._last, self._lookahead = hops, first, last, lookahead
        self._rounds = 0
        self.before = self.after = (0, 0, 0)
        self.done = asyncio.Event()

    async def read(self, call: Any) -> None:
        """Counts the rounds of one generation until counting is done."""
        while not self.done.is_set():
            response = await call.read()
            if response is EOF:
                return
            if response.HasField("round"):
                self._add(response.round)

    def _add(self, one: Round) -> None:
        self._rounds += 1
        if self._rounds == self._first:
            self.before = self._hops.counts()
        if self._rounds > self._first and one.drafted != self._lookahead:
            raise RuntimeError(f"a round had a block of {one.drafted}, not {self._lookahead}")
        if self._rounds == self._last:
            self.after = self._hops.counts()
            self.done.set()


def request(row_format: "RowFormat.ValueType", lookahead: int, max_tokens: int) -> GenerateRequest:
    rule = ACCEPTANCE_COUPLED if row_format == ROW_FORMAT_SAMPLE else ACCEPTANCE_RATIO
    return GenerateRequest(
        token_ids=TokenIds(ids=range(64)),
        stop=StopConditions(max_tokens=max_tokens),
        speculation=Speculation(lookahead=lookahead, acceptance=rule, row_format=row_format),
    )


@asynccontextmanager
async def hops(vocab_size: int, ahead_blocks: int) -> AsyncIterator[Hops]:
    """Target, draft and orchestrator over one law for every prefix, which is made once."""
    # The draft is the target: every block is kept whole, and every round is like the next.
    model = f"synthetic:vocab_size={vocab_size},order=0,scale=3"
    async with (
        service("target_service", "--model", model) as target,
        proxied(target) as target_proxy,
        service("draft_service", "--model", model, "--ahead-blocks", str(ahead_blocks)) as draft,
        proxied(draft) as draft_proxy,
        service(
            "orchestrator",
            *("--targets", target_proxy.address, "--drafts", draft_proxy.address, "--tokenizer", model),
            *("--draft-timeout", "30"),
        ) as orchestrator,
        proxied(orchestrator) as client_proxy,
        connect(client_proxy.address) as channel,
    ):
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        yield Hops(stub, draft_proxy, target_proxy, client_proxy)


async def until_linked(stub: orchestrator_pb2_grpc.OrchestratorServiceStub) -> None:
    """Returns when the orchestrator uses all of its workers."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            info = await stub.GetInfo(OrchestratorServiceGetInfoRequest(), timeout=START_SECONDS)
            if all(worker.usable for worker in info.workers):
                return
            await asyncio.sleep(0.1)


async def run(options: argparse.Namespace) -> bool:
    """Prints the table; whether every limit was kept."""
    limits = {ROW_FORMAT_SUPPORT: options.support_limit, ROW_FORMAT_SAMPLE: options.sample_limit}
    missed = []
    print("| vocabulary | sessions | rows | draft hop | target hop | together | client hop |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for vocab_size in options.vocabularies:
        async with hops(vocab_size, options.ahead_blocks) as running:
            await until_linked(running.stub)
            for sessions in options.sessions:
                for row_format in (ROW_FORMAT_LOGITS, ROW_FORMAT_SUPPORT, ROW_FORMAT_SAMPLE):
                    per_round = await running.measure(row_format, options.lookahead, options.rounds, sessions)
                    name = RowFormat.Name(row_format).removeprefix("ROW_FORMAT_")
                    cells = (per_round.draft, per_round.target, per_round.workers, per_round.client)
                    numbers = " | ".join(f"{cell:,.0f}" for cell in cells)
                    print(f"| {vocab_size} | {sessions} | {name} | {numbers} |", flush=True)
                    if per_round.workers > limits.get(row_format, math.inf):
                        found = f"{per_round.workers:.0f} bytes a round at vocabulary {vocab_size}, {sessions} sessions"
                        missed.append(f"{name}: {found}, limit {limits[row_format]}")
    for line in missed:
        print(f"MISSED: {line}")
    return not missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--lookahead", type=int, default=5)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8], help="at a time")
    parser.add_argument("--ahead-blocks", type=int, default=0, help="blocks of a session that are drafted ahead")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--support-limit", type=int, default=LIMITS[ROW_FORMAT_SUPPORT], help="bytes a round")
    parser.add_argument("--sample-limit", type=int, default=LIMITS[ROW_FORMAT_SAMPLE], help="bytes a round")
    parser.add_argument("--smoke", action="store_true", help="a small vocabulary and few rounds: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.vocabularies, options.rounds = [300], 8
    return 0 if asyncio.run(run(options)) else 1


if __name__ == "__main__":
    sys.exit(main())
