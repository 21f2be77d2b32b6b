"""Supervision of the processes of one machine: started in order, watched, ended in reverse order."""

import asyncio
import signal
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self, TypeVar

from outrider.cli.child import Child, Command, Log, ProcessDied

T = TypeVar("T")

_CAUSE_WAIT = 1.0
# For those that were not told to end before the grace was over.
_LAST_SECONDS = 2.0


class NotReady(Exception):
    """A process did not become ready in time; the message is one line that names it."""


class Supervisor:
    """Owns child processes; leaving the block ends them all.

    The death of any child raises ProcessDied in whatever is awaited through `guard`. Children get SIGTERM in reverse
    order of their start, each when the one before has ended: what that one needs is there until then. After `grace`
    seconds the others get it too, and SIGKILL two seconds later. They are tied to this process (see tether): when it
    is killed outright, the kernel kills them. Use it in the main thread.
    """

    def __init__(self, *, grace: float = 5.0, log: Log = lambda name, line: None) -> None:
        self.children: list[Child] = []
        self._grace = grace
        self._log = log
        self._first_death: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._stopping = False

    async def start(self, command: Command) -> Child:
        """Starts a process. Does not wait for it."""
        child = await Child.start(command, self._log)
        self.children.append(child)
        child.ended.add_done_callback(lambda _: self._died(child))
        return child

    async def announced(self, child: Child, within: float) -> str:
        """The address that the process announces. Raises NotReady after `within` seconds, ProcessDied."""
        try:
            return await self.guard(asyncio.wait_for(asyncio.shield(child.announced), within))
        except TimeoutError:
            raise NotReady(f"{child.command.name} did not start within {within:g} s") from None

    async def guard(self, work: Awaitable[T]) -> T:
        """The result of `work`, unless a child dies first: then `work` is cancelled and ProcessDied raised."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._first_death}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and task.exception() is not None:  # most likely a death is the cause, and about to be seen
                await asyncio.wait({self._first_death}, timeout=_CAUSE_WAIT)
            if self._first_death.done():
                raise self._first_death.result().obituary()
            return task.result()
        finally:
            await _cancelled(task)

    async def until_death(self) -> None:
        """Waits until a child ends, for whatever reason. Raises ProcessDied then."""
        raise (await asyncio.shield(self._first_death)).obituary()

    async def stop(self) -> None:
        """Ends all children. Idempotent; nothing is left even when it is cancelled half-way."""
        self._stopping = True
        try:
            await self._ended_in_turn()
            self._signal_running(signal.SIGTERM)
            await self._ended(_LAST_SECONDS)
        finally:
            self._signal_running(signal.SIGKILL)
        await self._ended(self._grace)

    async def _ended_in_turn(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._grace
        for child in reversed(self.children):
            if not child.ended.done():
                child.signal(signal.SIGTERM)
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or not (await asyncio.wait({child.ended}, timeout=left))[0]:
                    return

    def _signal_running(self, number: signal.Signals) -> None:
        for child in reversed(self.children):
            if not child.ended.done():
                child.signal(number)

    async def _ended(self, within: float) -> None:
        running = [child.ended for child in self.children if not child.ended.done()]
        if running:
            await asyncio.wait(running, timeout=within)

    def _died(self, child: Child) -> None:
        if not self._stopping and not self._first_death.done():
            self._first_death.set_result(child)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


async def _cancelled(task: "asyncio.Future[T]") -> None:
    """Cancels what still runs and waits for its end; its own outcome does not matter any more."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


__all__ = ["Child", "Command", "NotReady", "ProcessDied", "Supervisor"]
