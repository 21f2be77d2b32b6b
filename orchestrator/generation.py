"""One Generate or Resume call: its choices run side by side and share the stream."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from orchestrator.choices import number_of_choices
from orchestrator.core import Orchestrator
from orchestrator.latency import RequestTimes
from orchestrator.names import new_id, owned
from orchestrator.places import Demand, Place
from orchestrator.replay import Replay
from orchestrator.request import DEFAULT_MAX_TOKENS, GenerationPlan
from orchestrator.responses import finished_by_cancel, in_parts, replay_response, round_response, started
from orchestrator.round import run_round
from orchestrator.running import Running
from orchestrator.session import Session
from orchestrator.store import fence
from orchestrator.store.base import SessionExists
from orchestrator.tenants import ANYONE, Caller
from orchestrator.tracing import RequestTrace
from outrider.net.errors import OutriderError
from outrider.net.tokens import tenant
from outrider.v1 import types_pb2
from outrider.v1.orchestrator_pb2 import GenerateRequest, GenerateResponse

Result = TypeVar("Result")
Send = Callable[[GenerateResponse], Awaitable[None]]

# Of one message; a replay has many. Any client takes a message of some ten kilobytes.
_MOST_TOKENS = 1024
# What a request that is yet to be checked counts for at most.
_LONGEST_OUTPUT = 1 << 20


class GenerationCall:
    """One call.

    Args:
        running: where its sessions can be stopped.
        send: writes one message to the client; never called twice at a time.
        times: of the request.
        caller: for whom.
    """

    def __init__(
        self, orchestrator: Orchestrator, running: Running, send: Send, times: RequestTimes, caller: Caller = ANYONE
    ) -> None:
        self._orchestrator, self._running, self._send, self._caller = orchestrator, running, send, caller
        self._times = times
        self._choices = 1
        self._by_token = self._resumable = False
        self._place: Place | None = None
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
        admission = self._orchestrator.admission
        # What it takes is in the store, which is not asked on behalf of what is refused.
        async with admission.admitted(self._caller, Demand(1, 0, DEFAULT_MAX_TOKENS)) as place:
            self._place = place
            left = await self._orchestrator.take_over(session_id, offset)
            request = RequestTrace.current()
            if request is not None:
                request.resumed(left.generated)
            self._by_token, self._resumable = left.plan.token_by_token, left.plan.resumable
            if left.running:
                rest = left.plan.stop.max_tokens - left.generated
                admission.settle(place, Demand(1, len(left.record.tokens), rest))
                epoch = left.record.epoch
                await self._running.displace(session_id, fence.stale(session_id, epoch - 1, epoch))
                async with self._orchestrator.resumed(left, self._caller) as session:
                    await self._running.run(session_id, self._go_on(left, session))
            else:
                await self._replay(left)

    async def _generate(self, request: GenerateRequest) -> None:
        self._choices, self._by_token = number_of_choices(request), request.token_by_token
        self._prompt_known = asyncio.Event() if self._choices > 1 else None
        self._resumable = request.resumable
        admission = self._orchestrator.admission
        async with admission.admitted(self._caller, _demand(request, self._choices)) as place:
            self._place = place
            plans = await self._orchestrator.plan(request)
            output = sum(plan.stop.max_tokens for plan in plans)
            admission.settle(place, Demand(self._choices, len(plans[0].prompt), output))
            cancelled = await _together([self._choice(number, plan, request) for number, plan in enumerate(plans)])
        if all(cancelled):
            raise next(error for error in cancelled if error is not None)

    async def _choice(self, number: int, plan: GenerationPlan, request: GenerateRequest) -> OutriderError | None:
        """Streams one choice to its end. Returns the cancellation of its session, when that was the end."""
        session: Session | None = None
        try:
            async with self._orchestrator.session(plan, request, self._caller) as session:
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
        finished, before = False, session.output.generated
        try:
            while not finished:
                emission, stats = await run_round(session, self._orchestrator.services)
                generated = session.output.generated - before
                self._times.emitted(number, generated)
                if self._place is not None:
                    self._place.generated += len(emission.tokens)
                await self._write_tokens(number, round_response(session, emission, stats))
                self._tell_prompt()
                finished = emission.finish is not None
            self._times.generated(number, len(session.plan.prompt), generated)
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
        """Waits for the client, which holds the session back and nothing else, but not for ever."""
        response.choice = number
        config = self._orchestrator.config
        patience = min(config.reader_timeout, config.session_ttl)
        try:
            async with asyncio.timeout(patience):
                await (self._send(response) if self._choices == 1 else self._send_in_turn(response))
        except TimeoutError:
            raise self._unread(patience) from None

    def _unread(self, patience: float) -> OutriderError:
        """The end of a stream that nobody reads; a session that is resumable stays in the store."""
        message = f"the client read nothing for {patience:g} s"
        if self._resumable:
            message += "; Resume has the rest"
            return OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, message, retry_after=0.0)
        return OutriderError(types_pb2.ERROR_REASON_SESSION_CANCELLED, f"{message}, and the session has ended")

    async def _send_in_turn(self, response: GenerateResponse) -> None:
        """Sends wholly also when the choice is cancelled meanwhile: its last message counts the tokens of this one."""

        async def send() -> None:
            async with self._sending:
                await self._send(response)

        await asyncio.shield(send())


def _demand(request: GenerateRequest, choices: int) -> Demand:
    """What the request takes at most; text has fewer tokens than bytes."""
    output = request.stop.max_tokens if request.stop.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    return Demand(choices, request.ByteSize(), choices * min(output, _LONGEST_OUTPUT))


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
