"""What only the embedded store has: a clock that a test can turn, and a limit."""

import numpy as np
import pytest

from orchestrator.store import SessionGone, SessionRecord, StoreFull
from orchestrator.store.memory import MemoryStore
from outrider.law.sparse import Int32Array
from outrider.v1 import types_pb2


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def new(session_id: str) -> SessionRecord:
    return SessionRecord(session_id, ints(1, 2, 3), 3)


async def test_the_time_to_live_counts_from_the_last_commit() -> None:
    clock = Clock()
    store = MemoryStore(10.0, clock=clock)
    await store.create(new("busy"))
    await store.create(new("idle"))
    clock.now += 9
    await store.commit("busy", 1, 3, ints(4))
    clock.now += 2
    assert await store.load("idle") is None
    with pytest.raises(SessionGone):
        await store.commit("idle", 1, 3, ints(4))
    record = await store.load("busy")
    assert record is not None
    assert record.expires_at == 1019.0
    clock.now += 8
    assert await store.request_cancel("busy") is False


async def test_the_limit_refuses_rather_than_drops_running_sessions() -> None:
    store = MemoryStore(10.0, max_sessions=3)
    for name in "abc":
        await store.create(new(name))
    with pytest.raises(StoreFull, match="3 running sessions") as refused:
        await store.create(new("d"))
    assert refused.value.reason == types_pb2.ERROR_REASON_QUEUE_FULL
    assert refused.value.retry_after is not None
    await store.finish("b", 1, 1)
    await store.create(new("d"))
    assert await store.load("b") is None
    assert all([await store.load(name) for name in "acd"])
