"""Trees in the paged, ragged path: every path of every tree is what the model itself says of it, in float32."""

import numpy as np
import pytest
import torch

from outrider.lm.branches import grown
from outrider.lm.engine import Segment
from outrider.lm.kv import PagedSequence, PagePool
from tests.harness.engines_lm import assert_same, feed, own_logits, own_model, text, tiny_engine
from tests.harness.models import WINDOW

# Fused, generic, with windows, capped scores and sinks, with learned positions.
KINDS = ["llama", "qwen3", "mistral_window", "gemma2_softcap", "gpt_oss_sinks", "gpt2", "gpt_neox"]


def random_parents(rng, start, count):
    """Places: row 0 is what stands before the tree."""
    rows = np.sort([rng.integers(0, token + 1) if rng.random() < 0.7 else token for token in range(count)])
    return start - 1 + rows


def texts_of(prefix, start, tokens, parents):
    """The text that ends in each entry of the tree."""
    texts = []
    for token, parent in zip(tokens, parents, strict=True):
        before = prefix if parent < start else texts[parent - start]
        texts.append(np.append(before, token))
    return texts


def expect(model, prefix, start, tokens, parents):
    return torch.stack([own_logits(model, it)[-1] for it in texts_of(prefix, start, tokens, parents)])


def path_of(parents, start, place):
    path = []
    while place >= start:
        path.append(place)
        place = int(parents[place - start])
    return path[::-1]


@pytest.mark.parametrize("architecture", KINDS)
def test_many_sessions_with_trees_of_their_own_in_one_pass(architecture):
    """Beside chains and prompts; then each keeps a path, and goes on from it without computing it again."""
    rng = np.random.default_rng(3)
    engine, model = tiny_engine(architecture), own_model(architecture)
    prefixes = [text(length, seed) for seed, length in enumerate((1, 3, 7, 8, 2 * WINDOW + 3, 23))]
    sequences = [engine.open(it[:1]) for it in prefixes]
    engine.forward([Segment(it, words[:-1], 0) for it, words in zip(sequences[1:], prefixes[1:], strict=True)])
    trees, segments = [], []
    for seed, (sequence, prefix) in enumerate(zip(sequences, prefixes, strict=True)):
        count = (0, 5, 12, 1, 9, 20)[seed]
        tokens, parents = text(count, 50 + seed), random_parents(rng, len(prefix), count)
        trees.append((tokens, parents))
        new = np.append(prefix[sequence.length :], tokens)
        chain = np.arange(sequence.length, len(prefix)) - 1
        segments.append(Segment(sequence, new.astype(np.int32), count + 1, np.append(chain, parents)))
    joining = text(19, 99)
    segments.append(Segment(engine.open(joining), joining, 19))
    rows = engine.forward(segments)
    assert_same(rows.pop(), own_logits(model, joining))
    more = []
    for (tokens, parents), prefix, sequence, logits in zip(trees, prefixes, sequences, rows, strict=True):
        assert_same(logits[0], own_logits(model, prefix)[-1])
        start = len(prefix)
        if len(tokens):
            assert_same(logits[1:], expect(model, prefix, start, tokens, parents))
        if sequence.branches is not None:
            # The path that ends deepest in the tree, with a leap in it wherever there is one.
            path = path_of(parents, start, start + len(tokens) - 1)
            sequence.keep([place for place in path if place >= sequence.branches.trunk])
            kept = tokens[np.array(path) - start]
        else:
            kept = tokens
        assert sequence.length == start + len(kept)
        more.append(np.concatenate([prefix, kept, text(3, len(prefix))]).astype(np.int32))
    again = engine.forward([Segment(it, words[-3:], 3) for it, words in zip(sequences, more, strict=True)])
    for words, logits in zip(more, again, strict=True):
        assert_same(logits, own_logits(model, words)[-3:])


@pytest.mark.parametrize("architecture", ["llama", "mistral_window", "gpt2"])
def test_a_tree_that_grows_from_pass_to_pass(architecture):
    """As a draft's does; cut back in between, and with pages that end within it."""
    engine, model = tiny_engine(architecture), own_model(architecture)
    prefix, tokens = text(14, 1), text(24, 2)
    parents = random_parents(np.random.default_rng(5), 14, 24)
    sequence = engine.open(prefix[:1])
    feed(engine, sequence, prefix)
    expected, done = expect(model, prefix, 14, tokens, parents), 0
    for until in (1, 2, 5, 11, 12, 20, 24):
        part = slice(done, until)
        (rows,) = engine.forward([Segment(sequence, tokens[part], until - done, parents[part])])
        assert_same(rows, expected[part])
        if until in (5, 20):
            sequence.truncate(14 + until - 2)
            part = slice(until - 2, until)
            assert_same(engine.forward([Segment(sequence, tokens[part], 2, parents[part])])[0], expected[part])
        done = until
    sequence.truncate(14)
    other = text(5, 8)
    assert_same(feed(engine, sequence, other), own_logits(model, np.append(prefix, other))[14:])


