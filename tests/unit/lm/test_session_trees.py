"""Sessions that end in a tree: what the next message leaves of it, in the tokens and in the engine's state."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.lm.branches import grown
from outrider.lm.kv import PagedSequence, PagePool
from outrider.lm.session_cache import Session
from outrider.net.arrays import prefix_hash
from outrider.net.errors import OutriderError
from tests.harness.workers import int32, reason


@dataclass
class Memory:
    """The slots of a pool, each with the text that its entry was computed for."""

    pool: PagePool = field(default_factory=lambda: PagePool(40, 4))
    texts: dict[int, list[int]] = field(default_factory=dict)

    def sequence(self) -> PagedSequence:
        return PagedSequence(self.pool, self.move)

    def move(self, sources, targets):
        read = [self.texts[slot] for slot in sources]
        self.texts.update(zip(targets, read, strict=True))

    def compute(self, session: Session, until: int) -> None:
        """What a pass does."""
        sequence, start = session.sequence, session.cached
        parents = session.parents(start, until)
        sequence.reserve(until - start)
        branches = sequence.branches
        if parents is not None or branches is not None:
            branches = grown(branches, start, np.arange(start, until) - 1 if parents is None else parents)
        for place in range(start, until):
            self.texts[self.slot(sequence, place)] = session.text(place).tolist()
        sequence.append(session.tokens[start:until], branches)

    def slot(self, sequence: PagedSequence, place: int) -> int:
        return sequence.pages[place // 4] * 4 + place % 4

    def holds(self, session: Session) -> bool:
        """Whether every entry is that of the session's own text."""
        return all(
            self.texts[self.slot(session.sequence, place)] == session.tokens[: place + 1].tolist()
            for place in range(session.cached)
        )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_path_of_the_tree_is_kept_without_being_computed_again(data):
    memory, session = Memory(), Session("s")
    session.sequence = memory.sequence()
    prefix = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=11))
    session.extend(int32(prefix))
    memory.compute(session, data.draw(st.integers(0, len(prefix))))
    base, count = len(prefix), data.draw(st.integers(1, 12))
    parents = sorted(data.draw(st.integers(0, token)) for token in range(count))
    tokens = [data.draw(st.integers(0, 3)) for _ in range(count)]
    session.extend(int32(tokens), base - 1 + np.array(parents))
    texts = [session.text(place).tolist() for place in range(base, base + count)]
    computed = data.draw(st.integers(session.cached, base + count))
    while session.cached < computed:
        memory.compute(session, data.draw(st.integers(session.cached + 1, computed)))

    committed = data.draw(st.sampled_from(texts))[: data.draw(st.integers(base, base + 3))]
    committed = committed + data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=2))
    known = data.draw(st.integers(0, base - 1))
    held = [
        place
        for place in range(base, base + count)
        if place < computed and texts[place - base] == committed[: len(texts[place - base])]
    ]
    session.rebase(len(committed), int32(committed[known:]), prefix_hash(int32(committed[:known])))
    assert session.tokens.tolist() == committed
    assert session.branches is None
    assert session.sequence.branches is None
    assert memory.holds(session)
    depth = max((len(texts[place - base]) for place in held), default=min(computed, base))
    # Candidates that say the same twice are found by the first of them.
    twice = len({tuple(it) for it in texts}) < len(texts)
    assert session.cached == min(depth, len(committed) - 1) or twice
    session.sequence.free()
    assert memory.pool.used == 0


def tree_session() -> Session:
    session = Session("s")
    session.sequence = Memory().sequence()
    session.extend(int32([1, 2, 3]))
    session.extend(int32([4, 5, 6]), np.array([2, 2, 4]))
    return session


def test_a_message_that_builds_on_tokens_of_a_tree_cannot_be_placed():
    session = tree_session()
    with pytest.raises(OutriderError) as missing:
        session.rebase(6, int32([6]), prefix_hash(int32([1, 2, 3, 5])))
    assert missing.value.reason == reason("SESSION_NOT_FOUND")
    assert not session.holds(4, int32([5]), prefix_hash(int32([1, 2, 3])))
    session.rebase(6, int32([5, 6, 7]), prefix_hash(int32([1, 2, 3])))
    assert session.tokens.tolist() == [1, 2, 3, 5, 6, 7]


def test_texts_and_parents():
    session = tree_session()
    assert [session.text(place).tolist() for place in (1, 3, 4, 5)] == [
        [1, 2],
        [1, 2, 3, 4],
        [1, 2, 3, 5],
        [1, 2, 3, 5, 6],
    ]
    assert session.parents(0, 3) is None
    assert session.parents(2, 6).tolist() == [1, 2, 2, 4]
    session.cut(4)
    assert session.branches is None
    assert session.tokens.tolist() == [1, 2, 3, 4]
