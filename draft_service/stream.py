"""One orchestrator's stream: what it still waits for, and the events that wait for it."""

import asyncio
from collections import deque

from outrider.net.bounds import MAX_COMMANDS
from outrider.net.errors import OutriderError
from outrider.v1 import draft_pb2

# Events that wait for a reader; beyond these no command is read, so that the peer's flow control holds it back.
MAX_WAITING_EVENTS = 4096
# Of one message, far below what an orchestrator takes.
_MESSAGE_BYTES = 1024 * 1024


class Stream:
    """Lives on the event loop.

    Attributes:
        number: of the stream in this process.
        pending: commands that the engine thread has not answered yet.
        read_all: the peer sends nothing more, or the worker reads nothing more.
        failure: ends the stream with this status, once what is pending was sent when `drain`ing, at once otherwise.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending = 0
        self.read_all = False
        self.failure: OutriderError | None = None
        self._events: deque[draft_pb2.DraftEvent] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def waiting(self) -> int:
        """Events that wait for the peer."""
        return len(self._events)

    def push(self, events: list[draft_pb2.DraftEvent]) -> None:
        """Queues events for the peer. Never blocks: what may come is bounded by what was read."""
        self._events.extend(events)
        if len(self._events) >= MAX_WAITING_EVENTS:
            self._room.clear()
        self._changed.set()

    def finish_reading(self) -> None:
        """Ends the stream with OK once everything pending was sent."""
        self.read_all = True
        self._changed.set()

    def drain(self, error: OutriderError) -> None:
        """Ends the stream with the error once everything pending was sent."""
        self.failure = error
        self.finish_reading()

    def fail(self, error: OutriderError) -> None:
        """Ends the stream with the error; nothing pending will be answered any more."""
        self.pending = 0
        self.drain(error)

    async def until_room(self) -> None:
        """Returns when the peer has taken enough of its events for more commands to be read."""
        await self._room.wait()

    async def next_events(self) -> list[draft_pb2.DraftEvent]:
        """The next message's events, at least one; none when the stream is through.

        Raises `failure` when it is through because of one.
        """
        while not self._events:
            if self.read_all and self.pending <= 0:
                if self.failure is not None:
                    raise self.failure
                return []
            self._changed.clear()
            await self._changed.wait()
        events: list[draft_pb2.DraftEvent] = []
        size = 0
        while self._events and len(events) < MAX_COMMANDS and size < _MESSAGE_BYTES:
            events.append(self._events.popleft())
            size += events[-1].ByteSize()
        if len(self._events) < MAX_WAITING_EVENTS:
            self._room.set()
        return events
