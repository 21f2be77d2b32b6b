"""The index of suffixes against its definition, and that taking tokens back leaves no trace."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.suffix import index as module
from draft_service.suffix.index import MAX_MATCH, ORDERS, SuffixIndex
from tests.harness.workers import int32

TEXTS = st.lists(st.integers(0, 2), max_size=120)


def indexed(*parts: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    for part in parts:
        index.extend(int32(part))
    return index


def last(tokens: list[int]) -> "array[int]":
    return array("i", tokens[-MAX_MATCH:])


def matched(tokens: list[int], place: int, suffix: list[int]) -> int:
    count = 0
    while count < min(len(suffix), place + 1) and tokens[place - count] == suffix[-1 - count]:
        count += 1
    return count


def defined(tokens: list[int], suffix: list[int], end: int) -> list[tuple[int, int]]:
    """All places of the longest order that is there, newest first."""
    places = [(matched(tokens, place, suffix), place) for place in reversed(range(min(end, len(tokens))))]
    for order in ORDERS:
        found = [(count, place) for count, place in places if count >= order]
        if found:
            return found
    return []


@given(TEXTS)
def test_finds_the_newest_places_of_the_longest_order(tokens: list[int]) -> None:
    found = indexed(tokens).find(last(tokens), len(tokens) - 1)
    assert found == defined(tokens, tokens[-MAX_MATCH:], len(tokens) - 1)[: len(found)]
    # Of three different tokens every slot of 256 holds at most a few n-grams: a walk sees all of the first places.
    assert len(found) == min(len(defined(tokens, tokens[-MAX_MATCH:], len(tokens) - 1)), 16) or len(tokens) > 60


@given(TEXTS, TEXTS)
def test_finds_in_another_text(tokens: list[int], suffix: list[int]) -> None:
    found = indexed(tokens).find(last(suffix), len(tokens))
    assert found == defined(tokens, suffix[-MAX_MATCH:], len(tokens))[: len(found)]


@given(st.lists(TEXTS, max_size=4))
def test_it_does_not_matter_in_which_pieces_tokens_come(parts: list[list[int]]) -> None:
    assert state(indexed(*parts)) == state(indexed([token for part in parts for token in part]))


@given(st.lists(st.integers(0, 9), max_size=300), st.data())
def test_what_was_taken_back_leaves_no_trace(tokens: list[int], data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, len(tokens)))
    index = indexed(tokens)
    index.cut(kept)
    fresh = indexed(tokens[:kept])
    assert index.tokens == fresh.tokens
    more = tokens[: data.draw(st.integers(0, 60))]
    index.extend(int32(more))
    fresh.extend(int32(more))
    text = tokens[:kept] + more
    assert index.find(last(text), len(text) - 1) == fresh.find(last(text), len(text) - 1)


def state(index: SuffixIndex) -> object:
    return index.tokens, [(table.heads, table.before) for table in index._tables]


def test_tokens_of_other_texts_are_no_part_of_a_match() -> None:
    index = indexed([1, 2, 3, -1, 4, 5, 6, 7])
    assert index.find(last([9, 3, 4, 5, 6]), len(index)) == [(3, 6)]


@pytest.mark.parametrize("period", [1, 2, 7])
def test_no_search_is_long(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text made to be costly: every place matches."""
    looked = 0

    class Counting(list):  # type: ignore[type-arg]
        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            nonlocal looked
            looked += 1
            return super().__getitem__(key)

    tokens = [place % period for place in range(20_000)]
    index = indexed(tokens)
    for table in index._tables:
        table.before = Counting(table.before)  # type: ignore[assignment]
    found = index.find(last(tokens), len(tokens) - 1)
    assert [count for count, _ in found] == [MAX_MATCH] * module._PLACES
    assert looked <= module._STEPS


def test_a_token_costs_forty_bytes_and_a_table_of_heads() -> None:
    index = indexed(np.random.default_rng(0).integers(0, 50_000, 4096).tolist())
    assert index.bytes == 4096 * (4 + 3 * (4 + 4 + 4))
