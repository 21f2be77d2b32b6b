"""What rounds take with each split of the cores, without the models.

Two processes with the shapes of the two models (`outrider.lm.stand_in`) work through rounds as one session makes them,
draft then target, and then both at once, as many sessions do.
"""

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

from outrider.cli.others import Others
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


@dataclass(frozen=True)
class Measured:
    """What was found.

    Attributes:
        times: of each split.
        others: how many cores other processes took meanwhile; None where that cannot be found out.
    """

    times: dict[Split, Times]
    others: float | None


class Unmeasured(Exception):
    """A pair whose shapes cannot be stood in for; the message says why."""


async def measured(pair: Pair, compared: Sequence[Split]) -> Measured:
    """Each split's times, and how busy others were. Raises Unmeasured."""
    async with (
        _process(pair, pair.target, 0) as target,
        _process(pair, pair.draft, pair.draft_layers) as draft,
    ):
        for process in (target, draft):
            await _ready(process)
        others = Others(target.pid, draft.pid)
        times = {split: await _times(target, draft, split, pair.lookahead) for split in compared}
        return Measured(times, others.cores())


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
