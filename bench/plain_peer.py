"""Plain decoding through all services beside an OpenAI-compatible server with the same model, in one run.

    python -m bench.made_model DIRECTORY  # a random model of 0.4B parameters; --demo: the demo's target
    python -m bench.plain_peer --target DIRECTORY --openai http://127.0.0.1:8000/v1 --openai-pid PID --threads 2

The server is started beforehand, on the same model, dtype and cores; docs/benchmark.md says how for vLLM's CPU build.
With its process id, it and its children are stopped while ours is measured: neither pays for threads of the other that
are busy while they wait. Both take turns, every answer has the same number of tokens, and the median of the ratios
within the turns counts. Exits with 1 when it is below its goal at one number of sessions: 0.95 at 1, 0.9 at 16.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from statistics import median

from rich.console import Console

from bench.made_model import tiny_model
from bench.stopped import stoppable
from outrider.bench.openai import endpoint
from outrider.bench.prompts import built_in
from outrider.bench.runner import Cell, Plan, cells_of, measure
from outrider.bench.sample import Asked
from outrider.bench.services import PLAIN, Drafted, Services
from outrider.cli.options import ProposerName
from outrider.cli.run import run
from outrider.cli.startup import StartupView
from outrider.cli.system import SystemOptions, running_system
from outrider.net.channel import connect

GOALS = {1: 0.95, 16: 0.9}
SECONDS = 600.0


async def measured(system: SystemOptions, url: str, model: str, plan: Plan, pid: int | None) -> list[tuple[Cell, Cell]]:
    """Ours and theirs, by number of sessions; theirs, of process `pid` where it is known, stopped for ours."""
    asked = Asked(plan.max_tokens, ignore_eos=True)
    view = StartupView(Console(stderr=True), logs=False)
    async with (
        running_system(system, view) as started,
        connect(started.address) as channel,
        endpoint(url, model, "", asked, SECONDS) as theirs,
    ):
        ours = Services(PLAIN, channel, asked, Drafted(0), seconds=SECONDS)
        groups, _ = cells_of([ours, theirs], plan)
        with stoppable(pid) as server:

            def begins(cell: Cell, _repetition: int) -> None:
                if server is not None:
                    (server.stop if cell.way is ours else server.go_on)()

            await started.supervisor.guard(measure(groups, plan, begins))
    return [(first, second) for first, second in groups]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="MODEL")
    parser.add_argument("--openai", required=True, help="base URL of the server")
    parser.add_argument("--openai-model", default="", help="asked for there; the first listed without it")
    parser.add_argument("--openai-pid", type=int, help="its process, to be stopped with its children while ours runs")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="of our target; 0 is what `outrider up` takes")
    parser.add_argument("--prompts", default="chat", help="built-in prompt set")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--goal", type=float, help="least ratio at every number of sessions")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model: shows that this runs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        if options.smoke:
            options.target, options.dtype, options.tokens, options.repeats = tiny_model(directory), "float32", 8, 1
        # The draft worker idles: prompt lookup loads no model.
        system = SystemOptions(
            options.target,
            options.target,
            proposers=(ProposerName.prompt_lookup.value,),
            dtype=options.dtype,
            target_threads=options.threads,
            draft_threads=1,
            port=0,
        )
        plan = Plan(built_in((options.prompts,)), tuple(GOALS), options.repeats, 0, options.tokens)
        pairs: list[tuple[Cell, Cell]] = []

        async def work() -> None:
            pairs.extend(await measured(system, options.openai, options.openai_model, plan, options.openai_pid))

        run(work(), farewell="interrupted: everything that was started has ended")
    reached = [judged(ours, theirs, options.goal) for ours, theirs in pairs]
    return 0 if all(reached) else 1


def judged(ours: Cell, theirs: Cell, goal: float | None) -> bool:
    """Prints one line; whether the goal is reached."""
    speeds = [[run.tokens_per_second for run in cell.runs] for cell in (ours, theirs)]
    ratio = median(first / second for first, second in zip(*speeds, strict=True))
    wanted = GOALS[ours.concurrency] if goal is None else goal
    mine, others = map(median, speeds)
    print(
        f"{ours.concurrency:>2} sessions: ours {mine:.1f} tokens/s, theirs {others:.1f}, ratio {ratio:.3f}, "
        f"goal {wanted:g}{'' if ratio >= wanted else ': MISSED'}"
    )
    return ratio >= wanted


if __name__ == "__main__":
    sys.exit(main())
