"""EAGLE's rows through paged, ragged passes: what the formulas say, token by token, of every text in them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.lm.eagle import EagleEngine, window_of
from outrider.lm.eagle_sequence import EagleSequence
from outrider.lm.engine import OutOfPages, Segment
from outrider.lm.features import FeatureWindow
from tests.harness.eagle import KINDS, Played, assert_says, eagle_engine
from tests.harness.engines_lm import text
from tests.harness.models import VOCAB
from tests.harness.workers import int32

every_kind = pytest.mark.parametrize("kind", KINDS)


def step(played: Sequence[Played], new: Sequence[Sequence[int]]) -> None:
    """Drafts tokens for each, all in one pass, and holds the rows against the formulas."""
    segments = [it.segment(tokens) for it, tokens in zip(played, new, strict=True)]
    for it, tokens, rows in zip(played, new, played[0].engine.forward(segments), strict=True):
        it.text += list(tokens)
        assert_says(rows, it.expected(len(tokens)))


@every_kind
def test_a_prompt_and_what_is_drafted_after_it(kind: str) -> None:
    """Each drafted entry is made of the output before it."""
    played = Played(eagle_engine(kind), kind, text(11, 1), known=11)
    played.prefill()
    for token in (3, 60, 3, 17, 0, 44):
        step([played], [[token]])


@every_kind
def test_many_sessions_in_one_pass(kind: str) -> None:
    """Prompts beside drafts, of texts whose features begin late, end early, or are all there."""
    engine = eagle_engine(kind)
    played = [
        Played(engine, kind, text(length, length), known=length, since=since)
        for length, since in ((2, 0), (5, 0), (9, 3), (30, 13), (30, 28), (64, 0))
    ]
    for it in played[:4]:
        it.prefill()
    segments = [it.segment([7]) for it in played[:4]] + [it.first() for it in played[4:]]
    rows = engine.forward(segments)
    for it, said in zip(played, rows, strict=True):
        it.text += [7] if it in played[:4] else []
        assert_says(said, it.expected(len(said)))
    for tokens in ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]):
        step(played, [[token] for token in tokens])


@every_kind
def test_what_was_drafted_is_computed_again_with_the_targets_states(kind: str) -> None:
    played = Played(eagle_engine(kind), kind, text(10, 2), known=10)
    played.prefill()
    for token in (9, 8, 7, 6):
        step([played], [[token]])
    # The first two are accepted, then another: states of them come, and the entries are made anew.
    played.commit(12, [33])
    assert played.sequence.length == 10
    (rows,) = played.engine.forward([played.first()])
    assert_says(rows, played.expected(3))
    step([played], [[4]])
    # Nothing is accepted.
    played.commit(13, [20])
    (rows,) = played.engine.forward([played.first()])
    assert_says(rows, played.expected(1))


@every_kind
def test_trees(kind: str) -> None:
    """Each candidate follows its own parent's output; beside a chain in the same passes."""
    engine = eagle_engine(kind)
    played = [Played(engine, kind, text(length, 3), known=length, since=since) for length, since in ((13, 0), (22, 9))]
    chain = Played(engine, kind, text(6, 4), known=6)
    for it in (*played, chain):
        it.prefill()
    for tokens, parents in (([5, 6, 7], [-1, -1, -1]), ([8, 9, 10], [0, 0, 2]), ([11, 12], [3, 5])):
        segments = [it.branching(tokens, parents) for it in played]
        rows = engine.forward([*segments, chain.segment(tokens[:1])])
        chain.text.append(tokens[0])
        assert_says(rows.pop(), chain.expected(1))
        for it, said in zip(played, rows, strict=True):
            it.grow(tokens, parents)
            assert_says(said, it.expected_of_tree(len(tokens)))
    # Token 8 after 5 is accepted: the tree goes, and what was accepted is computed again.
    for it, known in zip(played, (13, 22), strict=True):
        sequence = it.sequence
        sequence.keep([known, known + 3])
        assert sequence.length == known
        it.text = [*it.text[:known], 5, 8]
        it.commit(known + 2, [1])
    for it, said in zip(played, engine.forward([it.first() for it in played]), strict=True):
        assert_says(said, it.expected(3))


@every_kind
def test_after_a_lost_state_the_window_alone_is_there_and_drafts_are_made_one_after_the_other(kind: str) -> None:
    engine = eagle_engine(kind)
    played = Played(engine, kind, text(20, 5), known=20)
    played.prefill()
    step([played], [[1]])
    step([played], [[2]])
    other = Played(engine, kind, text(7, 6), known=7)
    other.prefill()
    played.lose(since=8)
    assert engine.pages()[0] == 2
    # Whole text and both drafts in one segment, beside one of another session.
    segments = [played.first(), other.segment([3])]
    rows = engine.forward(segments)
    assert_says(rows[0], played.expected(22 - 9))
    other.text.append(3)
    assert_says(rows[1], other.expected(1))
    assert (played.sequence.begin, played.sequence.length) == (9, 22)
    step([played, other], [[4], [5]])


@every_kind
def test_a_lost_tree_is_computed_again_level_by_level(kind: str) -> None:
    played = Played(eagle_engine(kind), kind, text(12, 7), known=12)
    tokens, parents = [5, 6, 7, 8, 9, 10], [-1, -1, 0, 1, 1, 3]
    played.lose(since=2)
    tree = played.branching(tokens, parents)
    prompt = played.first()
    whole = np.concatenate([prompt.tokens, tree.tokens])
    assert tree.parents is not None
    following = np.concatenate([np.arange(12) - 1, tree.parents])
    (rows,) = played.engine.forward([Segment(played.sequence, whole, 6, following, fed=played.fed())])
    played.grow(tokens, parents)
    assert_says(rows, played.expected_of_tree(6))


