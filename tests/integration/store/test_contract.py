"""What every store promises; the same suite over all of them."""

import asyncio
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.store import (
    LengthMismatch,
    SessionCancelled,
    SessionExists,
    SessionFinished,
    SessionGone,
    SessionRecord,
    SessionStore,
    StaleEpoch,
)
from orchestrator.store.memory import MemoryStore
from outrider.law.sparse import Int32Array
from outrider.v1 import orchestrator_pb2, types_pb2

STOP, LENGTH = orchestrator_pb2.FINISH_REASON_STOP, orchestrator_pb2.FINISH_REASON_LENGTH
# Bytes that are no UTF-8, end a C string and look like Lua's or Redis' own syntax.
BINARY = b"\x00\xff\xfe\r\n$-1\r\n'\"]]"


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def new(session_id: str, *tokens: int, epoch: int = 1, meta: bytes = b"") -> SessionRecord:
    prompt = ints(*(tokens or (1, 2, 3)))
    return SessionRecord(session_id, prompt, len(prompt), epoch=epoch, meta=meta)


async def tokens_of(store: SessionStore, session_id: str) -> list[int]:
    record = await store.load(session_id)
    assert record is not None
    return [int(token) for token in record.tokens]


async def test_a_session_comes_back_as_it_was_committed(store: SessionStore, session_id: str) -> None:
    extreme = (-(2**31), 2**31 - 1, 0, 10, 13)
    await store.create(SessionRecord(session_id, ints(*extreme), 5, epoch=7, meta=BINARY, progress=b"start"))
    before = time.time()
    await store.commit(session_id, 7, 5, ints(8, 9), BINARY[::-1])
    record = await store.load(session_id)
    assert record is not None
    assert record.tokens.tolist() == [*extreme, 8, 9]
    assert record.tokens.dtype == np.int32
    assert (record.session_id, record.epoch, record.prompt_length) == (session_id, 7, 5)
    assert (record.meta, record.progress) == (BINARY, BINARY[::-1])
    assert (record.state, record.finish_reason, record.cancelled) == ("running", 0, False)
    assert before + 55 < record.expires_at < time.time() + 61


async def test_how_full_it_is(store: SessionStore, session_id: str) -> None:
    """What has no limit, or may not be asked, says nothing."""
    await store.create(new(session_id))
    assert await store.fullness() == (1 / 65_536 if isinstance(store, MemoryStore) else None)


async def test_a_record_is_a_snapshot(store: SessionStore, session_id: str) -> None:
    mine = ints(1, 2, 3)
    await store.create(SessionRecord(session_id, mine, 3))
    record = await store.load(session_id)
    assert record is not None
    mine[0] = 99
    await store.commit(session_id, 1, 3, ints(4))
    assert record.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        record.tokens[0] = 5


async def test_unknown_sessions(store: SessionStore, session_id: str) -> None:
    assert await store.load(session_id) is None
    assert await store.request_cancel(session_id) is False
    with pytest.raises(SessionGone):
        await store.commit(session_id, 1, 3, ints(4))
    with pytest.raises(SessionGone):
        await store.finish(session_id, 1, STOP)
    with pytest.raises(SessionGone):
        await store.take_over(session_id)


async def test_an_id_in_use_is_refused(store: SessionStore, session_id: str) -> None:
    await store.create(new(session_id, 1, 2))
    with pytest.raises(SessionExists) as refused:
        await store.create(new(session_id, 1, 2))
    assert refused.value.reason == types_pb2.ERROR_REASON_SESSION_EXISTS
    assert session_id in refused.value.message
    assert await tokens_of(store, session_id) == [1, 2]


async def test_of_many_creators_one_wins(store: SessionStore, session_id: str) -> None:
    creations = (store.create(new(session_id, i + 1)) for i in range(20))
    results = await asyncio.gather(*creations, return_exceptions=True)
    assert results.count(None) == 1
    assert sum(isinstance(result, SessionExists) for result in results) == 19
    assert await tokens_of(store, session_id) == [results.index(None) + 1]


async def test_a_repeated_commit_appends_once(store: SessionStore, session_id: str) -> None:
    await store.create(new(session_id))
    for _ in range(3):
        await store.commit(session_id, 1, 3, ints(4, 5), b"a")
    await store.commit(session_id, 1, 5, ints(6), b"b")
    await store.commit(session_id, 1, 3, ints(4, 5), b"a")
    record = await store.load(session_id)
    assert record is not None
    assert record.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert record.progress == b"b", "a late repeat must not turn progress back"


@pytest.mark.parametrize(
    ("base_length", "tokens"),
    [(5, (9,)), (3, (4, 9)), (3, (9,)), (2, (9,)), (6, (7,)), (0, (9, 9, 9, 9, 9, 9, 9))],
)
async def test_a_commit_elsewhere_is_refused(
    store: SessionStore, session_id: str, base_length: int, tokens: tuple[int, ...]
) -> None:
    await store.create(new(session_id))
    await store.commit(session_id, 1, 3, ints(4), b"a")
    with pytest.raises(LengthMismatch, match=f"holds 4 tokens, and the commit was made for {base_length}"):
        await store.commit(session_id, 1, base_length, ints(*tokens), b"b")
    record = await store.load(session_id)
    assert record is not None
    assert (record.tokens.tolist(), record.progress) == ([1, 2, 3, 4], b"a")


