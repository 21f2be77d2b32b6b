"""The `outrider` command and the services as processes, as a user starts them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tests.harness.processes import ROOT, children_of, until_gone

# The machine may do a lot beside a test.
SECONDS = 240.0
_PIPE = asyncio.subprocess.PIPE

# A shell's background job ignores SIGINT, and so would every process that it starts: Ctrl-C would do nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Running:
    """A process in a group of its own, whose output is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.out, self.err = process.stdout, process.stderr

    async def line(self, stream: asyncio.StreamReader, start: str) -> str:
        """The first line from here on that begins so; fails the test when the output ends before."""
        async with asyncio.timeout(SECONDS):
            while line := (await stream.readline()).decode():
                if line.startswith(start):
                    return line.strip()
        raise AssertionError(f"it ended without {start!r}: {(await self.err.read()).decode()}")

    async def address(self) -> str:
        """Where a service says that it listens."""
        return (await self.line(self.out, "listening on ")).removeprefix("listening on ")

    def interrupt(self) -> None:
        """What Ctrl-C on a terminal does: SIGINT to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    async def end(self) -> tuple[int | None, str, str]:
        """Exit code, and what was not yet read of stdout and stderr."""
        out, err = await asyncio.wait_for(self.process.communicate(), SECONDS)
        return self.process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def running(*arguments: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[Running]:
    """Runs `python -m ARGUMENTS`; in the end it gets SIGTERM, and none of its processes is left."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments),
        cwd=ROOT,
        stdout=_PIPE,
        stderr=_PIPE,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield Running(process)
    finally:
        children = children_of(process.pid)
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.communicate(), SECONDS)
        await until_gone(*children)


async def outrider(*arguments: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a command that ends by itself."""
    async with running("outrider.cli.main", *arguments) as command:
        return await command.end()
