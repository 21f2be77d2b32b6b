"""One supervised process: how it is started, what it printed, how it ended."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.cli.lines import Line, LineSplitter
from outrider.cli.tether import tethered

LISTENING = re.compile(r"^listening on (\S+)$")
_KEPT_LINES = 50
_NO_REASON = re.compile(r"^\S+Z (INFO|DEBUG) ")  # a log record that tells of no trouble
_STDOUT, _STDERR = 1, 2


Log = Callable[[str, Line], None]


@dataclass(frozen=True)
class Command:
    """A process to run.

    Attributes:
        name: for people: "target".
        arguments: the program and its arguments.
        announces: the line on stdout that says the process is up; its first group, if any, is the address.
        environment: variables on top of this process's own.
    """

    name: str
    arguments: tuple[str, ...]
    announces: re.Pattern[str] = LISTENING
    environment: Mapping[str, str] = field(default_factory=dict)


class ProcessDied(Exception):
    """A process ended that should have gone on; the message is one line: who, how, and its last error line."""


class Child(asyncio.SubprocessProtocol):
    """A started process. Its output is read as long as it lives; the last lines are kept.

    Attributes:
        announced: resolves to the address, or "", when the process announced itself.
        ended: resolves to the exit code (negative: the signal) when the process ended and its output was read.
    """

    def __init__(self, command: Command, log: Log) -> None:
        loop = asyncio.get_running_loop()
        self.command = command
        self.announced: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self._log = log
        self._output = {_STDOUT: LineSplitter(), _STDERR: LineSplitter()}
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._transport: asyncio.SubprocessTransport

    @staticmethod
    async def start(command: Command, log: Log) -> "Child":
        """Starts the command, tied to this process, in a session of its own: a Ctrl-C reaches this process alone,
        which then ends its children in order. `log` gets its name and every line of its stderr."""
        _, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: Child(command, log),
            *tethered(command.arguments),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **command.environment},
        )
        return child

    @property
    def pid(self) -> int:
        """The process id."""
        return self._transport.get_pid()

    def signal(self, number: signal.Signals) -> None:
        """Signals the process and those that it started. Nothing happens when they ended already."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def obituary(self) -> ProcessDied:
        """Why it ended, in one line; for a process that ended."""
        code = self.ended.result()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"stopped with exit code {code}"
        errors = [line for line in self._last_lines if "error" in line.lower()]
        last = next(reversed(errors or [line for line in self._last_lines if not _NO_REASON.match(line)]), None)
        return ProcessDied(f"{self.command.name} {how}" + (f": {last.removeprefix('error: ')}" if last else ""))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process runs."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """The process printed."""
        self._take(fd, self._output[fd].feed(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """The process prints no more there."""
        if fd in self._output:
            self._take(fd, self._output[fd].close())

    def process_exited(self) -> None:
        """The process ended. What it left in its group is ended too: it would hold the pipes open."""
        self.signal(signal.SIGKILL)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process ended and all its output was read."""
        code = self._transport.get_returncode()
        assert code is not None
        self.ended.set_result(code)

    def _take(self, fd: int, lines: list[Line]) -> None:
        for line in lines:
            if fd == _STDOUT:
                self._announce(line)
            else:
                self._remember(line)

    def _announce(self, line: Line) -> None:
        found = self.command.announces.search(line.text)
        if found and not self.announced.done():
            self.announced.set_result(found.group(1) if found.re.groups else "")

    def _remember(self, line: Line) -> None:
        if not line.passing:
            self._last_lines.append(line.text)
        self._log(self.command.name, line)
