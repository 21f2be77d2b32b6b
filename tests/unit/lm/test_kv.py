"""Page bookkeeping: allocation, sharing, truncation, eviction; then a state machine against a model of it."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from outrider.law.sparse import Int32Array
from outrider.lm.engine import OutOfPages
from outrider.lm.kv import PagedSequence, PagePool

SIZE = 4


def ids(*tokens: int) -> Int32Array:
    return np.array(tokens, dtype=np.int32)


def fill(sequence: PagedSequence, tokens: Int32Array) -> tuple[int, int] | None:
    copy = sequence.reserve(len(tokens))
    sequence.append(tokens)
    return copy


def test_append_takes_pages_only_when_the_last_is_full() -> None:
    pool = PagePool(4, SIZE)
    sequence = PagedSequence(pool)
    for length in range(1, 10):
        fill(sequence, ids(length))
        assert (sequence.length, len(sequence.pages), pool.used) == (length, -(-length // SIZE), -(-length // SIZE))


def test_truncate_frees_tail_pages_at_every_length() -> None:
    for length in range(14):
        pool = PagePool(4, SIZE)
        sequence = PagedSequence(pool)
        fill(sequence, np.arange(13, dtype=np.int32))
        sequence.truncate(length)
        assert (sequence.length, pool.used) == (length, -(-length // SIZE))


@pytest.mark.parametrize("length", [-1, 6])
def test_truncate_beyond_the_sequence_is_refused(length: int) -> None:
    sequence = PagedSequence(PagePool(4, SIZE))
    fill(sequence, np.arange(5, dtype=np.int32))
    with pytest.raises(ValueError, match=f"5 tokens to {length}"):
        sequence.truncate(length)


def test_out_of_pages_changes_nothing() -> None:
    pool = PagePool(2, SIZE)
    sequence = PagedSequence(pool)
    fill(sequence, ids(1, 2, 3))
    with pytest.raises(OutOfPages, match="2 KV pages wanted, 1 of 2 available"):
        sequence.reserve(6)
    assert (sequence.length, len(sequence.pages), pool.used) == (3, 1, 1)
    fill(sequence, ids(4, 5, 6, 7, 8))


def test_cancel_gives_back_what_was_reserved() -> None:
    pool = PagePool(3, SIZE)
    sequence = PagedSequence(pool)
    fill(sequence, ids(1, 2, 3))
    sequence.reserve(9)
    sequence.cancel()
    assert (sequence.length, len(sequence.pages), pool.available) == (3, 1, 2)


@pytest.mark.parametrize(("wanted", "shared"), [(12, 8), (13, 12), (9, 8), (8, 4), (4, 0), (1, 0)])
def test_a_prefix_is_shared_in_whole_pages_and_never_whole(wanted: int, shared: int) -> None:
    pool = PagePool(8, SIZE)
    tokens = np.arange(13, dtype=np.int32)
    first = PagedSequence(pool)
    fill(first, tokens)
    second = PagedSequence.with_prefix(pool, tokens[:wanted])
    assert second.length == shared
    assert second.pages == first.pages[: shared // SIZE]


def test_equal_pages_after_different_prefixes_are_not_shared() -> None:
    pool = PagePool(8, SIZE)
    fill(PagedSequence(pool), ids(1, 1, 1, 1, 5, 6, 7, 8))
    assert PagedSequence.with_prefix(pool, ids(2, 2, 2, 2, 5, 6, 7, 8, 9)).length == 0
    assert PagedSequence.with_prefix(pool, ids(5, 6, 7, 8, 9)).length == 0


def test_a_freed_prefix_is_found_until_its_pages_are_needed() -> None:
    pool = PagePool(3, SIZE)
    tokens = np.arange(9, dtype=np.int32)
    first = PagedSequence(pool)
    fill(first, tokens)
    first.free()
    assert pool.used == 0
    again = PagedSequence.with_prefix(pool, tokens)
    assert again.length == 8
    again.free()
    fill(PagedSequence(pool), ids(70, 71, 72, 73, 74))  # one free page and one evicted
    assert PagedSequence.with_prefix(pool, tokens).length == 4, "the end of a freed sequence goes first"


def test_writing_after_a_truncation_hides_the_page_that_changed() -> None:
    pool = PagePool(4, SIZE)
    sequence = PagedSequence(pool)
    fill(sequence, ids(1, 2, 3, 4))
    sequence.truncate(2)
    assert fill(sequence, ids(8, 9)) is None
    assert PagedSequence.with_prefix(pool, ids(1, 2, 3, 4, 5)).length == 0
    assert PagedSequence.with_prefix(pool, ids(1, 2, 8, 9, 5)).length == 4


def test_writing_after_a_truncation_copies_a_page_that_another_reads() -> None:
    pool = PagePool(4, SIZE)
    first = PagedSequence(pool)
    fill(first, ids(1, 2, 3, 4))
    second = PagedSequence.with_prefix(pool, ids(1, 2, 3, 4, 5))
    first.truncate(2)
    assert first.missing(1) == 1
    copy = fill(first, ids(8, 9))
    assert copy == (second.pages[0], first.pages[0])
    assert first.pages != second.pages
    assert PagedSequence.with_prefix(pool, ids(1, 2, 3, 4, 5)).pages == second.pages
    assert PagedSequence.with_prefix(pool, ids(1, 2, 8, 9, 5)).pages == first.pages


def test_a_fork_shares_until_one_of_them_writes() -> None:
    pool = PagePool(6, SIZE)
    first = PagedSequence(pool)
    fill(first, ids(1, 2, 3, 4, 5))
    second = first.fork()
    assert (pool.used, second.length) == (2, 5)
    assert fill(first, ids(6)) == (second.pages[1], first.pages[1])
    assert fill(second, ids(7)) is None
    first.free()
    second.free()
    assert pool.used == 0


def test_a_withdrawn_sequence_is_not_found() -> None:
    pool = PagePool(4, SIZE)
    sequence = PagedSequence(pool)
    fill(sequence, np.arange(9, dtype=np.int32))
    sequence.withdraw()
    assert PagedSequence.with_prefix(pool, np.arange(9, dtype=np.int32)).length == 0
    sequence.free()
    assert pool.available == 4


def test_free_is_idempotent_and_final() -> None:
    pool = PagePool(4, SIZE)
    sequence = PagedSequence(pool)
    fill(sequence, ids(1, 2, 3))
    sequence.free()
    sequence.free()
    assert (pool.used, sequence.length) == (0, 0)
    with pytest.raises(ValueError, match="freed"):
        sequence.reserve(1)


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a small pool. What each page holds is written down as an engine would write keys and values;
    every sequence must always read its own tokens back, through whatever sharing, eviction and copying."""

    sequences = Bundle("sequences")
    texts = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(lambda it: np.array(it, np.int32))

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, SIZE)
        self.memory: dict[int, int] = {}  # slot -> what was written: the token and all before it
        self.alive: dict[int, tuple[PagedSequence, list[int]]] = {}

    @rule(target=sequences, tokens=texts)
    def open(self, tokens: Int32Array) -> PagedSequence:
        sequence = PagedSequence.with_prefix(self.pool, tokens)
        assert sequence.length < len(tokens)
        self.alive[id(sequence)] = sequence, tokens[: sequence.length].tolist()
        return sequence

    @rule(sequence=sequences, tokens=texts)
    def append(self, sequence: PagedSequence, tokens: Int32Array) -> None:
        before = self.pool.available
        try:
            copy = sequence.reserve(len(tokens))
        except OutOfPages:
            assert self.pool.available == before < sequence.missing(len(tokens))
            return
        if copy is not None:
            for offset in range(SIZE):
                self.memory[copy[1] * SIZE + offset] = self.memory.get(copy[0] * SIZE + offset, 0)
        text = self.alive[id(sequence)][1]
        for token in tokens.tolist():
            text.append(token)
            self.memory[self.slot(sequence, len(text) - 1)] = hash(tuple(text))
        sequence.append(tokens)

    @rule(sequence=sequences, tokens=texts)
    def fail_to_append(self, sequence: PagedSequence, tokens: Int32Array) -> None:
        if sequence.missing(len(tokens)) <= self.pool.available:
            copy = sequence.reserve(len(tokens))
            if copy is not None:
                for offset in range(SIZE):
                    self.memory[copy[1] * SIZE + offset] = self.memory.get(copy[0] * SIZE + offset, 0)
            sequence.cancel()

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: PagedSequence, share: float) -> None:
        length = int(share * sequence.length)
        sequence.truncate(length)
        del self.alive[id(sequence)][1][length:]

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: PagedSequence) -> PagedSequence:
        twin = sequence.fork()
        self.alive[id(twin)] = twin, self.alive[id(sequence)][1][:]
        return twin

    @rule(sequence=consumes(sequences))
    def free(self, sequence: PagedSequence) -> None:
        sequence.free()
        del self.alive[id(sequence)]

    @rule(sequence=sequences)
    def withdraw(self, sequence: PagedSequence) -> None:
        sequence.withdraw()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence, text in self.alive.values():
            assert sequence.length == len(text)
            for position in range(len(text)):
                assert self.memory[self.slot(sequence, position)] == hash(tuple(text[: position + 1]))

    @invariant()
    def pages_are_held_exactly_by_who_lists_them(self) -> None:
        held = {page for sequence, _ in self.alive.values() for page in sequence.pages}
        assert self.pool.used == len(held)

    @precondition(lambda self: self.alive)
    @rule()
    def free_all(self) -> None:
        for sequence, text in self.alive.values():
            sequence.truncate(0)
            text.clear()
        assert (self.pool.used, self.pool.available) == (0, self.pool.total)

    @staticmethod
    def slot(sequence: PagedSequence, position: int) -> int:
        return sequence.pages[position // SIZE] * SIZE + position % SIZE


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
