"""A draft worker that lies in every way that somebody thought of, and the table of its lies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from draft_service.commands import base_length_of
from outrider.net.bounds import MAX_COMMANDS, MAX_EVENT_BYTES
from outrider.net.channel import MAX_DRAFT_BYTES
from outrider.net.errors import OutriderError, to_status
from outrider.v1 import draft_pb2, types_pb2
from outrider.v1.draft_pb2 import Block, DraftCommand, DraftEvent
from tests.harness.faults import VOCAB, FakeDraft, served_draft
from tests.harness.rogue_draft import point_masses

NAN, INFINITY = float("nan"), float("inf")

# What becomes of the liar: its connection stays or comes back; its breaker opens; its connection is closed for a while.
IGNORED, SHUT_OUT, CUT_OFF = "ignored", "shut out", "cut off"


@dataclass
class Liar(FakeDraft):
    """Answers warm-ups as it should, and what asks for a block by a lie."""

    tell: "Callable[[Liar, DraftCommand], Awaitable[None]] | None" = None
    closed: Callable[[DraftCommand], Sequence[DraftEvent]] = lambda command: ()

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        self.context, self._hung_up = context, asyncio.Event()
        reading = asyncio.create_task(self._read(requests))
        await asyncio.wait({reading, asyncio.create_task(self._hung_up.wait())}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()

    def hang_up(self) -> None:
        """Ends the stream that was opened last."""
        self._hung_up.set()

    async def _read(self, requests: AsyncIterator[draft_pb2.DraftRequest]) -> None:
        async for request in requests:
            for command in request.commands:
                self.commands.append(command)
                await self._answer(command)

    async def _answer(self, command: DraftCommand) -> None:
        if command.WhichOneof("action") == "close":
            if after := self.closed(command):
                await self.send(after)
        elif not lookahead_of(command):
            await self.send([event_for(command, block=Block())])
        else:
            assert self.tell is not None
            await self.tell(self, command)


def lookahead_of(command: DraftCommand) -> int:
    return command.open.lookahead if command.WhichOneof("action") == "open" else command.advance.lookahead


def event_for(command: DraftCommand, **fields: Any) -> DraftEvent:
    """The answer to a command, but for the fields."""
    answer = {"session_id": command.session_id, "epoch": command.epoch, "base_length": base_length_of(command)}
    return DraftEvent(**(answer | fields))


@dataclass(frozen=True)
class Lie:
    """What is told instead of a block, and what comes of it.

    Attributes:
        by_law: whether only rules that look at the draft's law can see it; for others it is a block like any.
        timeout: seconds that a round waits for its block; short where none comes.
    """

    tell: Callable[[Liar, DraftCommand], Awaitable[None]]
    then: str
    by_law: bool = False
    timeout: float = 20.0


def says(*changes: Callable[[DraftEvent], None], block: Block | None = None, then: str, by_law: bool = False) -> Lie:
    """One event for each change, of a block of point masses on token 1."""

    async def tell(liar: Liar, command: DraftCommand) -> None:
        events = [event_for(command, block=block or point_masses([1] * lookahead_of(command))) for _ in changes]
        for change, event in zip(changes, events, strict=True):
            change(event)
        # The right answer to the same command, so that nobody waits.
        await liar.send([*events, event_for(command, block=Block())] if then == IGNORED else events)

    return Lie(tell, then, by_law)


def block(tokens: Sequence[int], then: str = SHUT_OUT) -> Lie:
    return says(lambda event: None, block=point_masses(tokens), then=then)


def shaped(tokens: Sequence[int], parents: Sequence[int]) -> Lie:
    """A block of these tokens that follow these rows."""
    said = point_masses(tokens)
    said.parents = np.array(parents, "<i4").tobytes()
    return says(lambda event: None, block=said, then=SHUT_OUT)


def law(tokens: Sequence[int], *rows: Sequence[tuple[int, float]]) -> Lie:
    """A block of these tokens with rows of (token, probability)."""
    said = Block(tokens=np.array(tokens, "<i4").tobytes())
    said.law.sizes = np.array([len(row) for row in rows], "<i4").tobytes()
    said.law.token_ids = np.array([token for row in rows for token, _ in row], "<i4").tobytes()
    said.law.probs = np.array([prob for row in rows for _, prob in row], "<f4").tobytes()
    return says(lambda event: None, block=said, then=SHUT_OUT, by_law=True)


def setting(**fields: Any) -> Callable[[DraftEvent], None]:
    def change(event: DraftEvent) -> None:
        for name, value in fields.items():
            setattr(event, name, value)

    return change


def setting_block(**fields: Any) -> Callable[[DraftEvent], None]:
    def change(event: DraftEvent) -> None:
        for name, value in fields.items():
            setattr(event.block, name, value)

    return change


def moved(by: int) -> Callable[[DraftEvent], None]:
    def change(event: DraftEvent) -> None:
        event.base_length += by

    return change


def false_hypothesis(event: DraftEvent) -> None:
    event.base_length += 2
    event.hypothesis = np.array([15, 15, 15], "<i4").tobytes()


def other_epoch(event: DraftEvent) -> None:
    event.epoch += 1


def failure(reason: "types_pb2.ErrorReason.ValueType", then: str) -> Lie:
    async def tell(liar: Liar, command: DraftCommand) -> None:
        await liar.send([event_for(command, error=to_status(OutriderError(reason, "x" * 999)))])

    return Lie(tell, then)


async def silence(liar: Liar, command: DraftCommand) -> None:
    """Nothing, for ever."""


async def drip(liar: Liar, command: DraftCommand) -> None:
    """Each answer after its round has given it up, while the next command waits."""
    await asyncio.sleep(0.1)
    await liar.send([event_for(command, block=point_masses([1] * lookahead_of(command)))])


async def flood(liar: Liar, command: DraftCommand) -> None:
    """Blocks that nobody asked for, as fast as they are taken."""
    stray = event_for(command, block=point_masses([1]), hypothesis=b"\1\0\0\0", base_length=1 << 20)
    while True:
        await liar.send([stray] * MAX_COMMANDS)


async def flood_of_duplicates(liar: Liar, command: DraftCommand) -> None:
    answer = event_for(command, block=point_masses([1] * lookahead_of(command)))
    while True:
        await liar.send([answer] * MAX_COMMANDS)


async def large_event(liar: Liar, command: DraftCommand) -> None:
    await liar.send([event_for(command, block=Block(tokens=bytes(MAX_EVENT_BYTES)))])


async def large_message(liar: Liar, command: DraftCommand) -> None:
    await liar.send([event_for(command, block=Block(tokens=bytes(MAX_DRAFT_BYTES)))])


async def many_events(liar: Liar, command: DraftCommand) -> None:
    await liar.send([DraftEvent()] * (MAX_COMMANDS + 1))


async def hanging_up(liar: Liar, command: DraftCommand) -> None:
    liar.hang_up()


async def for_all_sessions(liar: Liar, command: DraftCommand) -> None:
    """An answer to one command in the name of every session that was ever seen."""
    names = {one.session_id for one in liar.commands}
    await liar.send([event_for(command, block=point_masses([15]), session_id=name) for name in names])


# All but never wins the race against the other.
UNLIKELY = [(0, 1e-7), (1, 1.0)]

LIES: dict[str, Lie] = {
    "another session": says(setting(session_id="nobody"), then=IGNORED),
    "every session": Lie(for_all_sessions, IGNORED),
    "another epoch": says(other_epoch, then=IGNORED),
    "an earlier base length": says(moved(-1), then=IGNORED),
    "a later base length": says(moved(1), then=IGNORED),
    "the last base length of all": says(setting(base_length=2**32 - 1), then=IGNORED),
    "a false hypothesis": says(false_hypothesis, then=IGNORED),
    "half a token as hypothesis": says(setting(hypothesis=b"\1\0"), then=IGNORED),
    "a hypothesis longer than the session": says(setting(hypothesis=bytes(4096)), then=IGNORED),
    "a block twice": says(lambda event: None, lambda event: None, lambda event: None, then=IGNORED),
    "neither block nor error": says(lambda event: event.ClearField("block"), then=SHUT_OUT),
    "an id that is the vocabulary's size": block([VOCAB]),
    "an id far outside": block([2**31 - 1]),
    "a negative id": block([-1]),
    "more tokens than asked for": block([1] * 9),
    "a block longer than any": block([1] * 500),
    "a tree that nobody asked for": shaped([1, 1], [0, 0]),
    "parents that come later": shaped([1, 1], [0, 2]),
    "a token with two parents": shaped([1], [0, 0]),
    "half a parent": says(setting_block(parents=b"\1\0"), then=SHUT_OUT),
    "half a token": says(lambda event: None, block=Block(tokens=b"\1\0"), then=SHUT_OUT),
    "a law of nothing": law([1], [(1, 0.0)]),
    "a negative law": law([1], [(1, 1.5), (0, -0.5)]),
    "a law of NaN": law([1], [(1, NAN)]),
    "an infinite law": law([1], [(1, INFINITY)]),
    "a law above 1": law([1], [(1, 1.0), (0, 1.0)]),
    "a law below 1": law([1], [(1, 0.5)]),
    "a token twice in a row": law([1], [(1, 0.5), (1, 0.5)]),
    "a law outside the vocabulary": law([1], [(1, 0.5), (VOCAB, 0.5)]),
    "a law without its token": law([1], [(0, 0.5), (2, 0.5)]),
    "a row too few": law([1, 1], [(1, 1.0)]),
    "a row too many": law([1], [(1, 1.0)], [(1, 1.0)]),
    "an empty row": law([1, 1], [(1, 1.0)], []),
    "a law that is too wide": law([1], [(index, 1 / 33) for index in range(33)]),
    "a law that was not drawn from": law([0] * 4, *[UNLIKELY] * 4),
    "not found, always": failure(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, IGNORED),
    "no room, always": failure(types_pb2.ERROR_REASON_QUEUE_FULL, SHUT_OUT),
    "an error that drafts do not have": failure(types_pb2.ERROR_REASON_NON_FINITE_LOGITS, SHUT_OUT),
    "no context, always": failure(types_pb2.ERROR_REASON_CONTEXT_EXCEEDED, IGNORED),
    "silence": Lie(silence, SHUT_OUT, timeout=0.05),
    "a slow drip": Lie(drip, SHUT_OUT, timeout=0.05),
    "hanging up": Lie(hanging_up, IGNORED),
    "a flood of blocks": Lie(flood, CUT_OFF),
    "a flood of duplicates": Lie(flood_of_duplicates, CUT_OFF),
    "an event that is too large": Lie(large_event, CUT_OFF),
    "a message that is too large": Lie(large_message, CUT_OFF),
    "more events than a message may have": Lie(many_events, CUT_OFF),
}


@asynccontextmanager
async def liar_says(lie: Lie) -> AsyncIterator[Liar]:
    async with served_draft(Liar(lambda command: (), tell=lie.tell)) as liar:
        yield liar
