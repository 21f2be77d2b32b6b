"""What drafting ahead hides: rounds with it off and on, over a link to the draft worker with a delay and without.

    python -m bench.drafting_ahead

Both workers are synthetic models whose passes take a set time, as on devices of their own; the draft is the target with
noise in its logits. The link's delay is a TCP proxy's. Prints, for each delay and rule, the mean round with drafting
ahead off and on, the share of blocks that had been drafted ahead (hits) and of those that were there when their round
began, the draft tokens ahead that were of no use for each round, and the ideal: a hit takes the longer of drafting
(lookahead + 1 passes: the block and the guess before it) and the rest of the round, a miss what a round takes with
drafting ahead off. Exits with 1 when a round takes longer than the ideal over 0.97.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.observe.metrics import DraftMetrics
from outrider.v1.orchestrator_pb2 import ACCEPTANCE_COUPLED, ACCEPTANCE_RATIO, Acceptance, Round
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
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


@dataclass(frozen=True)
class Measured:
    """Rounds of one generation; times in seconds, means over the rounds.

    Attributes:
        length: of a round.
        wait: for the block.
        hits: share of the blocks that had been drafted ahead, or begun.
        ready: share of the blocks that were there when their round began.
        wasted: draft tokens ahead of no use, for each round.
        tokens: committed, for each round.
    """

    length: float
    wait: float
    hits: float
    ready: float
    wasted: float
    tokens: float


async def measure(options: argparse.Namespace, rule: "Acceptance.ValueType", delay: float, blocks: int) -> Measured:
    """One generation, with so many blocks drafted ahead."""
    model = {"vocab_size": 64, "seed": 3, "scale": 2.0, "context_length": 1 << 16}
    target = SyntheticEngine(SyntheticSpec(**model, pass_ms=options.target_ms))
    draft = SyntheticEngine(SyntheticSpec(**model, pass_ms=options.draft_ms, noise=options.noise))
    reader = InMemoryMetricReader()
    metrics = DraftMetrics(MeterProvider([reader]))
    async with (
        start_target(target) as verifier,
        start_draft(draft, ahead_blocks=blocks, metrics=metrics) as drafter,
        delayed(drafter.address, delay) as address,
        start_orchestrator(
            [verifier.address], [address], tokenizer="synthetic:vocab_size=64", draft_timeout=30.0
        ) as orchestrator,
    ):
        rounds, seconds = await timed_rounds(orchestrator, options, rule)
        wasted = counted(reader, "outrider.draft.ahead_wasted_tokens") if blocks else 0.0
    count = len(rounds)
    return Measured(
        length=seconds / count,
        wait=sum(one.draft_wait_micros for one in rounds) / count / 1e6,
        hits=sum(one.drafted_ahead > 0 for one in rounds) / count,
        ready=sum(one.block_ready for one in rounds) / count,
        wasted=wasted / count,
        tokens=sum(one.accepted + 1 for one in rounds) / count,
    )


async def timed_rounds(
    orchestrator: RunningOrchestrator, options: argparse.Namespace, rule: "Acceptance.ValueType"
) -> tuple[list[Round], float]:
    """The rounds after the warm-up, and the seconds that they took."""
    wanted = ask(
        (1, 2, 3, 4),
        max_tokens=(options.rounds + WARM_UP + 2) * (options.lookahead + 1),
        lookahead=options.lookahead,
        seed=options.seed,
        acceptance=rule,
    )
    rounds: list[Round] = []
    began = 0.0
    call = orchestrator.stub.Generate(wanted)
    async for response in call:
        if not response.HasField("round"):
            continue
        rounds.append(response.round)
        if len(rounds) == WARM_UP:
            began = time.perf_counter()
        if len(rounds) == WARM_UP + options.rounds:
            break
    seconds = time.perf_counter() - began
    call.cancel()
    return rounds[WARM_UP:], seconds


def ideal(options: argparse.Namespace, off: Measured, hits: float) -> float:
    """The mean round, in seconds, when a hit overlaps drafting with everything else."""
    drafting = (options.lookahead + 1) * options.draft_ms / 1e3
    return hits * max(drafting, off.length - off.wait) + (1 - hits) * off.length


async def run(options: argparse.Namespace) -> bool:
    """Prints the table; whether the goal was reached in every line."""
    print("| delay each way | rule | off | on | tokens a round | hits | ready | wasted a round | ideal | ideal / on |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    reached = True
    for delay in options.delays:
        for rule in RULES:
            off = await measure(options, rule, delay / 1e3, 0)
            on = await measure(options, rule, delay / 1e3, options.blocks)
            best = ideal(options, off, on.hits)
            ratio = best / on.length
            name = Acceptance.Name(rule).removeprefix("ACCEPTANCE_").lower()
            times = f"{off.length * 1e3:.1f} ms | {on.length * 1e3:.1f} ms | {on.tokens:.2f}"
            shares = f"{on.hits:.0%} | {on.ready:.0%} | {on.wasted:.1f}"
            print(f"| {delay:g} ms | {name} | {times} | {shares} | {best * 1e3:.1f} ms | {ratio:.3f} |", flush=True)
            reached = reached and ratio >= options.goal
    if not reached:
        print(f"MISSED: a round takes longer than the ideal over {options.goal}")
    return reached


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 20.0], help="of the draft link, ms each way")
    parser.add_argument("--target-ms", type=float, default=60.0, help="of a target pass")
    parser.add_argument("--draft-ms", type=float, default=8.0, help="of a draft pass")
    parser.add_argument("--noise", type=float, default=0.2, help="of the draft's logits; the target's have 2")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2, help="that are drafted ahead")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--smoke", action="store_true", help="few and short rounds: shows that this runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.rounds, options.target_ms, options.draft_ms, options.delays = 12, 20.0, 2.0, [5.0]
    return 0 if asyncio.run(run(options)) else 1


if __name__ == "__main__":
    sys.exit(main())
