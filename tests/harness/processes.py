"""Processes as tests see them: commands to run, and whether a process still runs."""

import asyncio
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


def free_ports(count: int) -> list[str]:
    """Ports that nobody has at this moment, different ones."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


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


async def until_gone(*pids: int, within: float = 10.0) -> None:
    """Returns when none of the processes runs; fails the test when one still does after `within` seconds."""
    ends = time.monotonic() + within
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < ends, f"processes {left} are still there"
        await asyncio.sleep(0.02)
