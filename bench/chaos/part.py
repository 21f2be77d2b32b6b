"""One process of the system under faults: it ends in many ways and is started again."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

from outrider.cli.child import Child, Command, Log
from outrider.cli.health import until_serving

# A machine may be busy with a lot beside this.
START_SECONDS = 120.0


class Part:
    """A process and its successors.

    Attributes:
        name: "target 1".
        role: "target".
        address: where it listens; empty when it does not.
        whole: whether it runs, serves, and everybody who needs it uses it.

    Args:
        command: what to run.
        spawn: starts it.
        moved: called with the address of every new process, and with "" when it has ended.
        log: gets every line of its stderr.
        socket: where it listens when it is no gRPC service.
    """

    def __init__(
        self,
        command: Command,
        spawn: Callable[[Command, Log], Awaitable[Child]],
        moved: Callable[[str], None],
        log: Log,
        socket: str = "",
    ) -> None:
        self.name, self.role = command.name, command.name.split()[0]
        self.whole = False
        self.address = ""
        self._command, self._spawn, self._moved, self._log, self._socket = command, spawn, moved, log, socket
        self._child: Child | None = None

    async def start(self) -> None:
        """Starts a process; returns when it serves."""
        self._child = child = await self._spawn(self._command, self._log)
        async with asyncio.timeout(START_SECONDS):
            announced, ended = asyncio.shield(child.announced), asyncio.shield(child.ended)
            await asyncio.wait({announced, ended}, return_when=asyncio.FIRST_COMPLETED)
        if child.ended.done():
            raise child.obituary()
        self.address = await child.announced or self._socket
        self._moved(self.address)
        if not self._socket:
            await until_serving(self.name, self.address, START_SECONDS)

    async def kill(self) -> None:
        """SIGKILL, also of a frozen one."""
        await self._end(signal.SIGKILL)

    async def drain(self, within: float) -> None:
        """SIGTERM; returns when it has ended. Raises Overran when that took too long or not with exit code 0."""
        try:
            async with asyncio.timeout(within):
                code = await self._end(signal.SIGTERM)
        except TimeoutError:
            await self.kill()
            raise Overran(f"{self.name} was still there {within:g} s after SIGTERM") from None
        if code != 0:
            raise Overran(f"{self.name} ended with exit code {code} after SIGTERM")

    def freeze(self) -> None:
        """SIGSTOP."""
        self._running.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._running.signal(signal.SIGCONT)

    async def stop(self) -> None:
        """Ends what runs, whatever it does."""
        if self._child is not None and not self._child.ended.done():
            await self.kill()

    async def _end(self, number: signal.Signals) -> int:
        child, self.whole = self._running, False
        child.signal(number)
        code = await asyncio.shield(child.ended)
        self.address = ""
        self._moved("")
        return code

    @property
    def _running(self) -> Child:
        assert self._child is not None, f"{self.name} was never started"
        return self._child


class Overran(Exception):
    """A process did not end as it should have; the message is one line."""
