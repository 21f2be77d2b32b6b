"""A translated engine is its model's own law on the shared tokens, after whatever was appended and truncated before."""

import random

import numpy as np
import pytest
import torch

from draft_service.translation.engine import ReadSequence, TranslatedEngine
from draft_service.translation.vocabularies import Vocabularies
from outrider.law.draft import truncate
from outrider.law.params import LawParams
from outrider.law.transforms import RowContext, law_probs
from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import OutOfPages, Segment
from outrider.lm.load import EngineOptions, build_engine
from outrider.lm.reduced_head import LEFT_OUT
from outrider.lm.tokenizer import vocabulary_of
from tests.harness.engines_lm import assert_same, own_logits
from tests.harness.models import tiny_config, tiny_model
from tests.harness.vocabularies import OWN, prose, target_tokenizer

NAMES = list(OWN)
CONTEXT = 512


def tiny(name: str, pages: int = 400) -> tuple[TranslatedEngine, "torch.nn.Module"]:
    """A tiny model with one of the tokenizers, and the model alone."""
    own = OWN[name][0]()
    config = tiny_config("llama", vocab_size=len(own), max_position_embeddings=CONTEXT, eos_token_id=None)
    options = EngineOptions(kv_pages=pages, page_size=4)
    engine = build_engine(name, tiny_model(config), vocabulary_of(own), options, lambda _fraction, _what: None)
    assert isinstance(engine, CausalLm)
    vocabularies = Vocabularies.of(engine.info, vocabulary_of(target_tokenizer()), "the target")
    return TranslatedEngine(engine, vocabularies), tiny_model(config)


def some_tokens(size: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < size:
        at = chance.randrange(len(prose()) - 50)
        tokens += target_tokenizer()(prose()[at : at + 50], add_special_tokens=False).input_ids
        tokens += [chance.randrange(len(target_tokenizer()))] * chance.randrange(3)
    return tokens[:size]


def append(engine: TranslatedEngine, sequence: ReadSequence, tokens: list[int], rows: int) -> torch.Tensor:
    return engine.forward([Segment(sequence, np.array(tokens, np.int32), rows)])[0]


def read_ids(engine: TranslatedEngine, sequence: ReadSequence) -> np.ndarray:  # type: ignore[type-arg]
    """What the model is given; something also where nothing can be read."""
    return np.array(sequence.reading.ids or [engine.vocabularies.lonely], np.int32)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_models_own_on_shared_tokens(name: str) -> None:
    engine, model = tiny(name)
    shared, chance = engine.vocabularies.shared, random.Random(3)
    tokens = some_tokens(200, 1)
    sequence = engine.open(np.array(tokens[:1], np.int32))
    assert sequence.length == 0
    for token in tokens:
        row = append(engine, sequence, [token], 1)
        if chance.random() < 0.3:
            own = read_ids(engine, sequence)
            expected = own_logits(model, own)[-1]  # type: ignore[arg-type]
            assert row.dtype == torch.float32
            assert_same(row[0, shared.targets], expected[shared.own])
            others = np.setdiff1d(np.arange(shared.size), shared.targets)
            assert bool((row[0, others] == LEFT_OUT).all())
            assert len(others) + len(shared.targets) == shared.size
        if chance.random() < 0.1:
            sequence.truncate(max(1, sequence.length - chance.randrange(30)))


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_law_is_the_models_law_on_shared_tokens_renormalised(name: str) -> None:
    """In float64 arithmetic of its own, from the model's own logits."""
    engine, model = tiny(name)
    shared, tokens = engine.vocabularies.shared, some_tokens(60, 2)
    sequence = engine.open(np.array(tokens, np.int32))
    row = append(engine, sequence, tokens[sequence.length :], 1)
    context = RowContext(LawParams(temperature=0.7), np.array(tokens, np.int32))
    ((ids, probs),) = truncate(law_probs(row, [context], shared.size), shared.size)
    own = own_logits(model, read_ids(engine, sequence))[-1].double().numpy() / 0.7  # type: ignore[arg-type]
    everything = np.exp(own - own.max()) / np.exp(own - own.max()).sum()
    restricted = everything[shared.own]
    assert restricted.sum() < 0.99
    law = dict(zip(shared.targets.tolist(), restricted / restricted.sum(), strict=True))
    assert set(ids.tolist()) <= set(law)
    assert abs(float(probs.astype(np.float64).sum()) - 1) < 1e-6
    assert max(abs(law[token] - prob) for token, prob in zip(ids.tolist(), probs.tolist(), strict=True)) < 1e-6


def test_several_rows_and_several_sequences_are_those_of_one_at_a_time() -> None:
    engine, _ = tiny("larger byte-level")
    tokens = some_tokens(40, 4)
    alone = engine.open(np.array(tokens[:1], np.int32))
    expected = torch.cat([append(engine, alone, [token], 1) for token in tokens])
    one, other, silent = (engine.open(np.array([token], np.int32)) for token in (7, 8, 9))
    rows = engine.forward(
        [
            Segment(one, np.array(tokens, np.int32), 5),
            Segment(other, np.array(tokens[:20], np.int32), 1),
            Segment(silent, np.array(tokens[:9], np.int32), 0),
        ]
    )
    assert_same(rows[0], expected[-5:])
    assert_same(rows[1], expected[19:20])
    assert rows[2].shape == (0, engine.info.vocab_size)
    assert [sequence.length for sequence in (one, other, silent)] == [40, 20, 9]
    assert_same(append(engine, silent, tokens[9:10], 1), expected[9:10])


def test_a_prefix_that_another_sequence_has_is_shared() -> None:
    engine, _ = tiny("sentencepiece")
    tokens = np.array(some_tokens(150, 6), np.int32)
    one = engine.open(tokens)
    first = append(engine, one, tokens.tolist(), 1)
    other = engine.open(tokens)
    assert 100 < other.length < 150
    assert engine.shared_pages() > 10
    assert_same(append(engine, other, tokens[other.length :].tolist(), 1), first)


def test_without_pages_nothing_changes() -> None:
    engine, _ = tiny("smaller byte-level", pages=40)
    tokens = some_tokens(150, 7)
    sequence = engine.open(np.array(tokens[:1], np.int32))
    append(engine, sequence, tokens[:10], 1)
    other = engine.open(np.array(tokens[:1], np.int32))
    append(engine, other, tokens[20:100], 1)
    before = list(sequence.reading.ids)
    with pytest.raises(OutOfPages):
        append(engine, sequence, tokens[10:100], 1)
    assert (sequence.length, sequence.reading.ids) == (10, before)
    other.free()
    fresh, _ = tiny("smaller byte-level")
    alone = fresh.open(np.array(tokens[:1], np.int32))
    assert_same(append(engine, sequence, tokens[10:40], 1), append(fresh, alone, tokens[:40], 1))


def test_a_context_that_is_full_is_read_from_a_later_point_on() -> None:
    """The target's tokens may take more of the draft model's than it can hold."""
    engine, model = tiny("smaller byte-level")
    tokens = some_tokens(CONTEXT, 8)
    sequence = engine.open(np.array(tokens[:1], np.int32))
    for start in range(0, CONTEXT, 16):
        row = append(engine, sequence, tokens[start : start + 16], 1)
        assert len(sequence.reading.ids) <= CONTEXT
    assert engine.vocabularies.target.spell(tokens).endswith(engine.vocabularies.own.spell(sequence.reading.ids))
    expected = own_logits(model, read_ids(engine, sequence))[-1]  # type: ignore[arg-type]
    shared = engine.vocabularies.shared
    assert_same(row[0, shared.targets], expected[shared.own])
