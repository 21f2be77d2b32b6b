"""The link to one draft worker: one stream that carries the commands and blocks of all sessions."""

import asyncio
from collections.abc import AsyncIterator, Callable

from orchestrator.breaker import Breaker
from orchestrator.handshake import check_pair, fingerprints_differ
from orchestrator.links.base import HASHES_TIMEOUT, INFO_TIMEOUT, Link
from outrider.lm.tokenizer import Vocabulary
from outrider.net.errors import OutriderError
from outrider.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from outrider.v1.draft_pb2 import DraftCommand, DraftEvent, Proposer

MAX_COMMANDS = 1024
# Commands waiting for the stream; more than this and the worker is not reading: its sessions run plain.
MAX_QUEUED_COMMANDS = 16_384

Discarded = Callable[[str], None]
# None ends the stream of commands.
_Commands = asyncio.Queue[DraftCommand | None]


class DraftLink(Link):
    """One draft worker.

    Attributes:
        proposers: what the worker offers.
        breaker: opens when its blocks are late or broken too often in a row.

    Args:
        vocabulary: of the orchestrator's tokenizer.
        changed: called whenever `usable` may have changed.
        discarded: called with a reason for every block that nobody waits for (any more).
    """

    kind = "draft"

    def __init__(self, address: str, vocabulary: Vocabulary, changed: Callable[[], None], discarded: Discarded) -> None:
        super().__init__(address, changed)
        self._vocabulary = vocabulary
        self._stub = draft_pb2_grpc.DraftServiceStub(self.channel)
        self._discarded = discarded
        self._queue: _Commands = asyncio.Queue(MAX_QUEUED_COMMANDS)
        self._waiting: dict[str, tuple[int, int, asyncio.Future[DraftEvent]]] = {}
        self.proposers: tuple[Proposer.ValueType, ...] = ()
        self.breaker = Breaker()

    def request(self, command: DraftCommand, base_length: int) -> "asyncio.Future[DraftEvent]":
        """Sends an Open or Advance; the future gets its event, or OutriderError when the link breaks.

        A newer request of the same session takes the place of the older one, whose future is cancelled. When the worker
        does not read its commands, the new future itself is cancelled at once: nothing was sent.
        """
        future: asyncio.Future[DraftEvent] = asyncio.get_running_loop().create_future()
        # A block that nobody waits for any more must not be reported as a lost exception.
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._forget(command.session_id)
        self._waiting[command.session_id] = (command.epoch, base_length, future)
        if not self._enqueue(command):
            self._forget(command.session_id)
        return future

    def close_session(self, session_id: str, epoch: int) -> None:
        """Frees a session at the worker."""
        self._forget(session_id)
        if self.usable:
            self._enqueue(DraftCommand(session_id=session_id, epoch=epoch, close=draft_pb2.Close()))

    def _enqueue(self, command: DraftCommand) -> bool:
        try:
            self._queue.put_nowait(command)
        except asyncio.QueueFull:
            return False
        return True

    def _forget(self, session_id: str) -> None:
        waiting = self._waiting.pop(session_id, None)
        if waiting is not None:
            waiting[2].cancel()

    async def _serve_connection(self) -> None:
        await self._check_pair()
        queue = self._queue = asyncio.Queue(MAX_QUEUED_COMMANDS)
        call = self._stub.Draft(self._requests(queue))
        try:
            async with asyncio.timeout(INFO_TIMEOUT):
                await call.wait_for_connection()
            # Whatever the worker did before, it has begun anew.
            self.breaker = Breaker()
            self._up()
            async for response in call:
                for event in response.events:
                    self._dispatch(event)
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

    def _dispatch(self, event: DraftEvent) -> None:
        epoch, base_length, future = self._waiting.get(event.session_id, (0, 0, None))
        if future is None or (event.epoch, event.base_length) != (epoch, base_length):
            self._discard(event, "stale")
            return
        del self._waiting[event.session_id]
        if future.done():
            self._discard(event, "late")
        else:
            future.set_result(event)

    def _discard(self, event: DraftEvent, reason: str) -> None:
        if event.block.tokens:
            self._discarded(reason)

    def _fail_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, _, future in waiting.values():
            if not future.done():
                future.set_exception(OutriderError(types_pb2.ERROR_REASON_NO_WORKER, f"draft {self.address} is gone"))

    async def _check_pair(self) -> None:
        info = await self._stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=INFO_TIMEOUT)
        if fingerprints_differ(info.model, self._vocabulary):
            hashes = draft_pb2.DraftServiceGetInfoRequest(include_token_hashes=True)
            info = await self._stub.GetInfo(hashes, timeout=HASHES_TIMEOUT)
        check_pair(f"draft {self.address}", info.model, self._vocabulary)
        self._serves(info.model, info.max_lookahead)
        self.proposers = tuple(info.proposers)


def _end(queue: _Commands) -> None:
    """Ends the stream of commands. grpc does not do it when the peer ends the call: its reader would wait for ever."""
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)