def test_a_long_text_comes_in_pieces_and_what_has_no_state_before_it_costs_no_page() -> None:
    engine = eagle_engine("3")
    played = Played(engine, "3", text(70, 8), known=70, since=50)
    for start in range(0, 70, 20):
        stop = min(70, start + 20)
        (rows,) = engine.forward(
            [Segment(played.sequence, int32(played.text[start:stop]), int(stop == 70), fed=played.fed())]
        )
    assert_says(rows, played.expected(1))
    assert played.sequence.begin == 51
    assert engine.pages()[0] == -(-19 // 4)
    played.sequence.free()
    assert engine.pages()[0] == 0


def test_two_windows_of_one_text_share_nothing() -> None:
    engine = eagle_engine("3")
    # A text of one token: were pages found by their tokens, these would be.
    played = []
    for since in (0, 0, 4):
        it = Played(engine, "3", int32([5] * 16), known=16, since=since)
        assert it.sequence.length == 0
        played.append(it)
        (rows,) = engine.forward([it.first()])
        assert_says(rows, it.expected(len(rows)))
    assert engine.shared_pages() == 0
    assert engine.pages()[0] == 4 + 4 + 3


def window(start: int, count: int, width: int = 96) -> FeatureWindow:
    made = FeatureWindow(64)
    made.take(start, torch.zeros(count, width, dtype=torch.bfloat16))
    return made


def test_what_cannot_be_computed_is_refused_before_anything_changed() -> None:
    engine = eagle_engine("3", pages=5)
    sequence = engine.open(int32([1]))

    def refuse(
        message: str, tokens: Sequence[int], rows: int, fed: FeatureWindow | None, kind: type = ValueError
    ) -> None:
        before = sequence.length, engine.pages()
        with pytest.raises(kind, match=message):
            engine.forward([Segment(sequence, int32(tokens), rows, fed=fed)])
        assert (sequence.length, engine.pages()) == before

    refuse("is not fed", [1, 2, 3], 1, None)
    refuse("is not fed", [1, 2, 3], 2, window(1, 1))
    engine.forward([Segment(sequence, int32([1, 2, 3]), 1, fed=window(1, 1))])
    refuse("features begin at 4, entries end before 3", [1, 2, 3], 1, window(4, 1))
    refuse("rows wanted", [1], 2, window(1, 2))
    refuse("outside the vocabulary", [VOCAB], 1, window(1, 2))
    beside = engine.open(int32([1]))
    engine.forward([Segment(beside, int32([1] * 10), 1, fed=window(0, 9))])
    refuse("KV pages wanted", [1] * 9, 1, window(1, 20), OutOfPages)
    beside.free()
    refuse("exceed the context of 20", [1] * 18, 1, window(1, 2))
    with pytest.raises(ValueError, match="twice"):
        engine.forward([Segment(sequence, int32([1]), 1, fed=window(1, 2))] * 2)
    with pytest.raises(ValueError, match="cannot truncate"):
        sequence.truncate(4)
    with pytest.raises(ValueError, match="no tree"):
        sequence.keep([3])
    sequence.free()
    refuse("was freed", [1], 0, None)


def test_a_pass_that_fails_leaves_the_sequences_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second of the passes that drafts in one segment take."""
    engine = eagle_engine("1")
    played = Played(engine, "1", text(9, 1), known=9, since=2)
    played.prefill()
    fresh = Played(engine, "1", text(9, 2), known=9, since=2)
    fresh.text += [1, 2]
    passes, whole = [], engine._pass

    def fail(parts: object) -> object:
        passes.append(parts)
        if len(passes) == 2:
            raise RuntimeError("out of memory")
        return whole(parts)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "_pass", fail)
    before = engine.pages()
    with pytest.raises(RuntimeError):
        engine.forward([fresh.first(), played.segment([5])])
    assert (fresh.sequence.length, played.sequence.length, engine.pages()) == (0, 9, before)
    step([played], [[5]])
    (rows,) = engine.forward([fresh.first()])
    assert_says(rows, fresh.expected(len(rows)))


def test_truncated_before_its_first_entry_a_sequence_begins_anew(tmp_path: Path) -> None:
    played = Played(eagle_engine("3"), "3", text(20, 3), known=20, since=10)
    played.prefill()
    assert isinstance(played.sequence, EagleSequence)
    played.sequence.truncate(6)
    assert (played.sequence.length, played.sequence.begin) == (6, 6)
    played.since = 3
    (rows,) = played.engine.forward([Segment(played.sequence, int32(played.text[6:]), 1, fed=played.fed())])
    played.first_entry = 6
    assert_says(rows, played.expected(1))


def test_the_window_fits_into_its_bytes() -> None:
    """With the longest block, what a target is asked for stays within the wire's limit."""
    assert [window_of(width) for width in (2048, 3 * 4096, 3 * 16384)] == [32, 32, 21]
    assert window_of(10**7) == 1


def test_engines_say_what_they_want() -> None:
    for kind, layers in (("1", (3,)), ("3", (2, 1, 0))):
        engine: EagleEngine = eagle_engine(kind)
        feeding = engine.info.feeding
        assert feeding is not None
        assert (feeding.layers, feeding.hidden_size, feeding.window, feeding.longest) == (layers, 32, 32, 0)
        assert (engine.info.hidden_size, engine.info.layers) == (0, 0)
