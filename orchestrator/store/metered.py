"""A session store whose calls are timed and counted."""

import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from orchestrator.store.base import SessionRecord, SessionStore, StoreUnavailable
from outrider.law.sparse import Int32Array

T = TypeVar("T")


class Stored(Protocol):
    """Told of every call: which it was, its seconds, and whether it did not get through. A store that refuses a call
    has answered it."""

    def __call__(self, operation: str, seconds: float, *, failed: bool) -> None:
        """One call."""


class MeteredStore:
    """A SessionStore around another one, `inner`.

    Attributes:
        known_fullness: what `fullness` said last; None while it is unknown.
    """

    def __init__(self, store: SessionStore, stored: Stored) -> None:
        self.inner, self._stored = store, stored
        self.known_fullness: float | None = None

    async def create(self, record: SessionRecord) -> None:
        """As SessionStore.create."""
        await self._timed("create", self.inner.create(record))

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
        """As SessionStore.commit."""
        commit = self.inner.commit(session_id, epoch, base_length, tokens, progress, finish_reason=finish_reason)
        await self._timed("commit", commit)

    async def finish(self, session_id: str, epoch: int, finish_reason: int) -> None:
        """As SessionStore.finish."""
        await self._timed("finish", self.inner.finish(session_id, epoch, finish_reason))

    async def load(self, session_id: str) -> SessionRecord | None:
        """As SessionStore.load."""
        return await self._timed("load", self.inner.load(session_id))

    async def take_over(self, session_id: str) -> SessionRecord:
        """As SessionStore.take_over."""
        return await self._timed("take_over", self.inner.take_over(session_id))

    async def request_cancel(self, session_id: str) -> bool:
        """As SessionStore.request_cancel."""
        return await self._timed("request_cancel", self.inner.request_cancel(session_id))

    async def ping(self) -> None:
        """As SessionStore.ping."""
        await self._timed("ping", self.inner.ping())

    async def fullness(self) -> float | None:
        """As SessionStore.fullness."""
        self.known_fullness = None
        self.known_fullness = await self.inner.fullness()
        return self.known_fullness

    async def close(self) -> None:
        """As SessionStore.close."""
        await self.inner.close()

    async def _timed(self, operation: str, call: Awaitable[T]) -> T:
        began, failed = time.perf_counter(), False
        try:
            return await call
        except StoreUnavailable:
            failed = True
            raise
        finally:
            self._stored(operation, time.perf_counter() - began, failed=failed)