def test_long_prompts_that_end_in_a_tree_are_computed_in_pieces():
    engine, model = tiny_engine("llama", max_position_embeddings=700), own_model("llama", max_position_embeddings=700)
    prefix, tokens = text(505, 4), text(30, 5)
    parents = random_parents(np.random.default_rng(6), 505, 30)
    sequence = engine.open(prefix[:1])
    segment = Segment(sequence, np.append(prefix, tokens), 31, np.append(np.arange(505) - 1, parents))
    assert_same(engine.forward([segment])[0][1:], expect(model, prefix, 505, tokens, parents))


def test_pages_of_a_tree_are_shared_by_nobody_until_a_path_of_it_is_kept():
    engine, model = tiny_engine("llama"), own_model("llama")
    prefix, tokens = text(8, 1), text(12, 2)
    # Two branches of six, entry by entry in turn.
    parents = np.array([7, 7, *range(8, 18)])
    sequence = engine.open(prefix[:1])
    engine.forward([Segment(sequence, np.append(prefix, tokens), 0, np.append(np.arange(8) - 1, parents))])
    linear = np.append(prefix, tokens)
    assert engine.open(np.append(linear, 1)).length == 8, "what lies one after the other is no text"
    path = list(range(9, 20, 2))
    sequence.keep(path)
    said = np.append(prefix, tokens[np.array(path) - 8]).astype(np.int32)
    twin = engine.open(np.append(said, text(1, 3)))
    assert twin.length == 12
    assert_same(
        feed(engine, twin, np.append(said[12:], 3).astype(np.int32)), own_logits(model, np.append(said, 3))[12:]
    )


def test_a_fork_in_a_tree_goes_its_own_way():
    engine, model = tiny_engine("llama"), own_model("llama")
    prefix, tokens, parents = text(6, 1), text(4, 2), np.array([5, 5, 6, 7])
    first = engine.open(prefix[:1])
    feed(engine, first, prefix)
    engine.forward([Segment(first, tokens, 0, parents)])
    second = first.fork()
    first.keep([7, 9])
    second.keep([6, 8])
    for sequence, kept in ((first, [1, 3]), (second, [0, 2])):
        said = np.concatenate([prefix, tokens[kept], text(4, 9)]).astype(np.int32)
        held = sequence.length
        assert held >= 6
        assert_same(feed(engine, sequence, said[held:]), own_logits(model, said)[held:])


def test_positions_count_for_the_context_and_not_places():
    engine = tiny_engine("llama")
    limit = engine.info.context_length
    sequence = engine.open(text(1, 1))
    feed(engine, sequence, text(limit - 1, 1))
    engine.forward([Segment(sequence, text(9, 2), 9, np.full(9, limit - 2))])
    with pytest.raises(ValueError, match="exceed the context"):
        engine.forward([Segment(sequence, text(1, 3), 1, np.array([limit]))])
    assert sequence.length == limit + 8
    with pytest.raises(ValueError, match="2 tokens with 1 parents"):
        engine.forward([Segment(sequence, text(2, 3), 1, np.array([3]))])


def test_the_bookkeeping_alone():
    pool, moves = PagePool(20, 4), []
    sequence = PagedSequence(pool, lambda sources, targets: moves.append((sources, targets)))
    sequence.reserve(6)
    sequence.append(text(6, 1))
    with pytest.raises(ValueError, match="no tree"):
        sequence.keep([])
    sequence.reserve(5)
    sequence.append(text(5, 2), grown(None, 6, np.array([5, 5, 7, 8, 7])))
    with pytest.raises(ValueError, match="no path"):
        sequence.keep([7, 9])
    slots = [sequence.pages[place // 4] * 4 + place % 4 for place in range(11)]
    sequence.keep([7, 8, 9])
    assert moves == [([slots[it] for it in (7, 8, 9)], [slots[it] for it in (6, 7, 8)])]
    assert (sequence.length, len(sequence.pages), pool.used) == (9, 3, 3)
    bare = PagedSequence(pool)
    bare.reserve(3)
    bare.append(text(3, 1), grown(None, 0, np.array([-1, -1, 1])))
    with pytest.raises(ValueError, match="nothing moves"):
        bare.keep([1, 2])
