"""Breaks a whole system at random for a while, and counts what clients lose: nothing.

    python -m bench.soak --seconds 120
    python -m bench.soak --seconds 3600 --faults 500

Two orchestrators, two targets, two drafts (models without weights) and a store, all of them processes with a proxy
between each two that talk, and clients (outrider.client) that stream one generation after the other with all acceptance
rules. Faults of all kinds come in random order at random moments, one at a time; what was killed comes back in the
background while others follow. Every generation is held against what the store has of it, those of `greedy` and
`coupled` also against an undisturbed run. Exits with 1 when a token was lost, repeated or another, when a client saw an
error or stood still, or when a process did not end and come back as it should have.

Pauses are between two tokens at one client; recovery is what of the longest pause was longer than the fault itself.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.chaos.clients import Crowd
from bench.chaos.faults import FAULTS
from bench.chaos.fleet import running_fleet
from bench.chaos.rounds import Injector, Stalled
from bench.chaos.table import lines

_MANY = 1 << 30
_SHOWN = 20
# Faults between two lines where no bar can be shown.
_TOLD_EVERY = 25


async def soak(arguments: argparse.Namespace) -> int:
    """Runs it and prints the table; returns the exit code."""
    rng = Random(arguments.seed)
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    trouble: list[str] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, _bar() as bar:
        shown = bar.add_task("starting", total=1.0, so_far="")
        async with running_fleet(Path(directory)) as fleet:
            crowd = Crowd(fleet.addresses, arguments.clients, rng)
            injector = Injector(fleet, crowd, rng)
            began = time.monotonic()

            def tell(fault: str) -> None:
                tally = crowd.tally
                part = max((time.monotonic() - began) / arguments.seconds, injector.injected / arguments.faults)
                so_far = f"{injector.injected} faults, {tally.sessions} sessions, {tally.tokens} tokens"
                wrong = "" if tally.faultless else ", NOT ALL AS IT SHOULD BE"
                bar.update(shown, description=f"{fault:<27}", completed=part, so_far=so_far + wrong)
                if bar.disable and injector.injected % _TOLD_EVERY == 0:
                    print(so_far + wrong, file=sys.stderr, flush=True)

            try:
                await crowd.learn()
                crowd.come()
                await injector.run(faults, seconds=arguments.seconds, most=arguments.faults, tell=tell)
                tell("the rest")
                await fleet.until_whole()
                await crowd.leave()
                await fleet.until_idle()
            except Stalled as stalled:
                trouble.append(str(stalled))
            finally:
                await crowd.close()
            trouble += fleet.trouble
            if trouble or not crowd.tally.faultless:
                trouble += fleet.lines
    print("\n".join(lines(injector.records, crowd.tally)))
    for line in (*crowd.tally.errors[:_SHOWN], *trouble):
        print(line, file=sys.stderr)
    return int(bool(trouble) or not crowd.tally.faultless)


def _bar() -> Progress:
    """On a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[so_far]}"), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break a whole system at random and count what clients lose.")
    parser.add_argument("--seconds", type=float, default=120.0, help="inject so long (120)")
    parser.add_argument("--faults", type=int, default=_MANY, help="inject at most so many; no limit by itself")
    parser.add_argument("--seed", type=int, default=0, help="of kinds, victims, moments and requests (0)")
    parser.add_argument("--clients", type=int, default=20, help="that stream (20)")
    parser.add_argument("--only", default="", help="kinds whose name has this, such as `target` or `frozen`")
    arguments = parser.parse_args()
    if not any(arguments.only in fault.name for fault in FAULTS):
        parser.error(f"no fault is called so, there are: {', '.join(fault.name for fault in FAULTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(asyncio.run(soak(_arguments())))
