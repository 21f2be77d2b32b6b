"""Every way of making blocks beside the others and beside plain decoding, on three workloads, in one run, taking turns.

    python -m bench.proposers [--proposers model suffix ...] [--eagle DIR] [--output DIRECTORY]

For each proposer and workload: tokens a target pass, the mean length of what is accepted of a block, what the draft
computed for it and what rounds waited for it, bytes of a round on the wire, tokens a second, and how many times those
of plain decoding that is. Greedy answers, so that all of them are the same answers. `auto` leaves the choice to the
orchestrator, which learns from the rounds of all. Without --target the demo's pair is measured. Exits with 1 when
`suffix` gives fewer tokens a pass than its goal where the answers quote their prompts, or when `auto` is slower on a
workload than the limit allows: tokens a second over those of the best single proposer, the median over the repetitions.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.made_model import tiny_model
from outrider.bench.demo_pair import demo_system
from outrider.bench.prompts import built_in
from outrider.bench.report import CellReport
from outrider.bench.runner import Plan, cells_of, measure
from outrider.bench.sample import Asked
from outrider.bench.services import PLAIN, Drafted, Services
from outrider.bench.summary import summarised
from outrider.cli.bench_view import BenchView
from outrider.cli.options import ProposerName
from outrider.cli.run import told
from outrider.cli.startup import StartupView
from outrider.cli.system import SystemOptions, running_system
from outrider.net.channel import connect

WORKLOADS = ("chat", "code", "quoting")
PROPOSERS = ("model", "prompt_lookup", "suffix", "suffix_or_model", "auto")
# No single proposers: one combines two, one leaves it open. Beside the best single one the latter may be no slower.
COMBINED, AUTO, AUTO_LIMIT = "suffix_or_model", "auto", 0.97
# The workload whose answers quote their prompts, and what `suffix` is to give there.
QUOTING, SUFFIX_GOAL = "quoting", 3.0
# Made of the target, and offered where the command line says of what.
HEADS = ("early_exit", "medusa", "eagle")


@dataclass(frozen=True)
class Row:
    """One proposer on one workload.

    Attributes:
        accepted: draft tokens kept of a block, on average.
        draft_ms, wait_ms: of a round: what the draft computed, and what of it was waited for.
        round_bytes: of the draft and verify messages, both directions.
        speed_up: tokens a second over those of plain decoding, the median over the repetitions.
        same_tokens: share of the answers that are plain decoding's.
        runs: tokens a second of each repetition.
    """

    workload: str
    proposer: str
    tokens_per_pass: float
    accepted: float
    draft_ms: float
    wait_ms: float
    round_bytes: float
    tokens_per_second: float
    speed_up: float
    same_tokens: float
    runs: tuple[float, ...]


def row_of(cell: CellReport) -> Row:
    rounds = cell.rounds
    assert rounds is not None
    times, speculation = rounds.times, rounds.speculation
    tokens = sum(run.tokens for run in cell.runs)
    return Row(
        workload=cell.prompt_set,
        proposer=cell.way,
        tokens_per_pass=rounds.tokens_per_pass or 0.0,
        accepted=speculation.accepted / speculation.drafted_at[0] if speculation else 0.0,
        draft_ms=times.draft_forward if times else 0.0,
        wait_ms=times.draft_wait if times else 0.0,
        round_bytes=(rounds.bytes_per_token or 0.0) * tokens / rounds.rounds,
        tokens_per_second=cell.tokens_per_second.median,
        speed_up=cell.speed_up.median if cell.speed_up else 1.0,
        same_tokens=1.0 if cell.same_tokens is None else cell.same_tokens,
        runs=tuple(run.tokens_per_second for run in cell.runs),
    )


async def measured(system: SystemOptions, options: argparse.Namespace) -> list[Row]:
    """All proposers over one system."""
    asked = Asked(options.tokens, ignore_eos=options.smoke)
    plan = Plan(built_in(tuple(options.workloads)), (1,), options.repeats, options.requests, options.tokens)
    view = BenchView(Console(stderr=True))
    drafted = {name: Drafted(options.lookahead, ProposerName(name)) for name in options.proposers}
    async with (
        running_system(system, StartupView(Console(stderr=True), logs=False)) as running,
        connect(running.address) as channel,
    ):
        plain = Services(PLAIN, channel, asked, Drafted(0))
        ways = [plain, *(Services(name, channel, asked, how) for name, how in drafted.items())]
        groups, _ = cells_of(ways, plan)
        with view:
            view.begin(sum(map(len, groups)) * (1 + plan.repeats))
            await running.supervisor.guard(measure(groups, plan, view.run))
    return [row_of(cell) for group in groups for cell in summarised(group, drafted, repeatable=True)]


def table(rows: Sequence[Row]) -> Table:
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for title in ("workload", "proposer"):
        made.add_column(title)
    titles = "tokens/pass", "accepted/block", "draft ms", "wait ms", "bytes/round", "tokens/s", "x plain", "same"
    for title in titles:
        made.add_column(title, justify="right")
    for row in rows:
        numbers = (row.tokens_per_pass, row.accepted, row.draft_ms, row.wait_ms)
        speeds = f"{row.round_bytes:.0f}", f"{row.tokens_per_second:.1f}", f"{row.speed_up:.2f}"
        made.add_row(row.workload, row.proposer, *(f"{it:.2f}" for it in numbers), *speeds, f"{row.same_tokens:.0%}")
    return made


def plot(rows: Sequence[Row], path: Path) -> None:
    """A panel for each of the two figures, a group of bars for each workload."""
    from matplotlib.figure import Figure

    proposers, workloads = (
        list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("proposer", "workload")
    )
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, (label, field) in zip(
        figure.subplots(1, 2),
        (("tokens a target pass", "tokens_per_pass"), ("times plain decoding", "speed_up")),
        strict=True,
    ):
        for number, proposer in enumerate(proposers):
            mine = {row.workload: getattr(row, field) for row in rows if row.proposer == proposer}
            places = [at + (number - (len(proposers) - 1) / 2) * 0.8 / len(proposers) for at in range(len(workloads))]
            axis.bar(places, [mine[name] for name in workloads], 0.8 / len(proposers), label=proposer)
        axis.set_xticks(range(len(workloads)), workloads)
        axis.set_ylabel(label)
        axis.axhline(1.0, color="gray", linewidth=0.8)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def written(rows: Sequence[Row], system: SystemOptions, options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    facts = {"target": system.target, "draft": system.draft, "lookahead": options.lookahead, "tokens": options.tokens}
    report = {**facts, "rows": [vars(row) for row in rows]}
    (options.output / "proposers.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(rows, options.output / "proposers.svg")


def judged(rows: Sequence[Row], goal: float, limit: float) -> bool:
    """Prints the figures that have a goal; whether all that were measured reach it."""
    figures = [
        (f"suffix, {row.workload}: {row.tokens_per_pass:.2f} tokens a pass", row.tokens_per_pass, goal)
        for row in rows
        if (row.workload, row.proposer) == (QUOTING, "suffix")
    ]
    for auto in (row for row in rows if row.proposer == AUTO):
        singles = [row for row in rows if row.workload == auto.workload and row.proposer not in (AUTO, COMBINED)]
        best = max(singles, key=lambda row: median(row.runs))
        ratio = median(ours / theirs for ours, theirs in zip(auto.runs, best.runs, strict=True))
        figures.append((f"auto, {auto.workload}: {ratio:.3f} of {best.proposer}", ratio, limit))
    for said, value, least in figures:
        print(f"{'MISSED: ' if value < least else ''}{said}, at least {least:g}")
    return all(value >= least for _, value, least in figures)


def system_of(options: argparse.Namespace, directory: str) -> SystemOptions:
    offered = tuple(name for name in options.proposers if name != AUTO)
    started = {"proposers": offered, "port": 0, "target_threads": options.threads}
    started["draft_threads"] = options.threads
    started |= {name: getattr(options, name) for name in HEADS}
    if options.smoke:
        model = tiny_model(directory)
        return SystemOptions(model, model, dtype="float32", **started)  # type: ignore[arg-type]
    if options.target:
        return SystemOptions(options.target, options.draft or options.target, **started)  # type: ignore[arg-type]
    demo = demo_system()
    return SystemOptions(demo.target, demo.draft, dtype=demo.dtype, **started)  # type: ignore[arg-type]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="MODEL; the demo's pair without it")
    parser.add_argument("--draft", default="", help="MODEL")
    parser.add_argument("--proposers", nargs="+", choices=[it.value for it in ProposerName], default=list(PROPOSERS))
    parser.add_argument("--early-exit", metavar="DIR", default="", help="a trained exit, measured as well")
    parser.add_argument("--medusa", metavar="DIR", default="", help="Medusa heads, measured as well")
    parser.add_argument("--eagle", metavar="DIR", default="", help="an EAGLE head, measured as well")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--lookahead", type=int, help="longest block; without it every round's is chosen by goodput")
    parser.add_argument("--tokens", type=int, default=128, help="most of each answer")
    parser.add_argument("--requests", type=int, default=0, help="of each run; 0: every prompt of the workload once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of each model; 0 is half of the cores")
    parser.add_argument("--suffix-goal", type=float, default=SUFFIX_GOAL)
    parser.add_argument("--auto-limit", type=float, default=AUTO_LIMIT)
    parser.add_argument("--output", type=Path, help="directory for proposers.json and proposers.svg")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model: shows that this runs")
    options = parser.parse_args(arguments)
    options.proposers = list(dict.fromkeys((*options.proposers, *(name for name in HEADS if getattr(options, name)))))
    if options.smoke:
        options.repeats, options.tokens, options.requests, options.lookahead = 1, 24, 1, 4
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    with tempfile.TemporaryDirectory() as directory:
        with told():
            system = system_of(options, directory)
        rows = asyncio.run(measured(system, options))
    Console(width=140).print(table(rows))
    if options.output:
        written(rows, system, options)
    return 0 if judged(rows, options.suffix_goal, options.auto_limit) else 1


if __name__ == "__main__":
    sys.exit(main())
