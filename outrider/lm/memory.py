"""How much memory a process may still take."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be had without swapping: the machine's, or what is left of the container's limit (cgroup v2)."""
    machine = _machine_bytes(meminfo)
    limit, current = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    return machine if limit is None or current is None else min(machine, max(0, limit - current))


def _machine_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kilobytes["MemAvailable"] * 1024


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such limit here
        return None
    return int(text) if text.isdigit() else None
