"""What drafting ahead hides: rounds with it off and on, over a link to the draft worker with a delay and without.

    python -m bench.drafting_ahead

Both workers are synthetic models whose passes take a set time, as on devices of their own; the draft is the target with
noise in its logits. The link's delay is a TCP proxy's. Prints, for each delay and rule, the mean round with drafting
ahead off and on, the share of blocks that had been drafted ahead (hits) and of those that were there when their round
began, the draft tokens ahead that were of no use for each round, and the ideal: a hit takes the longer of drafting (a
block and the guess before it, from what waiting for a block takes with drafting ahead off, without the link) and the
rest of the round, a miss what a round takes with drafting ahead off. Exits with 1 when a round takes longer than the
ideal over 0.97.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.observe.metrics import DraftMetrics
from outrider.v1.orchestrator_pb2 import ACCEPTANCE_COUPLED, ACCEPTANCE_RATIO, Acceptance, Round
from tests.harness.orchestrator import ask, start_orchestrator
from tests.harness.workers import counted, start_draft, start_target

GOAL = 0.97
RULES = (ACCEPTANCE_RATIO, ACCEPTANCE_COUPLED)
# Rounds before the count begins: the prefill, and a first block that nothing was ahead of.
WARM_UP = 3


@asynccontextmanager
async def delayed(address: str, seconds: float) -> AsyncIterator[str]:
    """A TCP proxy to the address that hands everything on so much later, each way; yields its own address."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                # In order: equal delays, and the loop keeps the order of equal times.
                loop.call_later(seconds, writer.write, data)
        loop.call_later(seconds, writer.close)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(*address.split(":"))
        for one in (pump(reader, onward_writer), pump(onward_reader, writer)):
            tasks.add(asyncio.create_task(one))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Rounds:
    """The rounds of one way to draft, over several generations that took turns with the other.

    Attributes:
        seconds: how long each took, from message to message.
        waited: how long each waited for its block, in seconds.
        hit: whether the block of each had been drafted ahead, or begun.
        ready: whether it was there when the round began.
        tokens: committed.
        wasted: draft tokens ahead that were of no use.
    """

    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    hit: list[bool] = field(default_factory=list)
    ready: list[bool] = field(default_factory=list)
    tokens: int = 0
    wasted: float = 0.0

    def add(self, one: Round, seconds: float) -> None:
        self.seconds.append(seconds)
        self.waited.append(one.draft_wait_micros / 1e6)
        self.hit.append(one.drafted_ahead > 0)
        self.ready.append(one.block_ready)
        self.tokens += one.accepted + 1

    @property
    def hits(self) -> float:
        return statistics.mean(self.hit)

    @property
    def length(self) -> float:
        """Of a round: the medians of hits and misses, each with its share. A busy machine's pauses are in none."""
        kinds = [
            [one for one, hit in zip(self.seconds, self.hit, strict=True) if hit is kind] for kind in (False, True)
        ]
        return sum(statistics.median(kind) * len(kind) / len(self.seconds) for kind in kinds if kind)

    def mean(self, total: float) -> float:
        return total / len(self.seconds)


async def measure(
    options: argparse.Namespace, rule: "Acceptance.ValueType", delay: float, seed: int, blocks: int, into: Rounds
) -> None:
    """One generation, with so many blocks drafted ahead."""
    model = {"vocab_size": 64, "seed": 3, "scale": 2.0, "context_length": 1 << 16}
    target = SyntheticEngine(SyntheticSpec(**model, pass_ms=options.target_ms))
    draft = SyntheticEngine(SyntheticSpec(**model, pass_ms=options.draft_ms, noise=options.noise))
    reader = InMemoryMetricReader()
    metrics = DraftMetrics(MeterProvider([reader]))
    wanted = ask(
        (1, 2, 3, 4),
        max_tokens=(options.rounds + WARM_UP + 2) * (options.lookahead + 1),
        lookahead=options.lookahead,
        seed=seed,
        acceptance=rule,
    )
    async with (
        start_target(target) as verifier,
        start_draft(draft, ahead_blocks=blocks, ahead_others=options.others, metrics=metrics) as drafter,
        delayed(drafter.address, delay) as address,
        start_orchestrator(
            [verifier.address], [address], tokenizer="synthetic:vocab_size=64", draft_timeout=30.0
        ) as orchestrator,
    ):
        await read(orchestrator.stub.Generate(wanted), options.rounds, into)
        into.wasted += counted(reader, "outrider.draft.ahead_wasted_tokens") if blocks else 0.0


async def read(call: Any, count: int, into: Rounds) -> None:
    """Adds so many rounds after the warm-up."""
    rounds, before = 0, 0.0
    async for response in call:
        if not response.HasField("round"):
            continue
        rounds, now = rounds + 1, time.perf_counter()
        if rounds > WARM_UP:
            into.add(response.round, now - before)
        before = now
        if rounds == WARM_UP + count:
            break
    call.cancel()


def ideal(lookahead: int, delay: float, off: Rounds, hits: float) -> float:
    """The mean round, in seconds, when a hit overlaps drafting with everything else."""
    drafting = (statistics.median(off.waited) - 2 * delay) * (lookahead + 1) / lookahead
    rest = statistics.median(one - waited for one, waited in zip(off.seconds, off.waited, strict=True))
    return hits * max(drafting, rest) + (1 - hits) * off.length


async def run(options: argparse.Namespace) -> bool:
    """Prints the table; whether the goal was reached in every line."""
    print("| delay each way | rule | off | on | tokens a round | hits | ready | wasted a round | ideal | ideal / on |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    reached = True
    for delay in options.delays:
        for rule in RULES:
            off, on = Rounds(), Rounds()
            for seed in range(1, options.generations + 1):
                await measure(options, rule, delay / 1e3, seed, 0, off)
                await measure(options, rule, delay / 1e3, seed, options.blocks, on)
            best = ideal(options.lookahead, delay / 1e3, off, on.hits)
            ratio = best / on.length
            name = Acceptance.Name(rule).removeprefix("ACCEPTANCE_").lower()
            times = f"{off.length * 1e3:.1f} ms | {on.length * 1e3:.1f} ms | {on.mean(on.tokens):.2f}"
            shares = f"{on.hits:.0%} | {statistics.mean(on.ready):.0%} | {on.mean(on.wasted):.1f}"
            print(f"| {delay:g} ms | {name} | {times} | {shares} | {best * 1e3:.1f} ms | {ratio:.3f} |", flush=True)
            reached = reached and ratio >= options.goal
    if not reached:
        print(f"MISSED: a round takes longer than the ideal over {options.goal}")
    return reached


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 20.0], help="of the draft link, ms each way")
    parser.add_argument("--target-ms", type=float, default=120.0, help="of a target pass")
    parser.add_argument("--draft-ms", type=float, default=8.0, help="of a draft pass")
    parser.add_argument("--noise", type=float, default=0.2, help="of the draft's logits; the target's have 2")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2, help="that are drafted ahead")
    parser.add_argument("--others", type=int, default=2, help="other outcomes that are prepared for")
    parser.add_argument("--rounds", type=int, default=40, help="of a generation")
    parser.add_argument("--generations", type=int, default=3, help="each way")
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--smoke", action="store_true", help="few and short rounds: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rounds, options.generations, options.delays = 8, 1, [5.0]
        options.target_ms, options.draft_ms = 20.0, 2.0
    return 0 if asyncio.run(run(options)) else 1


if __name__ == "__main__":
    sys.exit(main())
