"""The lookahead control against every fixed lookahead, in cells of load and acceptance.

    python -m bench.lookahead_cells

Draft and target workers as processes over synthetic models that sleep: a pass of the target takes 25 ms and 0.4 ms for
each position, a step of the draft 2.5 ms and 0.05 ms; all are longer by the factor in column "times", so that the
Python of so many clients fits into the cores of a small machine. A draft token is the target's own
with the cell's probability. Clients generate greedily and without pause. Control and fixed lookaheads have
orchestrators of their own over the same workers, so that the control learns from its own rounds alone; for each
acceptance and factor its orchestrator is new. Legs alternate. A leg's rate is the sum over its clients of the tokens a
second between two of a client's tokens, the same in all legs; within a repetition all legs have the same prompts, and
with them the same right and wrong draft tokens. Each cell begins with a leg of the control in which it may learn.

The ratio does not favour a lookahead that was the best by chance: the control's rate in either half of the
repetitions is held against that of the lookahead which was the best in the other half.

With --nodes the control has a second orchestrator that may also choose trees of so many tokens; its rate is held
against the best fixed lookahead, all of which are chains, in the same way.

Draft calls are those of the control in its counted legs: blocks, probes and prefixes to cache. Exits with 1 when the
control is below the limit in any cell, or asks for anything but probes where plain decoding is best by a twentieth.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
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
# The control that may choose trees.
TREES = -1
# Tokens of each client before a leg counts, and those that do: about 1 and 4 s of plain decoding, times the factor.
WARM_UP, COUNTED = {1: 40, 4: 40, 16: 24, 64: 8}, {1: 160, 4: 128, 16: 64, 64: 24}
# Seconds, times the factor, after which a leg ends in any case: one that is so slow is not the best.
LONGEST_LEG = 12.0
# Tokens of a generation: more than a leg lasts, and 64 of them within what an orchestrator runs at once.
ENDLESS = 200_000


@dataclass
class Client:
    """One generation, so far.

    Attributes:
        tokens: all.
        marks: (time, tokens) when it had so many tokens that counting began, and since then the last.
    """

    tokens: int = 0
    marks: list[tuple[float, int]] = field(default_factory=list)

    def heard(self, tokens: int, first: int, last: int) -> bool:
        """So many more, of which those from `first` to `last` count. Whether the last has come just now."""
        before, self.tokens = self.tokens, self.tokens + tokens
        if before < last and self.tokens >= first:
            self.marks[1:] = [(time.perf_counter(), self.tokens)]
        return before < last <= self.tokens

    @property
    def rate(self) -> float:
        """Tokens a second; 0 before there were two marks."""
        if len(self.marks) < 2:
            return 0.0
        (start, before), (end, after) = self.marks
        return (after - before) / (end - start)


@dataclass(frozen=True)
class Leg:
    """Tokens a second of all clients, and rounds."""

    rate: float
    rounds: int


@dataclass
class Cell:
    """One load at one acceptance: rates by lookahead, the control's under AUTO, and its draft calls by kind."""

    clients: int
    acceptance: float
    scale: float
    legs: dict[int | None, list[Leg]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def rate(self, lookahead: int | None) -> float:
        return statistics.mean(leg.rate for leg in self.legs[lookahead])

    @property
    def best(self) -> int:
        return self._best(self.legs)

    @property
    def ratio(self) -> float:
        """Of the control, see `ratio_of`."""
        return self.ratio_of(AUTO)

    def ratio_of(self, control: int | None) -> float:
        """On average over the halves; with one repetition, to the best in it."""
        count = len(self.legs[AUTO])
        halves = [self._part(range(half, count, 2)) for half in range(min(2, count))]
        return statistics.mean(
            statistics.mean(leg.rate for leg in half[control])
            / statistics.mean(leg.rate for leg in half[self._best(other)])
            for half, other in zip(halves, reversed(halves), strict=True)
        )

    def _part(self, repetitions: Sequence[int]) -> dict[int | None, list[Leg]]:
        return {lookahead: [legs[each] for each in repetitions] for lookahead, legs in self.legs.items()}

    @staticmethod
    def _best(legs: Mapping[int | None, Sequence[Leg]]) -> int:
        fixed = [each for each in legs if each not in (AUTO, TREES) and each is not None]
        return max(fixed, key=lambda each: statistics.mean(leg.rate for leg in legs[each]))

    @property
    def rounds(self) -> int:
        return sum(leg.rounds for leg in self.legs[AUTO])

    def shortfall(self, limit: float) -> str:
        """What is wrong with the cell; empty when nothing is."""
        name = f"{self.clients} clients, acceptance {self.acceptance:g}"
        if self.ratio < limit:
            return f"{name}: {self.ratio:.3f} of lookahead {self.best}, limit {limit:g}"
        if TREES in self.legs and self.ratio_of(TREES) < limit:
            return f"{name}: {self.ratio_of(TREES):.3f} of lookahead {self.best} with trees, limit {limit:g}"
        others = max((self.rate(each) for each in self.legs if each not in (AUTO, TREES, 0)), default=0.0)
        if self.best == 0 and self.rate(0) > CLEARLY * others and self.calls["block"]:
            return f"{name}: {self.calls['block']} blocks where plain decoding is clearly best"
        return ""


class Clients:
    """Generations without end, over one orchestrator."""

    def __init__(self, orchestrator: RunningOrchestrator) -> None:
        self._orchestrator = orchestrator
        self._rounds = 0

    async def leg(
        self, clients: int, lookahead: int | None, prompts: int, warm_up: int, counted: int, seconds: float
    ) -> Leg:
        """Until every client has so many tokens after the warm-up, or for so long. `prompts`: which ones."""
        running, rounds = [Client() for _ in range(clients)], self._rounds
        missing = asyncio.Semaphore(0)
        readers = [
            asyncio.create_task(self._read(request(number, lookahead, prompts), client, warm_up, counted, missing))
            for number, client in enumerate(running)
        ]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    for _ in running:
                        await missing.acquire()
            ended = [reader for reader in readers if reader.done()]
            if ended:
                await asyncio.gather(*ended)
                raise RuntimeError("a generation ended before it was counted")
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        return Leg(sum(client.rate for client in running), self._rounds - rounds)

    async def _read(
        self, wanted: GenerateRequest, client: Client, warm_up: int, counted: int, missing: asyncio.Semaphore
    ) -> None:
        call = self._orchestrator.stub.Generate(wanted)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._rounds += response.HasField("round")
                if client.heard(len(response.tokens), warm_up, warm_up + counted):
                    missing.release()
        finally:
            call.cancel()


def request(number: int, lookahead: int | None, prompts: int) -> GenerateRequest:
    prompt = (number % VOCAB, number // VOCAB, prompts % VOCAB)
    return ask(prompt, max_tokens=ENDLESS, lookahead=lookahead, temperature=0)


@dataclass(frozen=True)
class Pair:
    """The orchestrators of the control, of the fixed lookaheads, and of the control with trees, over one pair."""

    control: RunningOrchestrator
    fixed: RunningOrchestrator
    trees: RunningOrchestrator
    meters: Meters

    def calls(self) -> dict[str, int]:
        return {kind: self.meters.count("outrider.draft_calls", kind=kind) for kind in KINDS}


@asynccontextmanager
async def pair(options: argparse.Namespace, acceptance: float, scale: float) -> AsyncIterator[Pair]:
    target = f"{MODEL},pass_ms={scale * TARGET_MS},position_us={scale * TARGET_POSITION_US}"
    draft = (
        f"{MODEL},pass_ms={scale * DRAFT_MS},position_us={scale * DRAFT_POSITION_US},{options.draft.format(acceptance)}"
    )
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
        trees = await stack.enter_async_context(
            start_orchestrator(*workers, lookahead="auto", tree_nodes=options.nodes, **settings)  # type: ignore[arg-type]
        )
        yield Pair(control, fixed, trees, meters)


async def measure(running: Pair, cell: Cell, options: argparse.Namespace) -> None:
    """Fills the cell."""
    control, fixed, trees = (Clients(it) for it in (running.control, running.fixed, running.trees))
    clients, controls = cell.clients, [AUTO, TREES] if options.nodes else [AUTO]
    marks = WARM_UP.get(clients, 8), max(1, int(options.share * COUNTED.get(clients, 24)))
    for those in (control, trees)[: len(controls)]:
        await those.leg(clients, AUTO, options.repeats, *marks, cell.scale * options.learn)
    for repetition in range(options.repeats):
        turn = repetition * len(options.lookaheads) // options.repeats
        order = [*controls, *options.lookaheads]
        for lookahead in order[turn:] + order[:turn]:
            before = running.calls()
            those = control if lookahead is AUTO else trees if lookahead == TREES else fixed
            asked = AUTO if lookahead == TREES else lookahead
            leg = await those.leg(clients, asked, repetition, *marks, cell.scale * LONGEST_LEG)
            cell.legs[lookahead].append(leg)
            if lookahead is AUTO:
                for kind, count in running.calls().items():
                    cell.calls[kind] += count - before[kind]


async def run(options: argparse.Namespace) -> list[Cell]:
    cells = []
    for acceptance in options.acceptances:
        for scale in sorted({SCALES.get(clients, 1.0) for clients in options.clients}):
            async with pair(options, acceptance, scale) as running:
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
    return "control" if lookahead is AUTO else "trees" if lookahead == TREES else str(lookahead)


def report(cells: Sequence[Cell], options: argparse.Namespace) -> bool:
    """Prints the table and what is short; whether nothing is."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for title in (
        "clients",
        "acceptance",
        "times",
        *map(str, options.lookaheads),
        "control",
        "ratio",
        "trees",
        "ratio",
    ):
        table.add_column(title, justify="right")
    for title in ("rounds", *(f"{kind}s" for kind in ("block", "probe", "prefixe"))):
        table.add_column(title, justify="right")
    for cell in cells:
        rates = [f"{'*' if each == cell.best else ''}{cell.rate(each):.1f}" for each in (*options.lookaheads, AUTO)]
        head = (str(cell.clients), f"{cell.acceptance:g}", f"{cell.scale:g}")
        counts = (cell.rounds, *(cell.calls[kind] for kind in KINDS))
        treed = [f"{cell.rate(TREES):.1f}", f"{cell.ratio_of(TREES):.3f}"] if TREES in cell.legs else ["", ""]
        table.add_row(*head, *rates, f"{cell.ratio:.3f}", *treed, *map(str, counts))
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
    parser.add_argument("--nodes", type=int, default=0, help="most tokens of a tree; 0: no legs with trees")
    parser.add_argument(
        "--draft",
        default="agree={}",
        help="how the draft differs from the target, by acceptance; noise={} gives second candidates some worth",
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--learn", type=float, default=4.0, help="seconds at most, times the factor, before a cell")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual tokens, counted in a leg")
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--smoke", action="store_true", help="one short cell: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.clients, options.acceptances, options.lookaheads = [2], [0.9], [0, 4]
        options.repeats, options.learn, options.share = 1, 1.0, 0.2
    return 0 if report(asyncio.run(run(options)), options) else 1


if __name__ == "__main__":
    sys.exit(main())
