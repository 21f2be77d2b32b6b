"""One Generate or Resume call: its choices run side by side and share the stream."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from orchestrator.choices import number_of_choices
from orchestrator.core import Orchestrator
from orchestrator.names import new_id, owned
from orchestrator.replay import Replay
from orchestrator.request import GenerationPlan
from orchestrator.responses import finished_by_cancel, in_parts, replay_response, round_response, started
from orchestrator.round import run_round
from orchestrator.running import Running
from orchestrator.session import Session
from orchestrator.store import fence
from orchestrator.store.base import SessionExists
from outrider.net.errors import OutriderError
from outrider.net.tokens import tenant
from outrider.v1 import types_pb2
from outrider.v1.orchestrator_pb2 import GenerateRequest, GenerateResponse

Result = TypeVar("Result")
Send = Callable[[GenerateResponse], Awaitable[None]]

# Of one message; a replay has many. Any client takes a message of some ten kilobytes.
_MOST_TOKENS = 1024


class GenerationCall:
    """One call.

    Args:
        running: where its sessions can be stopped.
        send: writes one message to the client; never called twice at a time.
    """

    def __init__(self, orchestrator: Orchestrator, running: Running, send: Send) -> None:
        self._orchestrator, self._running, self._send = orchestrator, running, send
        self._choices = 1
        self._by_token = False
        self._held = 0  # generated tokens that the caller has and that were not passed over yet
        self._sending = asyncio.Lock()
        # Only where there is more than one choice.
        self._prompt_known: asyncio.Event | None = None

    async def run(self, request: GenerateRequest) -> None:
        """Streams every choice to its end; goes on with the session of a resumable request that was sent before.

        Raises the OutriderError of the first choice that failed, or SESSION_CANCELLED when all were cancelled.
        """
        request.session_id = owned(request.session_id or new_id(), tenant())
        try:
            await self._generate(request)
        except SessionExists:
            if not await self._orchestrator.repeats(request):
                raise
            await self._resume(request.session_id, 0)

    async def resume(self, session_id: str, offset: int) -> None:
        """Streams what was generated after the caller's first `offset` tokens, then the rest of the generation.

        Raises OutriderError, as `Orchestrator.take_over` and rounds do.
        """
        await self._resume(owned(session_id, tenant()), offset)

    async def _resume(self, session_id: str, offset: int) -> None:
        self._choices, self._held = 1, offset
        with self._orchestrator.admitted(1):
            left = await self._orchestrator.take_over(session_id, offset)
            self._by_token = left.plan.token_by_token
            if left.running:
                epoch = left.record.epoch
                await self._running.displace(session_id, fence.stale(session_id, epoch - 1, epoch))
                async with self._orchestrator.resumed(left) as session:
                    await self._running.run(session_id, self._go_on(left, session))
            else:
                await self._replay(left)

    async def _generate(self, request: GenerateRequest) -> None:
        self._choices, self._by_token = number_of_choices(request), request.token_by_token
        self._prompt_known = asyncio.Event() if self._choices > 1 else None
        with self._orchestrator.admitted(self._choices):
            plans = await self._orchestrator.plan(request)
            cancelled = await _together([self._choice(number, plan, request) for number, plan in enumerate(plans)])
        if all(cancelled):
            raise next(error for error in cancelled if error is not None)

    async def _choice(self, number: int, plan: GenerationPlan, request: GenerateRequest) -> OutriderError | None:
        """Streams one choice to its end. Returns the cancellation of its session, when that was the end."""
        session: Session | None = None
        try:
            async with self._orchestrator.session(plan, request) as session:
                await self._running.run(plan.session_id, self._stream(number, session))
                return None
        except OutriderError as error:
            if error.reason != types_pb2.ERROR_REASON_SESSION_CANCELLED:
                raise
            cancellation = error
        finally:
            self._tell_prompt()
        if self._choices > 1:
            await self._write(number, finished_by_cancel(plan, session))
        return cancellation

    async def _stream(self, number: int, session: Session) -> None:
        await self._write(number, started(session.plan))
        if number and self._prompt_known is not None:
            # The target shares the pages of a prompt that it knows: the others need not compute it again.
            await self._prompt_known.wait()
        await self._rounds(number, session)

    async def _go_on(self, left: Replay, session: Session) -> None:
        await self._replay(left)
        await self._rounds(0, session)

    async def _replay(self, left: Replay) -> None:
        await self._write(0, started(left.plan, left.generated))
        await self._write_tokens(0, replay_response(left))

    async def _rounds(self, number: int, session: Session) -> None:
        finished = False
        try:
            while not finished:
                emission, stats = await run_round(session, self._orchestrator.services)
                await self._write_tokens(number, round_response(session, emission, stats))
                self._tell_prompt()
                finished = emission.finish is not None
        finally:
            # At once: another owner in this process may begin before the session is closed.
            session.drop_ahead()

    def _tell_prompt(self) -> None:
        if self._prompt_known is not None:
            self._prompt_known.set()

    async def _write_tokens(self, number: int, response: GenerateResponse) -> None:
        passed = min(self._held, len(response.tokens))
        self._held -= passed
        del response.tokens[:passed]
        for part in in_parts(response, 1 if self._by_token else _MOST_TOKENS):
            await self._write(number, part)

    async def _write(self, number: int, response: GenerateResponse) -> None:
        """Waits for the client as long as the store keeps the session meanwhile."""
        response.choice = number
        ttl = self._orchestrator.config.session_ttl
        try:
            async with asyncio.timeout(ttl):
                await (self._send(response) if self._choices == 1 else self._send_in_turn(response))
        except TimeoutError:
            message = f"the client read nothing for {ttl:g} s, and the session has expired"
            raise OutriderError(types_pb2.ERROR_REASON_SESSION_CANCELLED, message) from None

    async def _send_in_turn(self, response: GenerateResponse) -> None:
        """Sends wholly also when the choice is cancelled meanwhile: its last message counts the tokens of this one."""

        async def send() -> None:
            async with self._sending:
                await self._send(response)

        await asyncio.shield(send())


async def _together(works: list[Coroutine[Any, Any, Result]]) -> list[Result]:
    """What the works return, in their order. The first failure ends all of them."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
