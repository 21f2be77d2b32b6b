"""The paged, ragged path against the model's own forward, in float32, over many architectures."""

import pytest
import torch

from outrider.lm.engine import Segment
from tests.harness.engines_lm import assert_same, feed, own_logits, own_model, text, tiny_engine
from tests.harness.models import ARCHITECTURES, WINDOW

SERVABLE = [name for name in ARCHITECTURES if name != "falcon"]
WINDOWED = [name for name, (_, settings) in ARCHITECTURES.items() if settings.get("sliding_window") == WINDOW]


@pytest.mark.parametrize("architecture", SERVABLE)
def test_ragged_batches_equal_the_models_own_forward(architecture: str) -> None:
    """Sessions that join with prompts of different lengths and go on with different numbers of new positions."""
    engine, model = tiny_engine(architecture), own_model(architecture)
    texts = [text(length, seed) for seed, length in enumerate((1, 5, 23, 40, 17))]
    sequences = [engine.open(it[:1]) for it in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    for step in ((1, 0, 3, 20, 2), (0, 1, 17, 1, 1), (0, 4, 1, 9, 5), (0, 0, 2, 10, 9)):
        active = [index for index, count in enumerate(step) if count]
        segments = [
            Segment(sequences[index], texts[index][done[index] : done[index] + step[index]], step[index])
            for index in active
        ]
        for index, logits in zip(active, engine.forward(segments), strict=True):
            rows[index].append(logits)
            done[index] += step[index]
    for tokens, parts in zip(texts, rows, strict=True):
        assert_same(torch.cat(parts), own_logits(model, tokens))


@pytest.mark.parametrize("architecture", ["llama", "gemma2_softcap", "gpt_oss_sinks", "gpt2"])
def test_c1_truncation_at_every_length_equals_a_fresh_forward(architecture: str) -> None:
    engine, model = tiny_engine(architecture), own_model(architecture)
    first, other = text(19, 1), text(6, 2)
    for length in range(1, len(first) + 1):
        sequence = engine.open(first[:1])
        feed(engine, sequence, first)
        sequence.truncate(length)
        assert sequence.length == length
        expected = own_logits(model, torch.cat([torch.from_numpy(first[:length]), torch.from_numpy(other)]).numpy())
        assert_same(feed(engine, sequence, other), expected[length:])
        sequence.free()
    assert engine.pages()[0] == 0


@pytest.mark.parametrize("architecture", WINDOWED)
def test_sliding_windows_hold_far_beyond_the_window(architecture: str) -> None:
    engine, model = tiny_engine(architecture), own_model(architecture)
    tokens = text(6 * WINDOW, 3)
    sequence = engine.open(tokens[:1])
    parts = [feed(engine, sequence, tokens[: 3 * WINDOW])]
    parts += [feed(engine, sequence, tokens[at : at + 4]) for at in range(3 * WINDOW, 5 * WINDOW, 4)]
    parts += [feed(engine, sequence, tokens[at : at + 1]) for at in range(5 * WINDOW, 6 * WINDOW)]
    assert_same(torch.cat(parts), own_logits(model, tokens))
    # The window matters: with all positions visible the far rows differ.
    wide = own_logits(own_model(architecture, sliding_window=200), tokens)
    assert float((torch.cat(parts)[-1] - wide[-1]).abs().max()) > 1e-2


def test_long_prompts_are_computed_in_pieces() -> None:
    engine, model = tiny_engine("llama", max_position_embeddings=700), own_model("llama", max_position_embeddings=700)
    tokens = text(600, 4)
    sequence, short = engine.open(tokens[:1]), engine.open(tokens[:1])
    long_rows, short_rows = engine.forward([Segment(sequence, tokens[:580], 580), Segment(short, tokens[:3], 3)])
    assert_same(long_rows, own_logits(model, tokens[:580]))
    assert_same(short_rows, own_logits(model, tokens[:3]))
    assert_same(feed(engine, sequence, tokens[580:]), own_logits(model, tokens)[580:])


def test_many_sessions_of_very_different_lengths() -> None:
    engine = tiny_engine("qwen2_biases", pages=900, max_position_embeddings=700)
    model = own_model("qwen2_biases", max_position_embeddings=700)
    texts = [text(length, seed) for seed, length in enumerate((1, 2, 300, 640, 9, 33, 310, 620, 90))]
    sequences = [engine.open(it[:1]) for it in texts]
    engine.forward([Segment(it, words, 0) for it, words in zip(sequences, texts, strict=True)])
    more = [text(1 + index % 5, 100 + index) for index in range(len(texts))]
    rows = engine.forward([Segment(it, new, len(new)) for it, new in zip(sequences, more, strict=True)])
    for words, new, logits in zip(texts, more, rows, strict=True):
        whole = torch.cat([torch.from_numpy(words), torch.from_numpy(new)]).numpy()
        assert_same(logits, own_logits(model, whole)[len(words) :])


def test_only_the_wanted_rows_come_back() -> None:
    engine, model = tiny_engine("llama"), own_model("llama")
    first, second = text(7, 5), text(5, 6)
    sequences = engine.open(first[:1]), engine.open(second[:1])
    none, two = engine.forward([Segment(sequences[0], first, 0), Segment(sequences[1], second, 2)])
    assert none.shape == (0, engine.info.vocab_size)
    assert_same(two, own_logits(model, second)[3:])
    assert engine.forward([Segment(sequences[0], first[:1], 0)])[0].shape == (0, engine.info.vocab_size)
    assert engine.forward([]) == []


def test_shared_prefixes_give_equal_logits_and_compute_less() -> None:
    engine, model = tiny_engine("llama"), own_model("llama")
    tokens = text(30, 7)
    first = engine.open(tokens)
    feed(engine, first, tokens)
    used = engine.pages()[0]
    second = engine.open(tokens)
    assert second.length == 28, "all whole pages but never the last token"
    assert engine.pages()[0] == used
    assert_same(feed(engine, second, tokens[28:]), own_logits(model, tokens)[28:])
    # Writing after a truncation into a shared page leaves the other's state alone.
    second.truncate(18)
    other = text(5, 8)
    feed(engine, second, other)
    more = text(3, 9)
    whole = torch.cat([torch.from_numpy(tokens), torch.from_numpy(more)]).numpy()
    assert_same(feed(engine, first, more), own_logits(model, whole)[30:])
    whole = torch.cat([torch.from_numpy(tokens[:18]), torch.from_numpy(other), torch.from_numpy(more)]).numpy()
    assert_same(feed(engine, second, more), own_logits(model, whole)[23:])


def test_forks_go_separate_ways() -> None:
    engine, model = tiny_engine("qwen3"), own_model("qwen3")
    tokens, ways = text(10, 10), (text(5, 11), text(3, 12))
    first = engine.open(tokens)
    feed(engine, first, tokens)
    sequences = first, first.fork()
    rows = engine.forward([Segment(it, way, len(way)) for it, way in zip(sequences, ways, strict=True)])
    for way, logits in zip(ways, rows, strict=True):
        whole = torch.cat([torch.from_numpy(tokens), torch.from_numpy(way)]).numpy()
        assert_same(logits, own_logits(model, whole)[10:])
    for sequence in sequences:
        sequence.free()
    assert engine.pages() == (0, 200)


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt_neox"])
def test_packed_weights_change_no_logits(architecture: str) -> None:
    tokens = text(20, 13)
    packed, plain = (tiny_engine(architecture, pack=pack) for pack in (True, False))
    assert_same(feed(packed, packed.open(tokens), tokens), feed(plain, plain.open(tokens), tokens))
