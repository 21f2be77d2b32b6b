"""What the services cost beside a bare loop, and what they win by sharing passes.

    python -m bench.loop_overhead [--proposer model --draft MODEL]

Decodes speculatively through draft worker, target worker and orchestrator (three processes, gRPC, a session store), and
in a bare loop on the same weights, dtype and threads (outrider/bench/loop.py), taking turns in one run; nothing is
drafted ahead. Prints the medians last and exits with 1 when one misses its goal: tokens/s of one session over those of
the loop, and tokens/s of many sessions over those of one.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console

from bench.measured import measured
from outrider.bench.demo_pair import PROPOSERS, demo_system
from outrider.bench.job import Compared, Job
from outrider.bench.loop import MODEL_PROPOSERS
from outrider.bench.prompts import built_in
from outrider.bench.report import CellReport, Report
from outrider.bench.runner import Plan
from outrider.bench.sample import Asked
from outrider.bench.services import LOOP, SPECULATIVE
from outrider.bench.tables import summary_table
from outrider.cli.options import ProposerName
from outrider.cli.run import told
from outrider.cli.system import SystemOptions

LOOP_GOAL, MANY_GOAL = 0.92, 5.0
SMOKE_TARGET = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5,pass_ms=20,context_length=1024"
SMOKE_DRAFT = f"{SMOKE_TARGET},noise=0.5"


def system_of(options: argparse.Namespace) -> SystemOptions:
    if options.smoke:
        return SystemOptions(target=SMOKE_TARGET, draft=SMOKE_DRAFT, port=0, lookahead=options.lookahead)
    pair = SystemOptions(target=options.target, draft=options.draft or options.target, dtype=options.dtype)
    if not options.target:
        demo = demo_system()
        pair = replace(demo, draft=options.draft or demo.draft, dtype=options.dtype or demo.dtype)
    return replace(
        pair,
        proposers=(options.proposer,),
        early_exit_layers=options.early_exit_layers or pair.early_exit_layers,
        lookahead=options.lookahead,
        target_threads=options.threads,
        draft_threads=options.threads,
        port=0,
    )


def cell(report: Report, way: str, concurrency: int) -> CellReport:
    return next(it for it in report.cells if (it.way, it.concurrency) == (way, concurrency))


def ratio(ours: CellReport, theirs: CellReport) -> float:
    """The median over the turns."""
    pairs = zip(ours.runs, theirs.runs, strict=True)
    return median(one.tokens_per_second / other.tokens_per_second for one, other in pairs)


def judged(report: Report, many: int, loop_goal: float, many_goal: float) -> bool:
    """Prints the two figures; whether both reach their goal."""
    one, loop, all_of_them = cell(report, SPECULATIVE, 1), cell(report, LOOP, 1), cell(report, SPECULATIVE, many)
    speeds = {"services, 1 session": one, "bare loop, 1 session": loop, f"services, {many} sessions": all_of_them}
    for name, it in speeds.items():
        runs = " ".join(f"{run.tokens_per_second:.1f}" for run in it.runs)
        print(f"{name:<22} {it.tokens_per_second.median:>7.1f} tokens/s   (runs: {runs})")
    figures = [
        ("services / bare loop", ratio(one, loop), loop_goal),
        (
            f"{many} sessions / 1 session",
            all_of_them.tokens_per_second.median / one.tokens_per_second.median,
            many_goal,
        ),
    ]
    for name, value, goal in figures:
        print(f"{'MISSED: ' if value < goal else ''}{name}: {value:.3f}, goal {goal:g}")
    return all(value >= goal for _, value, goal in figures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="MODEL in place of the demo's target")
    parser.add_argument("--draft", default="", help="MODEL of the draft")
    parser.add_argument("--proposer", choices=[it.value for it in MODEL_PROPOSERS], help="what makes the blocks")
    parser.add_argument("--early-exit-layers", type=int, default=0)
    parser.add_argument("--dtype", default="", help="bfloat16 for the demo's")
    parser.add_argument("--threads", type=int, default=0, help="of each model; 0 is half of the cores")
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=16, help="how many at once in the second figure")
    parser.add_argument("--prompts", default="chat", help="built-in prompt set")
    parser.add_argument("--loop-goal", type=float, default=LOOP_GOAL)
    parser.add_argument("--many-goal", type=float, default=MANY_GOAL)
    parser.add_argument("--smoke", action="store_true", help="models without weights, few tokens: shows that this runs")
    options = parser.parse_args(arguments)
    options.proposer = options.proposer or (ProposerName.model.value if options.smoke else PROPOSERS[0].value)
    if options.smoke:
        options.repeats, options.tokens = 2, 12
    with told():
        system = system_of(options)
    report = measured(
        Job(
            plan=Plan(built_in((options.prompts,)), (1, options.sessions), options.repeats, 0, options.tokens),
            asked=Asked(options.tokens, ignore_eos=True),
            system=system,
            lookahead=options.lookahead,
            proposer=ProposerName(options.proposer),
            compared=Compared(loop=True),
        )
    )
    Console(width=160).print(summary_table(report))
    return 0 if judged(report, options.sessions, options.loop_goal, options.many_goal) else 1


if __name__ == "__main__":
    sys.exit(main())
