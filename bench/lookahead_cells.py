"""The lookahead control against every fixed lookahead, in cells of load and acceptance.

    python -m bench.lookahead_cells

Draft and target workers as processes over synthetic models that sleep: a pass of the target takes 25 ms and 0.4 ms for
each position, a step of the draft 2.5 ms and 0.05 ms; all are longer by the factor in column "times", so that the
Python of so many clients fits into the cores of a small machine. A draft token is the target's own
with the cell's probability. Clients generate greedily and without pause. Control and fixed lookaheads have
orchestrators of their own over the same workers, so that the control learns from its own rounds alone; for each
acceptance and factor its orchestrator is new. Legs alternate, figures are medians of the repetitions; a leg begins with
rounds that are not counted, and each cell with a leg of the control in which it may learn.

Draft calls are those of the control in its counted legs: blocks, probes and prefixes to cache. Exits with 1 when the
control is below the limit in any cell, or asks for anything but probes where plain decoding is best by a twentieth.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.wire_bytes import service
from orchestrator.metrics import Metrics
from outrider.v1.orchestrator_pb2 import GenerateRequest
from tests.harness.meters import Meters
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator

VOCAB = 64
LIMIT = 0.97
CLIENTS, ACCEPTANCES = (1, 4, 16, 64), (0.0, 0.3, 0.6, 0.9)
LOOKAHEADS = (0, 1, 2, 4, 8)
LONGEST = 16
TARGET_MS, TARGET_POSITION_US, DRAFT_MS, DRAFT_POSITION_US = 25.0, 400.0, 2.5, 50.0
SCALES = {1: 1.0, 4: 1.0, 16: 2.0, 64: 4.0}
# Plain decoding that is better than everything else by this factor leaves no room for blocks.
CLEARLY = 1.05
MODEL = f"synthetic:vocab_size={VOCAB},context_length=1000000"
KINDS = ("block", "probe", "prefix")
AUTO = None


@dataclass(frozen=True)
class Leg:
    """What so many clients got in the counted time."""

    tokens: int
    seconds: float
    rounds: int
    plain: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Cell:
    """One load at one acceptance: rates by lookahead, the control's under AUTO, and its draft calls by kind."""

    clients: int
    acceptance: float
    scale: float
    legs: dict[int | None, list[Leg]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def rate(self, lookahead: int | None) -> float:
        return statistics.median(leg.rate for leg in self.legs[lookahead])

    @property
    def best(self) -> int:
        return max((each for each in self.legs if each is not AUTO), key=self.rate)

    @property
    def ratio(self) -> float:
        return self.rate(AUTO) / self.rate(self.best)

    @property
    def rounds(self) -> int:
        return sum(leg.rounds for leg in self.legs[AUTO])

    def shortfall(self, limit: float) -> str:
        """What is wrong with the cell; empty when nothing is."""
        name = f"{self.clients} clients, acceptance {self.acceptance:g}"
        if self.ratio < limit:
            return f"{name}: {self.ratio:.3f} of lookahead {self.best}, limit {limit:g}"
        others = max((self.rate(each) for each in self.legs if each not in (AUTO, 0)), default=0.0)
        if self.best == 0 and self.rate(0) > CLEARLY * others and self.calls["block"]:
            return f"{name}: {self.calls['block']} blocks where plain decoding is clearly best"
        return ""


class Clients:
    """Generations without end; counts what they get."""

    def __init__(self, orchestrator: RunningOrchestrator) -> None:
        self._orchestrator = orchestrator
        self._tokens = self._rounds = self._plain = 0

    async def leg(self, clients: int, lookahead: int | None, warm_up: float, seconds: float) -> Leg:
        """Rounds of so many clients: those of the first `warm_up` seconds do not count."""
        readers = [asyncio.create_task(self._read(request(number, lookahead))) for number in range(clients)]
        try:
            await asyncio.sleep(warm_up)
            before, start = (self._tokens, self._rounds, self._plain), time.perf_counter()
            await asyncio.sleep(seconds)
            after, end = (self._tokens, self._rounds, self._plain), time.perf_counter()
            ended = [reader for reader in readers if reader.done()]
            if ended:
                await asyncio.gather(*ended)
                raise RuntimeError("a generation ended before it was counted")
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        tokens, rounds, plain = (now - then for now, then in zip(after, before, strict=True))
        return Leg(tokens, end - start, rounds, plain)

    async def _read(self, wanted: GenerateRequest) -> None:
        call = self._orchestrator.stub.Generate(wanted)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._tokens += len(response.tokens)
                self._rounds += response.HasField("round")
                self._plain += response.round.drafted == 0
        finally:
            call.cancel()


def request(number: int, lookahead: int | None) -> GenerateRequest:
    prompt = (number % VOCAB, number // VOCAB, 1)
    return ask(prompt, max_tokens=500_000, lookahead=lookahead, temperature=0)


@dataclass(frozen=True)
class Pair:
    """The control's orchestrator and the one of the fixed lookaheads, over the same workers."""

    control: RunningOrchestrator
    fixed: RunningOrchestrator
    meters: Meters

    def calls(self) -> dict[str, int]:
        return {kind: self.meters.count("outrider.draft_calls", kind=kind) for kind in KINDS}


@asynccontextmanager
async def pair(acceptance: float, scale: float) -> AsyncIterator[Pair]:
    target = f"{MODEL},pass_ms={scale * TARGET_MS},position_us={scale * TARGET_POSITION_US}"
    draft = f"{MODEL},pass_ms={scale * DRAFT_MS},position_us={scale * DRAFT_POSITION_US},agree={acceptance}"
    async with AsyncExitStack() as stack:
        workers = [
            [await stack.enter_async_context(service(module, "--model", model))]
            for module, model in (("target_service", target), ("draft_service", draft))
        ]
        meters = Meters()
        settings = {"tokenizer": MODEL, "draft_timeout": 30, "max_lookahead": LONGEST}
        control = await stack.enter_async_context(
            start_orchestrator(*workers, metrics=Metrics(meters.provider), lookahead="auto", **settings)  # type: ignore[arg-type]
        )
        fixed = await stack.enter_async_context(
            start_orchestrator(*workers, metrics=Metrics(Meters().provider), **settings)
        )  # type: ignore[arg-type]
        yield Pair(control, fixed, meters)


async def measure(running: Pair, cell: Cell, options: argparse.Namespace) -> None:
    """Fills the cell."""
    control, fixed = Clients(running.control), Clients(running.fixed)
    await control.leg(cell.clients, AUTO, 0.0, cell.scale * options.learn)
    for repetition in range(options.repeats):
        turn = repetition * len(options.lookaheads) // options.repeats
        order = [AUTO, *options.lookaheads]
        for lookahead in order[turn:] + order[:turn]:
            before = running.calls()
            clients = control if lookahead is AUTO else fixed
            leg = await clients.leg(cell.clients, lookahead, cell.scale * options.warm_up, cell.scale * options.seconds)
            cell.legs[lookahead].append(leg)
            if lookahead is AUTO:
                for kind, count in running.calls().items():
                    cell.calls[kind] += count - before[kind]


async def run(options: argparse.Namespace) -> list[Cell]:
    cells = []
    for acceptance in options.acceptances:
        for scale in sorted({SCALES.get(clients, 1.0) for clients in options.clients}):
            async with pair(acceptance, scale) as running:
                for clients in options.clients:
                    if SCALES.get(clients, 1.0) == scale:
                        cells.append(Cell(clients, acceptance, scale))
                        await measure(running, cells[-1], options)
                        print(line(cells[-1]), file=sys.stderr, flush=True)
    return sorted(cells, key=lambda cell: (cell.clients, cell.acceptance))


def line(cell: Cell) -> str:
    rates = ", ".join(f"{name(each)} {cell.rate(each):.1f}" for each in cell.legs)
    return f"{cell.clients} clients, acceptance {cell.acceptance:g}: {rates}; ratio {cell.ratio:.3f}, {cell.calls}"


def name(lookahead: int | None) -> str:
    return "control" if lookahead is AUTO else str(lookahead)


def report(cells: Sequence[Cell], options: argparse.Namespace) -> bool:
    """Prints the table and what is short; whether nothing is."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for title in ("clients", "acceptance", "times", *map(str, options.lookaheads), "control", "ratio"):
        table.add_column(title, justify="right")
    for title in ("rounds", *(f"{kind}s" for kind in ("block", "probe", "prefixe"))):
        table.add_column(title, justify="right")
    for cell in cells:
        rates = [f"{'*' if each == cell.best else ''}{cell.rate(each):.1f}" for each in (*options.lookaheads, AUTO)]
        head = (str(cell.clients), f"{cell.acceptance:g}", f"{cell.scale:g}")
        counts = (cell.rounds, *(cell.calls[kind] for kind in KINDS))
        table.add_row(*head, *rates, f"{cell.ratio:.3f}", *map(str, counts))
    Console(width=150).print(table)
    missed = [shortfall for cell in cells if (shortfall := cell.shortfall(options.limit))]
    for shortfall in missed:
        print(f"MISSED: {shortfall}")
    print(f"least ratio to the best fixed lookahead: {min(cell.ratio for cell in cells):.3f} (limit {options.limit:g})")
    return not missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--acceptances", type=float, nargs="+", default=list(ACCEPTANCES))
    parser.add_argument(
        "--lookaheads", type=int, nargs="+", default=list(LOOKAHEADS), help="fixed ones to compare with"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--learn", type=float, default=4.0, help="seconds, times the cell's factor, before the cell")
    parser.add_argument("--warm-up", type=float, default=1.5, help="seconds, times the factor, before a leg counts")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of a leg, times the factor")
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--smoke", action="store_true", help="one short cell: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.clients, options.acceptances, options.lookaheads = [2], [0.9], [0, 4]
        options.repeats, options.learn, options.seconds = 1, 1.0, 1.0
    return 0 if report(asyncio.run(run(options)), options) else 1


if __name__ == "__main__":
    sys.exit(main())
