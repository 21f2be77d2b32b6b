"""One script for many sessions: what is asked for in one turn of the event loop goes out in one write."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from redis.exceptions import AuthenticationError, AuthorizationError

from orchestrator.futures import settle
from orchestrator.store.scripts import Script
from orchestrator.store.servers import TRANSIENT, Call, Servers, passes

T = TypeVar("T")

# Calls of one write; more go in further ones, on connections of their own.
_MAX_CALLS = 256
# Of repeats: at once, as after a script that the server had forgotten or a connection that was cut, then ever later.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


class Pipelined:
    """Runs scripts that are safe to repeat, and repeats them while what fails may pass, until the deadline.

    Args:
        timeout: seconds that a call may take, all repeats together.
        patience: seconds that one write may take.
        connections: writes under way at once; further ones wait.
    """

    def __init__(self, servers: Servers, timeout: float, patience: float, connections: int) -> None:
        self._servers, self._timeout, self._patience = servers, timeout, patience
        self._connections = asyncio.Semaphore(connections)
        self._waiting: list[Call] = []
        self._writes: set[asyncio.Task[None]] = set()

    async def __call__(self, script: Script, keys: tuple[str, ...], args: Sequence[Any]) -> Any:
        """The script's answer. Raises what the call came to: RedisError, OSError, TimeoutError.

        Cancelling it does not call back what has been written.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        call = Call(script, keys, args, loop.create_future())
        self._waiting.append(call)
        return await call.answer

    async def ping(self) -> None:
        """Returns when a server answers. Raises as a call does, and repeats nothing."""
        await self._asked(self._servers.ping)

    async def memory(self) -> list[Mapping[str, Any]]:
        """See Servers. Raises as `ping` does."""
        return await self._asked(self._servers.memory)

    async def _asked(self, question: Callable[[], Awaitable[T]]) -> T:
        async with asyncio.timeout(self._patience), self._connections:
            try:
                return await question()
            except RuntimeError as error:
                raise _named(error) from error

    async def close(self) -> None:
        """Ends what is under way."""
        for write in self._writes:
            write.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._servers.close()

    def _flush(self) -> None:
        calls, self._waiting = self._waiting, []
        for start in range(0, len(calls), _MAX_CALLS):
            write = asyncio.create_task(self._write(calls[start : start + _MAX_CALLS]))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    async def _write(self, calls: list[Call]) -> None:
        try:
            async with asyncio.timeout(self._timeout), self._connections:
                await self._until_answered(calls)
        except TimeoutError as error:
            for call in calls:
                settle(call.answer, call.failure or error)
        except Exception as error:
            for call in calls:
                settle(call.answer, error)
        finally:
            for call in calls:
                call.answer.cancel()

    async def _until_answered(self, calls: list[Call]) -> None:
        pause = 0.0
        while calls := [call for call in calls if not call.answer.done()]:
            for call, answer in zip(calls, await self._answers(calls), strict=True):
                if isinstance(answer, Exception) and passes(answer):
                    call.failure = answer
                else:
                    settle(call.answer, answer)
            if not all(call.answer.done() for call in calls):
                await asyncio.sleep(pause)
                pause = min(max(_FIRST_PAUSE, 2 * pause), _LONGEST_PAUSE)

    async def _answers(self, calls: list[Call]) -> Sequence[Any]:
        """What each call of one write came to: an answer, or an exception."""
        try:
            async with asyncio.timeout(self._patience):
                answers = [_named(answer) for answer in await self._servers.send(calls)]
        except (AuthenticationError, AuthorizationError):
            raise
        except (*TRANSIENT, RuntimeError) as error:
            answers = [_named(error)] * len(calls)
        if any(isinstance(answer, TRANSIENT) for answer in answers):
            await self._servers.forget()
        return answers


def _named(answer: Any) -> Any:
    """An answer; uvloop's RuntimeError for a write to a connection that was reset becomes what asyncio's loop says."""
    if isinstance(answer, RuntimeError) and "the handler is closed" in str(answer):
        return ConnectionResetError(str(answer))
    return answer
