"""Processes as tests see them: commands to run, and whether a process still runs."""

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import time
from pathlib import Path

from outrider.cli.supervise import Command

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_service.py")


def fake(name: str, *flags: str) -> Command:
    """A fake service, see fake_service.py."""
    return Command(name, (sys.executable, str(FAKE), *flags), environment={"PYTHONPATH": str(ROOT)})


# Below the ports that the kernel gives to those who leave the choice to it, and apart for each process of a test run:
# what is free here is so still when it is used.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_FIRST_PORT, _PORTS = 20_000 + 2_000 * (_WORKER % 6), 2_000
_numbers = itertools.count(os.getpid())


def free_ports(count: int) -> list[str]:
    """Ports that nobody has at this moment, different ones, and others than those of the calls before."""
    ports: list[str] = []
    for number in itertools.islice(_numbers, _PORTS):
        port = _FIRST_PORT + number % _PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(str(port))
        if len(ports) == count:
            return ports
    raise RuntimeError(f"of {_PORTS} ports from {_FIRST_PORT} on, {len(ports)} are free: {count} are wanted")


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def children_of(pid: int) -> list[int]:
    """All living descendants."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] not in ("Z", "X"):
            found += [int(path.parent.name), *children_of(int(path.parent.name))]
    return found


def command_line(pid: int) -> str:
    """The process' arguments, joined by blanks."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")


async def until_gone(*pids: int, within: float = 60.0) -> None:
    """Returns when none of the processes runs; fails the test when one still does after `within` seconds."""
    ends = time.monotonic() + within
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < ends, f"processes {left} are still there"
        await asyncio.sleep(0.02)