async def test_g11_an_earlier_owner_is_fenced_off(store: SessionStore, session_id: str) -> None:
    await store.create(new(session_id))
    await store.commit(session_id, 1, 3, ints(4))
    taken = await store.take_over(session_id)
    assert (taken.epoch, taken.tokens.tolist()) == (2, [1, 2, 3, 4])
    with pytest.raises(StaleEpoch, match="epoch 2, the writer's is 1") as refused:
        await store.commit(session_id, 1, 4, ints(5))
    assert refused.value.reason == types_pb2.ERROR_REASON_STALE_EPOCH
    with pytest.raises(StaleEpoch):
        await store.commit(session_id, 1, 3, ints(4))
    with pytest.raises(StaleEpoch):
        await store.finish(session_id, 1, STOP)
    await store.commit(session_id, 2, 4, ints(6))
    assert await tokens_of(store, session_id) == [1, 2, 3, 4, 6]


async def test_an_epoch_that_the_store_never_gave_is_refused(store: SessionStore, session_id: str) -> None:
    await store.create(new(session_id, epoch=2**52))
    with pytest.raises(LengthMismatch, match="lost a take-over"):
        await store.commit(session_id, 2**52 + 1, 3, ints(4))
    with pytest.raises(StaleEpoch):
        await store.commit(session_id, 2**52 - 1, 3, ints(4))
    with pytest.raises(ValueError, match="epoch"):
        await store.commit(session_id, 2**53, 3, ints(4))
    await store.commit(session_id, 2**52, 3, ints(4))


async def test_the_last_commit_ends_the_session(store: SessionStore, session_id: str) -> None:
    await store.create(new(session_id))
    await store.commit(session_id, 1, 3, ints(4), b"end", finish_reason=LENGTH)
    record = await store.load(session_id)
    assert record is not None
    assert (record.state, record.finish_reason, record.progress) == ("finished", LENGTH, b"end")
    await store.commit(session_id, 1, 3, ints(4), b"end", finish_reason=LENGTH)
    with pytest.raises(SessionFinished, match="LENGTH"):
        await store.commit(session_id, 1, 4, ints(5))
    assert await tokens_of(store, session_id) == [1, 2, 3, 4]


async def test_committed_tokens_do_not_end_a_session_by_a_repeat(store: SessionStore, session_id: str) -> None:
    await store.create(new(session_id))
    await store.commit(session_id, 1, 3, ints(4))
    with pytest.raises(LengthMismatch):
        await store.commit(session_id, 1, 3, ints(4), finish_reason=STOP)


async def test_finish(store: SessionStore, session_id: str) -> None:
    await store.create(new(session_id))
    with pytest.raises(LengthMismatch, match="lost a take-over"):
        await store.finish(session_id, 2, STOP)
    await store.finish(session_id, 1, STOP)
    await store.finish(session_id, 1, STOP)
    with pytest.raises(SessionFinished, match="STOP"):
        await store.finish(session_id, 1, LENGTH)
    with pytest.raises(SessionFinished):
        await store.commit(session_id, 1, 3, ints(4))
    record = await store.load(session_id)
    assert record is not None
    assert (record.state, record.finish_reason) == ("finished", STOP)


async def test_a_cancelled_session_commits_no_more(store: SessionStore, session_id: str) -> None:
    await store.create(new(session_id))
    await store.commit(session_id, 1, 3, ints(4))
    assert await store.request_cancel(session_id) is True
    assert await store.request_cancel(session_id) is True
    await store.commit(session_id, 1, 3, ints(4))  # committed before, and still so
    with pytest.raises(SessionCancelled) as refused:
        await store.commit(session_id, 1, 4, ints(5))
    assert refused.value.reason == types_pb2.ERROR_REASON_SESSION_CANCELLED
    record = await store.load(session_id)
    assert record is not None
    assert (record.cancelled, record.tokens.tolist()) == (True, [1, 2, 3, 4])
    # Without an owner's help: there may be none any more.
    assert (record.state, record.finish_reason) == ("finished", orchestrator_pb2.FINISH_REASON_CANCELLED)
    await store.finish(session_id, 1, orchestrator_pb2.FINISH_REASON_CANCELLED)


async def test_callers_mistakes_are_value_errors(store: SessionStore, session_id: str) -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        await store.commit(session_id, 1, 3, ints())
    with pytest.raises(ValueError, match="epoch 0"):
        await store.create(new(session_id, epoch=0))


async def test_of_racing_owners_one_commits_each_place(store: SessionStore, session_id: str) -> None:
    """Two writers that believe to be the same owner: every place gets tokens of one of them, never of both."""
    await store.create(new(session_id))

    async def write(mark: int) -> int:
        committed = 0
        for base in range(3, 43):
            try:
                await store.commit(session_id, 1, base, ints(mark))
                committed += 1
            except LengthMismatch:
                continue
        return committed

    counts = await asyncio.gather(write(100), write(200))
    tokens = (await tokens_of(store, session_id))[3:]
    assert len(tokens) == sum(counts) == 40
    assert (tokens.count(100), tokens.count(200)) == tuple(counts)


rounds = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), max_size=8)


@given(rounds=rounds, repeats=st.lists(st.integers(1, 3), min_size=8, max_size=8))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_rounds_with_any_repeats(store: SessionStore, rounds: list[list[int]], repeats: list[int]) -> None:
    session_id = f"any-{time.monotonic_ns()}"
    await store.create(new(session_id, 7))
    expected = [7]
    for tokens, times in zip(rounds, repeats, strict=False):
        for _ in range(times):
            await store.commit(session_id, 1, len(expected), ints(*tokens))
        expected += tokens
    assert await tokens_of(store, session_id) == expected
