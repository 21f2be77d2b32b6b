"""How much CPU time others took of the cores that this process may use, as Linux counts it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

# Columns of a core's line in /proc/stat (proc_stat(5)); guests are in `user` and `nice` already, later columns are
# guests'. Steal is what a hypervisor gave to others; waiting for a disk leaves the core free.
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_FREE = {"idle", "iowait"}
# Of /proc/PID/stat, counted from behind the name, which may hold anything.
_UTIME, _STIME = 11, 12


@dataclass(frozen=True)
class _Reading:
    """Seconds of all allowed cores together since some beginning: that passed, that they worked, and worked for us."""

    passed: float
    worked: float
    ours: float


class Others:
    """Counts from its making on.

    Args:
        pids: processes that are ours beside this one, with all their threads; not their children.
        proc: where the kernel's counts are.
    """

    def __init__(self, *pids: int, proc: Path = Path("/proc")) -> None:
        self._pids = pids
        self._proc = proc
        self._first = self._read()

    def cores(self) -> float | None:
        """How many cores others had for themselves, on average. None where that is not told, or no tick has passed."""
        first, last = self._first, self._read()
        if not first or not last or last.passed <= first.passed:
            return None
        others = (last.worked - first.worked) - (last.ours - first.ours)
        return max(0.0, others) / (last.passed - first.passed) * len(os.sched_getaffinity(0))

    def _read(self) -> _Reading | None:
        try:
            lines = (self._proc / "stat").read_text(encoding="ascii").splitlines()
            own = sum(self._seconds_of(pid) for pid in self._pids) + time.process_time()
            ticks = _ticks(lines)
        except (OSError, ValueError, LookupError):  # no such file, process or core, or another format
            return None
        second = os.sysconf("SC_CLK_TCK")
        worked = sum(count for name, count in ticks.items() if name not in _FREE)
        return _Reading(sum(ticks.values()) / second, worked / second, own)

    def _seconds_of(self, pid: int) -> float:
        text = (self._proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return (int(fields[_UTIME]) + int(fields[_STIME])) / os.sysconf("SC_CLK_TCK")


def _ticks(lines: list[str]) -> dict[str, int]:
    """Of the allowed cores together by column. Raises LookupError when one has no line."""
    cores = {name: counts for name, *counts in map(str.split, lines) if name.startswith("cpu")}
    allowed = [cores[f"cpu{core}"] for core in os.sched_getaffinity(0)]
    return {name: sum(int(counts[column]) for counts in allowed) for column, name in enumerate(_COLUMNS)}
