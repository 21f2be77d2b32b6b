"""One supervised process: how it is started, what it printed, how it ended."""

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from outrider.cli.tether import tethered

LISTENING = re.compile(r"^listening on (\S+)$")
_LINE_END = re.compile(rb"([\r\n])")
_KEPT_LINES = 50
_LONGEST_LINE = 16 * 1024


@dataclass(frozen=True)
class Line:
    """A line that a process printed; a passing one ended with a carriage return, as progress bars do."""

    text: str
    passing: bool = False


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


class Child:
    """A started process. Its output is read as long as it lives; the last lines are kept.

    Attributes:
        announced: resolves to the address, or "", when the process announced itself.
        ended: the task that finishes with the exit code once the process ended and its output was read.
    """

    def __init__(self, command: Command, process: asyncio.subprocess.Process, log: Log) -> None:
        self.command = command
        self.announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = process
        self._log = log
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.ended = asyncio.create_task(self._run())

    @staticmethod
    async def start(command: Command, log: Log) -> "Child":
        """Starts the command, tied to this process, in a session of its own: a Ctrl-C reaches this process alone,
        which then ends its children in order. `log` gets its name and every line of its stderr."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *tethered(command.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            env={**os.environ, **command.environment},
        )
        return Child(command, process, log)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Signals the process and those that it started. Nothing happens when they ended already."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def obituary(self) -> ProcessDied:
        """Why it ended, in one line; for a process that ended."""
        code = self._process.returncode
        assert code is not None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"stopped with exit code {code}"
        errors = [line for line in self._last_lines if "error" in line.lower()]
        last = next(reversed(errors or self._last_lines), None)
        return ProcessDied(f"{self.command.name} {how}" + (f": {last.removeprefix('error: ')}" if last else ""))

    async def _run(self) -> int:
        readers = asyncio.gather(self._read_stdout(), self._read_stderr())
        code = await self._process.wait()
        self.signal(signal.SIGKILL)  # what it left in its group would hold its pipes open
        await readers
        return code

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        async for line in _lines(self._process.stdout):
            found = self.command.announces.search(line.text)
            if found and not self.announced.done():
                self.announced.set_result(found.group(1) if found.re.groups else "")

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        async for line in _lines(self._process.stderr):
            if not line.passing:
                self._last_lines.append(line.text)
            self._log(self.command.name, line)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[Line]:
    """Non-empty lines, cut at a length that bounds memory."""
    rest = b""
    while chunk := await stream.read(_LONGEST_LINE):
        *whole, rest = _LINE_END.split(rest + chunk)
        for text, end in zip(whole[::2], whole[1::2], strict=True):
            if text.strip():
                yield Line(text.decode(errors="replace").rstrip(), passing=end == b"\r")
        rest = rest[-_LONGEST_LINE:]
    if rest.strip():
        yield Line(rest.decode(errors="replace").rstrip())
