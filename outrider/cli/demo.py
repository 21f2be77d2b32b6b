"""`outrider demo`: a real model on this machine, speculative beside plain decoding in one run."""

import os
import sys
from dataclasses import dataclass, field
from typing import Annotated

import grpc
import typer
from rich.console import Console

from outrider.cli.client import Generation, generate
from outrider.cli.demo_prompts import PROMPTS, DemoPrompt
from outrider.cli.options import Device, Dtype, EarlyExitLayers, Lookahead, ProposerName, Threads
from outrider.cli.report import Comparison, comparison_table, number
from outrider.cli.run import Failure, run
from outrider.cli.startup import StartupView
from outrider.cli.stats import total
from outrider.cli.system import System, SystemOptions, running_system
from outrider.cli.tokens import TokenWriter
from outrider.cli.weights import fetch
from outrider.net.channel import connect

_CALL_SECONDS = 120.0
_WARM_UP_TOKENS = 8
_EARLY_EXIT_LAYERS = 20


@dataclass(frozen=True)
class _Plan:
    """How much the demo runs."""

    tokens: int
    lookahead: int
    runs: int
    color: bool


@dataclass
class _Outputs:
    """What one prompt gave, speculative and plain, run by run."""

    prompt: DemoPrompt
    speculative: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)

    def comparison(self) -> Comparison:
        speculative, plain = (total(each.stats for each in side) for side in (self.speculative, self.plain))
        return Comparison(self.prompt.kind, speculative, plain)

    def verdict(self) -> str:
        """Whether all runs gave the same tokens, and where the first difference is when not."""
        first = self.plain[0].tokens
        for other in (*self.plain, *self.speculative):
            if other.tokens != first:
                return f"{self.prompt.kind} differs from token {first_difference(first, other.tokens) + 1} on"
        return f"{self.prompt.kind} identical"


def first_difference(ours: list[int], theirs: list[int]) -> int:
    """Index of the first token that differs; the shorter length when one is the other's beginning."""
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def demo(
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each generation.")] = 64,
    lookahead: Lookahead = 4,
    early_exit_layers: EarlyExitLayers = _EARLY_EXIT_LAYERS,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each prompt, each way.")] = 2,
    dtype: Dtype = "bfloat16",
    device: Device = "",
    target_threads: Threads = 0,
    draft_threads: Threads = 0,
    color: Annotated[bool | None, typer.Option("--color/--no-color", help="Colour tokens by origin.")] = None,
) -> None:
    """Start the system with a small real model and compare speculative with plain decoding.

    The draft is the target's own first layers, and for the prompt that quotes its input a look-up in the prompt.
    """
    model = f"gguf:{fetch()}"
    options = SystemOptions(
        target=model,
        draft=model,
        lookahead=lookahead,
        proposers=(ProposerName.early_exit.value, ProposerName.prompt_lookup.value),
        early_exit_layers=early_exit_layers,
        dtype=dtype,
        device=device,
        target_threads=target_threads,
        draft_threads=draft_threads,
        port=0,
        log_level="warning",
    )
    colored = color if color is not None else sys.stdout.isatty() and "NO_COLOR" not in os.environ
    run(_demo(options, _Plan(tokens, lookahead, runs, colored)))


async def _demo(options: SystemOptions, plan: _Plan) -> None:
    async with running_system(options, StartupView(Console(stderr=True), logs=False)) as system:
        _require_draft(system)
        async with connect(system.address) as channel:
            outputs = await system.supervisor.guard(_run_all(channel, plan))
    comparisons = [each.comparison() for each in outputs]
    whole = (total(each.speculative for each in comparisons), total(each.plain for each in comparisons))
    title = f"Speculative (lookahead {plan.lookahead}) beside plain decoding (lookahead 0)"
    table = comparison_table([*comparisons, Comparison("total", *whole)], title=title, caption=_caption(outputs, plan))
    Console().print(table)


def _require_draft(system: System) -> None:
    for worker in system.info.workers:
        if not worker.usable:
            raise Failure(f"the {worker.kind} worker is not in use: {worker.reason}")


def _caption(outputs: list[_Outputs], plan: _Plan) -> str:
    texts = ", ".join(each.verdict() for each in outputs)
    times = "once" if plan.runs == 1 else f"{plan.runs} times"
    return (
        f"Greedy, at most {plan.tokens} tokens, each prompt {times} each way in alternating order, after a warm-up "
        f"that cached the prompt. Tokens of both ways: {texts}."
    )


async def _run_all(channel: grpc.aio.Channel, plan: _Plan) -> list[_Outputs]:
    outputs = [_Outputs(prompt) for prompt in PROMPTS]
    writer = TokenWriter(sys.stdout, color=plan.color)
    for each in outputs:
        await _warm_up(channel, each.prompt, plan)
    print(f"\n{writer.legend()}")
    for turn in range(plan.runs):
        for index, each in enumerate(outputs):
            order = (plan.lookahead, 0) if (turn + index) % 2 == 0 else (0, plan.lookahead)
            for lookahead in order:
                await _run_one(channel, each, lookahead, plan, writer if turn == 0 else None)
    return outputs


async def _warm_up(channel: grpc.aio.Channel, prompt: DemoPrompt, plan: _Plan) -> None:
    for lookahead in (plan.lookahead, 0):
        request = prompt.request(max_tokens=min(_WARM_UP_TOKENS, plan.tokens), lookahead=lookahead)
        await generate(channel, request, seconds=_CALL_SECONDS, on_tokens=lambda tokens: None)


async def _run_one(
    channel: grpc.aio.Channel, outputs: _Outputs, lookahead: int, plan: _Plan, writer: TokenWriter | None
) -> None:
    """Runs one prompt one way; its text streams in when there is a writer."""
    way = f"speculative, {outputs.prompt.proposer.value}" if lookahead else "plain"
    print(f"\n── {outputs.prompt.kind}, {way}", flush=True)
    request = outputs.prompt.request(max_tokens=plan.tokens, lookahead=lookahead)
    show = writer.write if writer else lambda tokens: None
    result = await generate(channel, request, seconds=_CALL_SECONDS, on_tokens=show)
    print(f"{chr(10) if writer else ''}   {number(result.stats.tokens_per_second)} tokens/s", flush=True)
    (outputs.speculative if lookahead else outputs.plain).append(result)
