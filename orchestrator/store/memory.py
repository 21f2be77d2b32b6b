"""The store of a single process: no more durable than the process itself."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from orchestrator.store import fence
from orchestrator.store.base import FINISHED, RUNNING, SessionRecord, StoreFull
from outrider.law.sparse import Int32Array
from outrider.v1.orchestrator_pb2 import FINISH_REASON_CANCELLED


class MemoryStore:
    """Sessions in a dict, used from one event loop.

    At its limit a new session takes the place of the longest finished one; running ones are never dropped.
    """

    def __init__(self, ttl: float, *, max_sessions: int = 65_536, clock: Callable[[], float] = time.time) -> None:
        self._ttl = ttl
        self._max_sessions = max_sessions
        self._clock = clock
        # In order of expiry: one time-to-live for all, and every refresh moves to the end.
        self._records: OrderedDict[str, SessionRecord] = OrderedDict()

    async def create(self, record: SessionRecord) -> None:
        """See SessionStore."""
        fence.check_epoch(record.epoch)
        self._expire()
        if record.session_id in self._records:
            raise fence.exists(record.session_id)
        self._make_room()
        self._put(replace(record, tokens=_frozen(record.tokens.astype(np.int32, copy=True))))

    async def commit(
        self,
        session_id: str,
        epoch: int,
        base_length: int,
        tokens: Int32Array,
        progress: bytes = b"",
        *,
        finish_reason: int = 0,
    ) -> None:
        """See SessionStore."""
        fence.check_commit(epoch, base_length, tokens, finish_reason)
        record = self._owned(session_id, epoch)
        known = record.tokens[base_length : base_length + len(tokens)]
        if finish_reason in (0, record.finish_reason) and np.array_equal(known, tokens):
            return
        if record.cancelled:
            raise fence.cancelled(session_id)
        if record.state == FINISHED:
            raise fence.finished(session_id, record.finish_reason)
        if len(record.tokens) != base_length:
            raise fence.length(session_id, base_length, len(record.tokens))
        self._put(
            replace(
                record,
                tokens=_frozen(np.concatenate([record.tokens, tokens])),
                progress=progress,
                state=FINISHED if finish_reason else RUNNING,
                finish_reason=finish_reason,
            )
        )

    async def finish(self, session_id: str, epoch: int, finish_reason: int) -> None:
        """See SessionStore."""
        record = self._owned(session_id, epoch)
        if record.state == FINISHED and record.finish_reason != finish_reason:
            raise fence.finished(session_id, record.finish_reason)
        self._records[session_id] = replace(record, state=FINISHED, finish_reason=finish_reason)

    async def load(self, session_id: str) -> SessionRecord | None:
        """See SessionStore."""
        self._expire()
        return self._records.get(session_id)

    async def take_over(self, session_id: str) -> SessionRecord:
        """See SessionStore."""
        record = self._held(session_id)
        self._records[session_id] = replace(record, epoch=record.epoch + 1)
        return self._records[session_id]

    async def request_cancel(self, session_id: str) -> bool:
        """See SessionStore."""
        record = await self.load(session_id)
        if record is not None:
            reason = record.finish_reason or FINISH_REASON_CANCELLED
            self._records[session_id] = replace(record, cancelled=True, state=FINISHED, finish_reason=reason)
        return record is not None

    async def ping(self) -> None:
        """See SessionStore."""

    async def fullness(self) -> float:
        """See SessionStore; in sessions."""
        self._expire()
        return len(self._records) / self._max_sessions

    async def close(self) -> None:
        """Forgets everything."""
        self._records.clear()

    def _held(self, session_id: str) -> SessionRecord:
        self._expire()
        if session_id not in self._records:
            raise fence.gone(session_id)
        return self._records[session_id]

    def _owned(self, session_id: str, epoch: int) -> SessionRecord:
        fence.check_epoch(epoch)
        record = self._held(session_id)
        if epoch < record.epoch:
            raise fence.stale(session_id, epoch, record.epoch)
        if epoch > record.epoch:
            raise fence.ahead(session_id, epoch, record.epoch)
        return record

    def _put(self, record: SessionRecord) -> None:
        self._records[record.session_id] = replace(record, expires_at=self._clock() + self._ttl)
        self._records.move_to_end(record.session_id)

    def _expire(self) -> None:
        now = self._clock()
        while self._records and next(iter(self._records.values())).expires_at <= now:
            self._records.popitem(last=False)

    def _make_room(self) -> None:
        if len(self._records) < self._max_sessions:
            return
        oldest = next((key for key, record in self._records.items() if record.state == FINISHED), None)
        if oldest is None:
            raise StoreFull(
                f"the session store holds {len(self._records)} running sessions, its limit", retry_after=1.0
            )
        del self._records[oldest]


def _frozen(tokens: Int32Array) -> Int32Array:
    """Makes an array read-only: records are handed out as they are."""
    tokens.flags.writeable = False
    return tokens
