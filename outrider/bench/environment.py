"""The machine that a report was made on, and what the processes that it started took of it."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

from outrider.bench.report import Machine, Memory
from outrider.cli.supervise import Supervisor

_PROCESSOR = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def machine() -> Machine:
    """This one, as it is now."""
    affinity = hasattr(os, "sched_getaffinity")
    return Machine(
        system=platform.platform(),
        processor=_found(_PROCESSOR, Path("/proc/cpuinfo")) or platform.processor(),
        cores=len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1,
        load_before=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
    )


def peak_memory(supervisor: Supervisor) -> list[Memory]:
    """Of every supervised process so far; none where the kernel does not tell (only Linux does)."""
    peaks = ((child.command.name, _found(_PEAK, Path(f"/proc/{child.pid}/status"))) for child in supervisor.children)
    return [Memory(service=name, peak_bytes=int(kilobytes) * 1024) for name, kilobytes in peaks if kilobytes]


def _found(pattern: re.Pattern[str], path: Path) -> str:
    """The pattern's group in a file of the kernel's; empty where there is no such file or line."""
    try:
        match = pattern.search(path.read_text())
    except OSError:
        return ""
    return match.group(1) if match else ""
