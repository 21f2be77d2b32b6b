"""`outrider demo`: a real model on this machine, speculative beside plain decoding in one run."""

import os
import sys
from typing import Annotated

import grpc
import typer
from rich.console import Console

from outrider.cli.client import generate
from outrider.cli.demo_prompts import PROMPTS, DemoPrompt
from outrider.cli.demo_runs import DemoRuns, Plan, caption
from outrider.cli.drafts import shipped_draft
from outrider.cli.options import (
    LONGEST_LOOKAHEAD,
    Device,
    Dtype,
    LogLevel,
    MeasureThreads,
    ProposerName,
    Threads,
)
from outrider.cli.report import comparison_table, number
from outrider.cli.run import Failure, run, told
from outrider.cli.startup import StartupView
from outrider.cli.system import System, SystemOptions, running_system
from outrider.cli.threads import with_threads
from outrider.cli.tokens import TokenWriter
from outrider.cli.weights import fetch
from outrider.net.channel import connect

_CALL_SECONDS = 120.0
# The lookahead control tries a new draft's blocks for some rounds before it judges them.
_WARM_UP_TOKENS = 32


def demo(
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each generation.")] = 96,
    lookahead: Annotated[
        int | None,
        typer.Option(min=1, max=LONGEST_LOOKAHEAD, help="Longest block; without it each round's is chosen by goodput."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each prompt, each way.")] = 2,
    dtype: Dtype = "bfloat16",
    device: Device = "",
    target_threads: Threads = 0,
    draft_threads: Threads = 0,
    measure_threads: MeasureThreads = True,
    color: Annotated[bool | None, typer.Option("--color/--no-color", help="Colour tokens by origin.")] = None,
) -> None:
    """Start the system with a small real model and compare speculative with plain decoding.

    The draft is a look-up in the prompt where the answer repeats parts of it, elsewhere a model distilled from
    the target.
    """
    with told():
        model = f"gguf:{fetch()}"
        draft = demo_draft(model)
    options = SystemOptions(
        target=model,
        draft=draft,
        lookahead=lookahead,
        proposers=(ProposerName.model.value, ProposerName.prompt_lookup.value),
        dtype=dtype,
        device=device,
        target_threads=target_threads,
        draft_threads=draft_threads,
        port=0,
        log_level=LogLevel.info.value,
    )
    colored = color if color is not None else sys.stdout.isatty() and "NO_COLOR" not in os.environ
    plan, writer = Plan(tokens, lookahead, runs), TokenWriter(sys.stdout, color=colored)
    run(_demo(options, plan, writer, measure=measure_threads))


def demo_draft(model: str) -> str:
    """MODEL of the demo's draft. Raises Failure."""
    draft = shipped_draft(model)
    if not draft:
        raise Failure("the demo's draft is not there: models/ is missing beside the package")
    return draft


async def _demo(options: SystemOptions, plan: Plan, writer: TokenWriter, *, measure: bool) -> None:
    options, words = await with_threads(options, measure=measure)
    if words:
        print(words, file=sys.stderr, flush=True)
    async with running_system(options, StartupView(Console(stderr=True), logs=False)) as system:
        _require_draft(system)
        async with connect(system.address) as channel:
            kinds = await system.supervisor.guard(_run_all(channel, plan, writer))
    table = comparison_table(
        [each.comparison() for each in kinds],
        title="Speculative beside plain decoding, both greedy",
        caption=caption(kinds, plan, options),
    )
    print()
    Console().print(table)


def _require_draft(system: System) -> None:
    for worker in system.info.workers:
        if not worker.usable:
            raise Failure(f"the {worker.kind} worker is not in use: {worker.reason}")


async def _run_all(channel: grpc.aio.Channel, plan: Plan, writer: TokenWriter) -> list[DemoRuns]:
    kinds = [DemoRuns(prompt, plan.lookahead) for prompt in PROMPTS]
    for each in kinds:
        await _warm_up(channel, each.prompt, plan)
    if explanation := writer.explanation():
        print(f"\nWhere each token comes from:\n{explanation}")
    for turn in range(plan.runs):
        if turn == 1:
            print("\n── again, without showing the text", flush=True)
        for index, each in enumerate(kinds):
            order = (plan.lookahead, 0) if (turn + index) % 2 == 0 else (0, plan.lookahead)
            for lookahead in order:
                await _run_one(channel, each, lookahead, plan, writer if turn == 0 else None)
    return kinds


async def _warm_up(channel: grpc.aio.Channel, prompt: DemoPrompt, plan: Plan) -> None:
    for lookahead in (plan.lookahead, 0):
        request = prompt.request(max_tokens=min(_WARM_UP_TOKENS, plan.tokens), lookahead=lookahead)
        await generate(channel, request, seconds=_CALL_SECONDS, on_tokens=lambda tokens: None)


async def _run_one(
    channel: grpc.aio.Channel, runs: DemoRuns, lookahead: int | None, plan: Plan, writer: TokenWriter | None
) -> None:
    """Runs one prompt one way; its text streams in when there is a writer."""
    name = f"{runs.prompt.kind}, {runs.way(lookahead)}"
    if writer:
        print(f"\n── {name}", flush=True)
    request = runs.prompt.request(max_tokens=plan.tokens, lookahead=lookahead)
    show = writer.write if writer else lambda tokens: None
    result = await generate(channel, request, seconds=_CALL_SECONDS, on_tokens=show)
    speed = f"{number(result.stats.tokens_per_second)} tokens/s"
    print(f"\n   {speed}" if writer else f"   {name:<45} {speed:>16}", flush=True)
    (runs.plain if lookahead == 0 else runs.speculative).append(result)
