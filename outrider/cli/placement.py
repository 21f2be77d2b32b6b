"""How many threads each model gets on one machine: measured once for a pair, and remembered.

What suits depends on the machine and on the pair: a pass of one session reads its weights once, which one core may not
do at the memory's full speed; but threads of two processes that are busy together wait for each other's turn on a core.
So two processes with the shapes of the two models (`outrider.lm.stand_in`) work through rounds as one session makes
them, draft then target, and then both at once, as many sessions do, with each split that may be the best.
"""

import asyncio
import hashlib
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from outrider.cli.tether import tethered

# Between two parallel regions a thread of OpenMP waits for its next work by spinning, by default for milliseconds: it
# would keep a core from the other model after every pass. Within a pass they follow each other in microseconds.
SHORT_SPIN = {"GOMP_SPINCOUNT": "10000"}
# Of one split, in each of the two ways; a slow pair gets fewer rounds.
_ROUNDS, _SECONDS = 9, 0.5
_READY_SECONDS = 60.0


@dataclass(frozen=True)
class Split:
    """CPU threads of the target's and of the draft's model."""

    target: int
    draft: int


@dataclass(frozen=True)
class Pair:
    """What the two processes run.

    Attributes:
        target, draft: MODELs.
        draft_layers: early exit after so many; 0 for all.
        dtype: of both; empty for bfloat16.
        lookahead: passes of the draft in a round, at least 1.
    """

    target: str
    draft: str
    draft_layers: int
    dtype: str
    lookahead: int


@dataclass(frozen=True)
class Times:
    """Median seconds of a round: the models one after the other, and both busy at once."""

    alternating: float
    at_once: float


class Unmeasured(Exception):
    """A pair whose shapes cannot be stood in for; the message says why."""


def splits(cores: int) -> list[Split]:
    """What is compared: half of the cores each; all for the target; all for both."""
    half = max(1, cores // 2)
    return list(dict.fromkeys([Split(half, half), Split(cores, half), Split(cores, cores)]))


def best(times: dict[Split, Times]) -> Split:
    """The least product of both times: what one session gains counts as much as what many lose."""
    return min(times, key=lambda split: times[split].alternating * times[split].at_once)


def words(chosen: Split, times: dict[Split, Times]) -> str:
    """One line: what was chosen and why."""
    each = ", ".join(
        f"{split.target}+{split.draft}: {1e3 * it.alternating:.1f} ms a round, {1e3 * it.at_once:.1f} ms both busy"
        for split, it in times.items()
    )
    return f"threads: {chosen.target} for the target, {chosen.draft} for the draft (measured once: {each})"


async def placed(pair: Pair, cores: int, cache: Path) -> tuple[Split, str]:
    """The split for a pair and one line about it: from the file that remembers it, else measured. Raises Unmeasured."""
    file = cache / f"placement-{_key(pair, cores)}.json"
    if kept := _kept(file):
        return kept
    times = await measured(pair, splits(cores))
    split = best(times)
    said = words(split, times)
    _keep(file, split, said)
    return split, said


def _kept(file: Path) -> tuple[Split, str] | None:
    if not file.is_file():
        return None
    kept = json.loads(file.read_text(encoding="utf-8"))
    return Split(**kept["split"]), kept["words"]


def _keep(file: Path, split: Split, said: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"split": asdict(split), "words": said}), encoding="utf-8")
    os.replace(part, file)


async def measured(pair: Pair, compared: Sequence[Split]) -> dict[Split, Times]:
    """Each split's times. Raises Unmeasured."""
    async with (
        _process(pair, pair.target, 0) as target,
        _process(pair, pair.draft, pair.draft_layers) as draft,
    ):
        for process in (target, draft):
            await _ready(process)
        return {split: await _times(target, draft, split, pair.lookahead) for split in compared}


async def _times(target: Process, draft: Process, split: Split, lookahead: int) -> Times:
    verify = f"{split.target} {lookahead + 1} 1\n"
    propose = f"{split.draft} 1 {lookahead}\n"

    async def alternating() -> None:
        await _asked(draft, propose)
        await _asked(target, verify)

    async def at_once() -> None:
        await asyncio.gather(_asked(draft, propose), _asked(target, verify))

    times = []
    for one in (alternating, at_once):
        await one()
        seconds: list[float] = []
        while len(seconds) < _ROUNDS and sum(seconds) < _SECONDS:
            began = time.perf_counter()
            await one()
            seconds.append(time.perf_counter() - began)
        times.append(median(seconds))
    return Times(*times)


async def _asked(process: Process, line: str) -> None:
    assert process.stdin
    assert process.stdout
    process.stdin.write(line.encode())
    if not await process.stdout.readline():
        raise Unmeasured("a process that stood in for a model died")


async def _ready(process: Process) -> None:
    assert process.stdout
    assert process.stderr
    try:
        async with asyncio.timeout(_READY_SECONDS):
            ready = await process.stdout.readline()
    except TimeoutError:
        raise Unmeasured(f"a process that should stand in for a model was not ready in {_READY_SECONDS:g} s") from None
    if not ready:
        last = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
        raise Unmeasured(last[-1] if last else "a process that should stand in for a model died")


@asynccontextmanager
async def _process(pair: Pair, model: str, layers: int) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", "outrider.lm.stand_in", model, str(layers), pair.dtype, pair.target)
    process = await asyncio.create_subprocess_exec(
        *tethered(command), stdin=PIPE, stdout=PIPE, stderr=PIPE, env=os.environ | SHORT_SPIN
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _key(pair: Pair, cores: int) -> str:
    """Of the machine and the pair; a model that is a file or directory counts by its path."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = {line for line in lines if line.startswith("model name")}
    told = json.dumps([sorted(names), cores, version("torch"), asdict(pair)])
    return hashlib.sha256(told.encode()).hexdigest()[:16]
