"""How many threads each model gets on one machine: measured once for a pair, and remembered.

What suits depends on the machine and on the pair: a pass of one session reads its weights once, which one core may not
do at the memory's full speed; but threads of two processes that are busy together wait for each other's turn on a core.
So each split that may be the best is tried (`split_times`). Where others were busy meanwhile, the answer is good for
this start alone.
"""

import hashlib
import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from outrider.cli.split_times import Pair, Split, Times, measured

# Of the cores, what others may take while it measures. A tenth: an idle machine's daemons take less, a median of rounds
# hardly moves with it, and ticks of 10 ms tell no finer in a short measurement; one busy process on two cores takes a
# third or more. Half a core at most: a pass waits for its slowest thread, so of many cores one that is busy is enough.
_MOST_SHARE, _MOST_CORES = 0.1, 0.5
# Counted up when what is measured or remembered changes: what earlier versions remembered is then measured anew.
_VERSION = 2


def splits(cores: int) -> list[Split]:
    """What is compared: half of the cores each; all for the target; all for both."""
    half = max(1, cores // 2)
    return list(dict.fromkeys([Split(half, half), Split(cores, half), Split(cores, cores)]))


def best(times: dict[Split, Times]) -> Split:
    """The least product of both times: what one session gains counts as much as what many lose."""
    return min(times, key=lambda split: times[split].alternating * times[split].at_once)


def disturbed(others: float | None, cores: int) -> bool:
    """Whether what others took of the cores makes the times wrong for an idle machine. Not when nobody knows."""
    return others is not None and others > min(_MOST_SHARE * cores, _MOST_CORES)


def words(chosen: Split, times: dict[Split, Times], how: str = "measured once") -> str:
    """One line: what was chosen and why."""
    each = ", ".join(
        f"{split.target}+{split.draft}: {1e3 * it.alternating:.1f} ms a round, {1e3 * it.at_once:.1f} ms both busy"
        for split, it in times.items()
    )
    return f"threads: {chosen.target} for the target, {chosen.draft} for the draft ({how}: {each})"


async def placed(pair: Pair, cores: int, cache: Path) -> tuple[Split, str]:
    """The split for a pair and one line about it: from the file that remembers it, else measured. Raises Unmeasured."""
    file = cache / f"placement-{_key(pair, cores)}.json"
    if kept := _kept(file):
        return kept
    found = await measured(pair, splits(cores))
    split = best(found.times)
    if disturbed(found.others, cores):
        took = f"{found.others:.1f} of {cores} cores"
        return split, words(split, found.times, f"measured while other processes took {took}, so not remembered")
    said = words(split, found.times)
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


def _key(pair: Pair, cores: int) -> str:
    """Of the machine and the pair; a model that is a file or directory counts by its path."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = {line for line in lines if line.startswith("model name")}
    told = json.dumps([_VERSION, sorted(names), cores, version("torch"), asdict(pair)])
    return hashlib.sha256(told.encode()).hexdigest()[:16]
