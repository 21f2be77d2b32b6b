"""Sessions: what a message that names a base length keeps, forgets and refuses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.law.sparse import Int32Array
from outrider.lm.epoch_fence import EpochFence
from outrider.lm.session_cache import Session, SessionCache
from outrider.lm.token_sequence import TokenSequence
from outrider.net.arrays import prefix_hash
from outrider.net.errors import OutriderError
from tests.harness.workers import int32, reason


def session(tokens: list[int], cached: int | None = None) -> Session[str]:
    made: Session[str] = Session("s")
    made.extend(int32(tokens))
    made.sequence = TokenSequence()
    made.sequence.append(int32(tokens[:cached]))
    return made


def rebase(one: Session[str], tokens: list[int], new: int, hash_of: list[int] | None = None) -> None:
    before = tokens[: len(tokens) - new] if hash_of is None else hash_of
    one.rebase(len(tokens), int32(tokens[len(tokens) - new :]), prefix_hash(int32(before)))


@pytest.mark.parametrize(
    ("known", "tokens", "new", "cached"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], 1, 5),
        ([1, 2, 3, 4, 5], [1, 2, 3, 9], 1, 3),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9], 2, 4),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 5, 4),
        ([1, 2, 3, 4, 5], [1, 2, 3], 3, 2),
        ([1, 2, 3, 4, 5], [7, 8], 2, 0),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], 7, 5),
        ([], [4], 1, 0),
    ],
)
def test_rebase_keeps_what_is_equal_and_leaves_the_last_token_to_compute(
    known: list[int], tokens: list[int], new: int, cached: int
) -> None:
    one = session(known)
    rebase(one, tokens, new)
    assert one.tokens.tolist() == tokens
    assert one.cached == cached


def test_a_prompt_in_the_making_keeps_its_part() -> None:
    one = session([1, 2, 3, 4, 5, 6], cached=2)
    rebase(one, [1, 2, 3, 4, 5, 6], 6)
    assert one.cached == 2


def test_missing_tokens_and_other_tokens_are_told_apart() -> None:
    one = session([1, 2, 3])
    with pytest.raises(OutriderError) as missing:
        rebase(one, [1, 2, 3, 4, 5], 1)
    assert missing.value.reason == reason("SESSION_NOT_FOUND")
    with pytest.raises(OutriderError) as other:
        rebase(one, [1, 2, 3, 4], 1, hash_of=[1, 2, 4])
    assert other.value.reason == reason("PREFIX_MISMATCH")
    assert (one.tokens.tolist(), one.cached) == ([1, 2, 3], 3)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_history_of_messages_ends_with_the_tokens_of_the_last(data: st.DataObject) -> None:
    token = st.integers(0, 2)
    one: Session[str] = Session("s")
    one.sequence = TokenSequence()
    for _ in range(data.draw(st.integers(1, 6))):
        held = one.tokens.tolist()
        start = data.draw(st.integers(0, len(held)))
        tail = data.draw(st.lists(token, min_size=1, max_size=5))
        one.rebase(start + len(tail), int32(tail), prefix_hash(int32(held[:start])))
        expected = held[:start] + tail
        assert one.tokens.tolist() == expected
        assert one.cached < len(expected)
        assert one.sequence.tokens.tolist() == expected[: one.cached]
        one.extend(int32(data.draw(st.lists(token, max_size=4))))
        computed = data.draw(st.integers(one.cached, one.length))
        one.sequence.append(one.tokens[one.cached : computed])


def cache(
    ttl: float = 60.0, busy: Int32Array | tuple[str, ...] = (), limit: int = 100
) -> tuple[SessionCache[str], list[str]]:
    gone: list[str] = []
    return SessionCache(ttl, lambda key: key in busy, gone.append, max_sessions=limit), gone


def test_the_least_recently_used_idle_session_goes_first() -> None:
    sessions, gone = cache(busy=("a",))
    for key in "abc":
        sessions.open(key)
    sessions.find("b")
    assert [sessions.evict_idle() for _ in range(3)] == [True, True, False]
    assert gone == ["c", "b"]
    assert len(sessions) == 1


def test_the_number_of_sessions_is_bounded() -> None:
    sessions, gone = cache(limit=2)
    for key in "abc":
        sessions.open(key)
    assert gone == ["a"]


def test_sweep_frees_the_old_and_not_the_busy() -> None:
    sessions, gone = cache(ttl=10.0, busy=("busy",))
    for key in ("busy", "old", "new"):
        sessions.open(key)
    for key in ("busy", "old"):
        found = next(one for one in sessions if one.key == key)
        found.used_at -= 11.0
    sessions.sweep()
    assert gone == ["old"]


def test_dropping_frees_the_state() -> None:
    sessions, gone = cache()
    one = sessions.open("a")
    state = one.sequence = TokenSequence()
    state.append(np.ones(3, np.int32))
    sessions.drop(one)
    sessions.drop(one)
    assert state.length == 0
    assert sessions.find("a") is None
    assert gone == []


def test_fences_only_rise_and_are_bounded() -> None:
    fence: EpochFence[str] = EpochFence(max_fences=2)
    fence.raise_to("a", 3)
    fence.raise_to("a", 3)
    with pytest.raises(OutriderError) as stale:
        fence.raise_to("a", 2)
    assert stale.value.reason == reason("STALE_EPOCH")
    fence.raise_to("b", 1)
    fence.raise_to("c", 1)
    fence.raise_to("a", 0)
    fence.forget("a")
    fence.raise_to("c", 1)
