"""The link to one draft worker: one stream that carries the commands and blocks of all sessions.

A block comes as the answer to a command, or pushed, before the tokens that it builds on were committed: then it waits
here until the session gets there, or goes another way.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from orchestrator.breaker import Breaker
from orchestrator.hedging import Waits
from orchestrator.links.base import INFO_TIMEOUT, Info, Link, Misbehaved
from orchestrator.lookahead import DraftHistory
from orchestrator.prefix import TokenBuffer
from orchestrator.trees import TreeHistory
from outrider.lm.features import Feeding
from outrider.lm.tokenizer import Vocabulary
from outrider.net.arrays import to_bytes
from outrider.net.bounds import (
    DEFAULT_LAW_TOP,
    EVENT_BYTES,
    LAW_ENTRY_BYTES,
    MAX_COMMANDS,
    MAX_EVENT_BYTES,
    MAX_FEATURE_BYTES,
    MAX_FEATURE_LAYERS,
    MAX_LOOKAHEAD,
)
from outrider.net.channel import MAX_DRAFT_BYTES
from outrider.net.errors import OutriderError, from_rpc_error
from outrider.net.tls import ClientTls
from outrider.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from outrider.v1.draft_pb2 import DraftCommand, DraftEvent, Proposer
from outrider.v1.orchestrator_pb2 import Acceptance

# Commands waiting for the stream; more than this and the worker is not reading: its sessions run plain.
MAX_QUEUED_COMMANDS = 16_384
# Pushed blocks of a session that wait to be of use.
MAX_PUSHED = 8
# Commands whose answers may still come when their sessions have ended, beside those of twice the sessions that run.
_COMMANDS_BEHIND = 1_024
# What an event costs beside its bytes.
_EVENT_COST = 512
# How often a connection that begins anew clears a worker's record.
_FORGIVEN_SECONDS = 30.0

Discarded = Callable[[str], None]
# None ends the stream of commands.
_Commands = asyncio.Queue[DraftCommand | None]


@dataclass
class _Session:
    """What the worker was last told of a session, and what it said since.

    Attributes:
        tokens: the committed ones; more may have been appended since.
        base_length: of the last command.
        answer: to the last command; None once it is there, for it holds the whole message that it came with.
        pushed: blocks for later base lengths, by these.
        opened: base length of an Open whose answer has not come, 0 without one: what is pushed before that goes on from
            what the session was until then.
    """

    epoch: int
    tokens: TokenBuffer
    base_length: int
    answer: "asyncio.Future[DraftEvent] | None"
    pushed: dict[int, DraftEvent]
    opened: int

    def give_up(self) -> None:
        """The answer is not waited for any more."""
        if self.answer is not None:
            self.answer.cancel()

    def agrees(self, event: DraftEvent) -> bool:
        """Whether what a pushed block builds on was committed, as far as it goes."""
        start = event.base_length - len(event.hypothesis) // 4
        return event.hypothesis.startswith(to_bytes(self.tokens.view(start, event.base_length)))


class DraftLink(Link):
    """One draft worker.

    Attributes:
        proposers: what the worker offers.
        keeps_outputs: whether it wants to know how generations end.
        translated: what its model has in common with the vocabulary; None where that is the model's own.
        waits: of rounds for its blocks; kept where late ones are hedged.
        history: what its sessions learned together, by proposer and acceptance rule.
        trees: what they learned of trees, by proposer, acceptance rule and most tokens of a tree.

    Args:
        vocabulary: of the orchestrator's tokenizer.
        changed: called whenever `usable` may have changed.
        discarded: called with a reason for every block that nobody waits for (any more).
    """

    kind = "draft"
    max_receive_bytes = MAX_DRAFT_BYTES

    def __init__(
        self,
        address: str,
        vocabulary: Vocabulary,
        changed: Callable[[], None],
        discarded: Discarded,
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__(address, vocabulary, changed, tls)
        self._discarded = discarded
        self._queue: _Commands = asyncio.Queue(MAX_QUEUED_COMMANDS)
        self._told: dict[str, _Session] = {}
        self.proposers: tuple[Proposer.ValueType, ...] = ()
        self.keeps_outputs = False
        self._feedings: dict[Proposer.ValueType, Feeding] = {}
        self.translated: draft_pb2.TranslatedVocabulary | None = None
        self.waits = Waits()
        self._forgiven_at = -math.inf
        # Bytes of events that the worker may still send for the commands that it got, and the most for one of them.
        self._credit = self._per_command = 0
        self.history: dict[tuple[Proposer.ValueType, Acceptance.ValueType], DraftHistory] = defaultdict(DraftHistory)
        self.trees: dict[tuple[Proposer.ValueType, Acceptance.ValueType, int], TreeHistory] = defaultdict(TreeHistory)

    def request(self, command: DraftCommand, tokens: TokenBuffer) -> "asyncio.Future[DraftEvent]":
        """Sends an Open or Advance that makes `tokens` the session's committed ones; the future gets its event, or
        OutriderError when the link breaks.

        A newer request of the same session takes the place of the older one, whose future is cancelled. When the worker
        does not read its commands, the new future itself is cancelled at once: nothing was sent. After an Open nothing
        is of use that was pushed before: another proposer may have made it, or one that did not have the right tokens.
        """
        future: asyncio.Future[DraftEvent] = asyncio.get_running_loop().create_future()
        before = self._told.get(command.session_id)
        if before is not None:
            before.give_up()
        session = _Session(command.epoch, tokens, len(tokens), future, {}, len(tokens))
        if before is not None and before.epoch == command.epoch and command.WhichOneof("action") != "open":
            session.pushed, session.opened = before.pushed, before.opened
        self._told[command.session_id] = session
        if not self._enqueue(command):
            self._forget(command.session_id)
        return future

    @property
    def awaited(self) -> int:
        """Commands that are not answered. May be asked for in any thread."""
        answers = [session.answer for session in self._told.copy().values()]
        return sum(answer is not None and not answer.done() for answer in answers)

    def pushed(
        self, session_id: str, epoch: int, tokens: TokenBuffer, *, useful: bool
    ) -> tuple[DraftEvent | None, int]:
        """(the block that was pushed for exactly these committed tokens, bytes of those that were for others): none of
        them is held any longer.

        Args:
            useful: whether any can be: none is for a command that opens the session anew, or asks for a tree.
        """
        session = self._told.get(session_id)
        if session is None or session.epoch != epoch:
            return None, 0
        found = None
        missed = []
        for base_length, event in list(session.pushed.items()):
            if useful and base_length >= len(tokens) and session.agrees(event):
                found = session.pushed.pop(base_length) if base_length == len(tokens) else found
            else:
                missed.append(session.pushed.pop(base_length))
                self._discard(event, "missed")
        return found, sum(event.ByteSize() for event in missed)

    def close_session(self, session_id: str, epoch: int, close: draft_pb2.Close | None = None) -> None:
        """Frees a session at the worker; without effect on what a later owner asked there."""
        told = self._told.get(session_id)
        if told is not None and told.epoch == epoch:
            self._forget(session_id)
        if self.usable:
            self._enqueue(DraftCommand(session_id=session_id, epoch=epoch, close=close or draft_pb2.Close()))

    def _enqueue(self, command: DraftCommand) -> bool:
        try:
            self._queue.put_nowait(command)
        except asyncio.QueueFull:
            return False
        self._grant(command)
        return True

    def _forget(self, session_id: str) -> None:
        session = self._told.pop(session_id, None)
        if session is not None:
            session.give_up()
            for event in session.pushed.values():
                self._discard(event, "missed")

    def _use(self, channel: grpc.aio.Channel) -> None:
        self._stub = draft_pb2_grpc.DraftServiceStub(channel)

    async def _serve_connection(self) -> None:
        queue = self._queue = asyncio.Queue(MAX_QUEUED_COMMANDS)
        call = self._stub.Draft(self._requests(queue))
        try:
            async with asyncio.timeout(INFO_TIMEOUT):
                await call.wait_for_connection()
            self._credit = 0
            self._up()
            async for response in call:
                if len(response.events) > MAX_COMMANDS:
                    raise Misbehaved(f"a message of {len(response.events)} events, limit {MAX_COMMANDS}")
                self.heard(response.load)
                for event in response.events:
                    self._charge(event)
                    self._dispatch(event)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and from_rpc_error(error) is None:
                raise Misbehaved(error.details() or "a message that is too large") from error
            raise
        finally:
            call.cancel()
            self.usable = False
            _end(queue)
            self._fail_all()

    async def _requests(self, queue: _Commands) -> AsyncIterator[draft_pb2.DraftRequest]:
        """Everything that waits goes into one message."""
        while True:
            commands = [await queue.get()]
            while len(commands) < MAX_COMMANDS and not queue.empty():
                commands.append(queue.get_nowait())
            if None in commands:
                return
            yield draft_pb2.DraftRequest(commands=[command for command in commands if command is not None])

    def feeding(self, proposer: Proposer.ValueType) -> Feeding | None:
        """What one of its proposers wants of the target's features; None where it wants none."""
        default = self.proposers[0] if self.proposers else proposer
        return self._feedings.get(proposer or default)

    def _forgive(self) -> None:
        """A worker that has begun anew is not what it was; one that does so again and again to be asked again, is."""
        now = time.monotonic()
        if not self.breaker.closed and now - self._forgiven_at >= _FORGIVEN_SECONDS:
            self.breaker, self._forgiven_at = Breaker(), now

    def _grant(self, command: DraftCommand) -> None:
        """Lets the worker send what a command may be answered with: its block and those ahead."""
        if command.WhichOneof("action") == "open":
            entries = 0 if command.open.omit_law else command.open.law_top or DEFAULT_LAW_TOP
            block = EVENT_BYTES + MAX_LOOKAHEAD * LAW_ENTRY_BYTES * entries
            self._per_command = max(self._per_command, (1 + MAX_PUSHED) * block)
        most = self._per_command * (_COMMANDS_BEHIND + 2 * len(self._told))
        self._credit = min(self._credit + self._per_command, most)

    def _charge(self, event: DraftEvent) -> None:
        """Raises Misbehaved when the worker sends more than it was asked for."""
        size = event.ByteSize()
        self._credit -= size + _EVENT_COST
        if size > MAX_EVENT_BYTES:
            raise Misbehaved(f"an event of {size} bytes, limit {MAX_EVENT_BYTES}")
        if self._credit < 0:
            raise Misbehaved("more events than the commands that it got can have")

    def _dispatch(self, event: DraftEvent) -> None:
        session = self._told.get(event.session_id)
        if session is None or event.epoch != session.epoch:
            self._discard(event, "stale")
            return
        if not event.hypothesis and event.base_length >= session.opened:
            session.opened = 0
        if event.base_length < session.base_length:
            self._discard(event, "stale")
        elif event.hypothesis and (session.opened or not session.agrees(event)):
            self._discard(event, "missed")
        elif event.base_length > session.base_length:
            self._hold(session, event)
        elif session.answer is None:
            self._discard(event, "stale")
        elif session.answer.done():
            self._discard(event, "late")
        else:
            session.answer.set_result(event)
            session.answer = None

    def _hold(self, session: _Session, event: DraftEvent) -> None:
        if event.hypothesis and len(session.pushed) < MAX_PUSHED:
            session.pushed[event.base_length] = event
        else:
            self._discard(event, "stale")

    def _discard(self, event: DraftEvent, reason: str) -> None:
        if event.block.tokens:
            self._discarded(reason)

    def _fail_all(self) -> None:
        told, self._told = self._told, {}
        for session in told.values():
            if session.answer is not None and not session.answer.done():
                error = OutriderError(types_pb2.ERROR_REASON_NO_WORKER, f"draft {self.address} is gone")
                session.answer.set_exception(error)
                session.answer.exception()  # one that nobody waits for any more is no lost exception

    async def _get_info(
        self, seconds: float, *, include_token_hashes: bool = False
    ) -> draft_pb2.DraftServiceGetInfoResponse:
        request = draft_pb2.DraftServiceGetInfoRequest(include_token_hashes=include_token_hashes)
        return await self._stub.GetInfo(request, timeout=seconds)

    async def _tend(self) -> None:
        """Nothing: sessions try it. A late block costs them little, and only they know whether it is right."""

    def _serves(self, info: Info) -> None:
        super()._serves(info)
        if isinstance(info, draft_pb2.DraftServiceGetInfoResponse):
            if len(info.proposers) > MAX_LOOKAHEAD:
                raise Misbehaved(f"{len(info.proposers)} proposers")
            self.proposers, self.keeps_outputs = tuple(info.proposers), info.history_tokens > 0
            self.translated = info.translated if info.HasField("translated") else None
            self._feedings = {each.proposer: _feeding(each) for each in info.feedings}


def _feeding(message: draft_pb2.Feeding) -> Feeding:
    feeding = Feeding(tuple(message.layers), message.hidden_size, message.window)
    fits = 1 <= len(feeding.layers) <= MAX_FEATURE_LAYERS and feeding.hidden_size >= 1 and feeding.window >= 1
    # The tokens of a block come on top.
    if not fits or 2 * feeding.width * (feeding.window + MAX_LOOKAHEAD) > MAX_FEATURE_BYTES:
        raise Misbehaved(f"a feeding of {len(message.layers)} layers and {message.window} tokens")
    return feeding


def _end(queue: _Commands) -> None:
    """Ends the stream of commands. grpc does not do it when the peer ends the call: its reader would wait for ever."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)
