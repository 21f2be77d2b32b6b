"""One script for many sessions: what is asked for in one turn of the event loop goes out in one write."""

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, ResponseError

from orchestrator.futures import settle

# Calls of one write; more go in further ones, on connections of their own.
_MAX_CALLS = 256

_Call = tuple[tuple[str, ...], Sequence[Any], "asyncio.Future[Any]"]


class Pipelined:
    """Runs a script whose every call is safe to repeat, for a connection that breaks repeats all calls of a write.

    Args:
        timeout: seconds that one write and its answers may take.
    """

    def __init__(self, client: Redis, script: AsyncScript, timeout: float) -> None:
        self._client, self._script, self._timeout = client, script, timeout
        self._waiting: list[_Call] = []
        self._writes: set[asyncio.Task[None]] = set()

    async def __call__(self, keys: tuple[str, ...], args: Sequence[Any]) -> Any:
        """The script's answer. Raises what the call came to: RedisError, OSError, TimeoutError.

        Cancelling it does not call back what has been written.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((keys, args, future))
        return await future

    async def close(self) -> None:
        """Ends what is under way."""
        for write in self._writes:
            write.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)

    def _flush(self) -> None:
        calls, self._waiting = [call for call in self._waiting if not call[2].done()], []
        for start in range(0, len(calls), _MAX_CALLS):
            write = asyncio.create_task(self._write(calls[start : start + _MAX_CALLS]))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    async def _write(self, calls: list[_Call]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                for (*_, future), answer in zip(calls, await self._answers(calls), strict=True):
                    settle(future, answer)
        except Exception as error:
            for *_, future in calls:
                settle(future, error)
        finally:
            for *_, future in calls:
                future.cancel()

    async def _answers(self, calls: list[_Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for keys, args, _ in calls:
            pipeline.execute_command("EVALSHA", self._script.sha, len(keys), *keys, *args)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        # A server that was restarted has forgotten the script: the first of these teaches it again.
        for index, (keys, args, _) in enumerate(calls):
            if isinstance(answers[index], NoScriptError):
                try:
                    answers[index] = await self._script(keys=keys, args=args)
                except ResponseError as error:  # this call's own: the others have their answers
                    answers[index] = error
        return answers
