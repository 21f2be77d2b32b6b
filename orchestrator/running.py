"""The generations that run in this process, each as a task that can be stopped with a reason."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2


def being_cancelled() -> bool:
    """Whether the running task is to end, as opposed to something that it awaited having been cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def interrupted() -> OutriderError:
    """What ended a generation that nobody asked to end."""
    return OutriderError(types_pb2.ERROR_REASON_DRAINING, "the orchestrator stopped this generation")


class Running:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reasons: dict[asyncio.Task[None], OutriderError] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, session_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs a generation to its end.

        Raises what it raised, or the reason for which it was stopped. A cancellation that does not come from the
        caller's own becomes an error too: a handler that ended with CancelledError would leave its client hanging.
        """
        task = asyncio.create_task(work, name=f"generation {session_id}")
        self._tasks[session_id] = task
        self._idle.clear()
        try:
            await task
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise self._reasons.get(task, interrupted()) from None
        finally:
            task.cancel()
            self._forget(session_id, task)

    def stop(self, session_id: str, reason: OutriderError) -> None:
        """Ends a generation; no effect when it does not run here."""
        task = self._tasks.get(session_id)
        if task is not None and not task.done():
            self._reasons.setdefault(task, reason)
            task.cancel()

    async def displace(self, session_id: str, reason: OutriderError) -> None:
        """Ends a generation whose session has a new owner in this process; returns when it has ended."""
        task = self._tasks.get(session_id)
        if task is not None:
            self.stop(session_id, reason)
            await asyncio.wait({task})

    def stop_all(self, reason: OutriderError) -> None:
        """Ends every generation."""
        for session_id in list(self._tasks):
            self.stop(session_id, reason)

    async def wait_idle(self) -> None:
        """Returns when no generation runs."""
        await self._idle.wait()

    def _forget(self, session_id: str, task: "asyncio.Task[None]") -> None:
        self._reasons.pop(task, None)
        if self._tasks.get(session_id) is task:
            del self._tasks[session_id]
        if not self._tasks:
            self._idle.set()
