"""What the engine refuses, and that nothing changes when it does."""

import math

import numpy as np
import pytest
import torch

from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import OutOfPages, Segment
from tests.harness.engines_lm import PAGE, assert_same, feed, own_logits, own_model, text, tiny_engine
from tests.harness.models import VOCAB
from tests.harness.steps_lm import through_broken_pages


@pytest.fixture(scope="module")
def engine() -> CausalLm:
    return tiny_engine("llama")


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 7, 2**31 - 1])
def test_b3_a_token_outside_the_vocabulary_is_refused(engine: CausalLm, token: int) -> None:
    good, bad = engine.open(text(3, 0)), engine.open(text(3, 0))
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB}"):
        engine.forward([Segment(good, text(3, 0), 1), Segment(bad, np.array([1, token], np.int32), 1)])
    assert (good.length, bad.length, engine.pages()[0]) == (0, 0, 0)


def test_misuse_is_refused(engine: CausalLm) -> None:
    sequence = engine.open(text(3, 0))
    with pytest.raises(ValueError, match="twice"):
        engine.forward([Segment(sequence, text(2, 0), 1), Segment(sequence, text(2, 0), 1)])
    with pytest.raises(ValueError, match="3 rows wanted of 2 tokens"):
        engine.forward([Segment(sequence, text(2, 0), 3)])
    with pytest.raises(ValueError, match="0 rows wanted of 0 tokens"):
        engine.forward([Segment(sequence, text(0, 0), 0)])
    with pytest.raises(ValueError, match="257 tokens exceed the context of 256"):
        engine.forward([Segment(sequence, text(257, 0), 1)])
    sequence.free()
    with pytest.raises(ValueError, match="freed"):
        engine.forward([Segment(sequence, text(2, 0), 1)])
    assert engine.pages()[0] == 0


def test_the_last_position_of_the_context_is_usable(engine: CausalLm) -> None:
    sequence = engine.open(text(1, 0))
    feed(engine, sequence, text(256, 0))
    with pytest.raises(ValueError, match="257 tokens"):
        engine.forward([Segment(sequence, text(1, 0), 1)])
    sequence.free()


def test_out_of_pages_leaves_every_sequence_as_it_was() -> None:
    engine, model = tiny_engine("llama", pages=6), own_model("llama")
    words = text(12, 1)
    first, second = engine.open(words[:1]), engine.open(words[:1])
    feed(engine, first, words[:10])
    with pytest.raises(OutOfPages):
        engine.forward([Segment(first, text(3, 2), 2), Segment(second, text(9, 2), 1)])
    assert (first.length, second.length, engine.pages()) == (10, 0, (3, 6))
    assert_same(feed(engine, first, words[10:]), own_logits(model, words)[10:])


def test_a_pass_that_fails_leaves_every_sequence_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = tiny_engine("llama"), own_model("llama")
    words = text(12, 1)
    sequence = engine.open(words[:1])
    feed(engine, sequence, words[:10])

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine._storage, "write", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            feed(engine, sequence, words)
    assert (sequence.length, engine.pages()[0]) == (10, 3)
    assert_same(feed(engine, sequence, words[10:]), own_logits(model, words)[10:])


def test_k3_pages_behind_broken_logits_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = tiny_engine("llama"), own_model("llama")
    words, well = text(20, 3), text(20, 4)
    broken, healthy = engine.open(words), engine.open(well)
    write = engine._storage.write

    def poison(layer: int, slots: torch.Tensor, key_value: torch.Tensor) -> None:
        key_value = key_value.clone()
        key_value[:20] = math.nan  # the first segment's rows
        write(layer, slots, key_value)

    with monkeypatch.context() as patch:
        patch.setattr(engine._storage, "write", poison)
        first, second = engine.forward([Segment(broken, words, 20), Segment(healthy, well, 20)])
    assert first.isnan().any()
    assert_same(second, own_logits(model, well))
    broken.free()
    assert engine.open(words).length == 0
    assert engine.open(well).length == 16


def test_k3_what_a_broken_session_left_in_its_pages_reaches_no_other() -> None:
    through_broken_pages(tiny_engine("llama"), "llama")


def test_c8_a_thousand_sessions_leave_no_page_behind() -> None:
    engine = tiny_engine("llama", pages=30)
    for seed in range(1000):
        words = text(1 + seed % 19, seed % 40)
        sequence = engine.open(words)
        engine.forward([Segment(sequence, words[sequence.length :], 0)])
        if seed % 3 == 0:
            sequence.truncate(sequence.length // 2)
        sequence.free()
        assert engine.pages() == (0, 30)


def test_the_context_is_cut_to_what_the_pages_hold() -> None:
    assert tiny_engine("llama", pages=PAGE).info.context_length == PAGE * PAGE


def test_padded_head_rows_are_cut() -> None:
    engine = tiny_engine("llama", vocab_size=VOCAB + 3)
    assert (engine.info.vocab_size, engine.info.padded_vocab_size) == (VOCAB, VOCAB + 3)
    assert feed(engine, engine.open(text(3, 0)), text(3, 0)).shape == (3, VOCAB)


def test_bfloat16_stays_bfloat16() -> None:
    engine, words = tiny_engine("gemma2_softcap", dtype=torch.bfloat16), text(20, 5)
    assert engine.info.dtype == "bfloat16"
    assert {it.dtype for it in engine._storage.layers} == {torch.bfloat16}
    logits = feed(engine, engine.open(words), words)
    assert logits.dtype == torch.bfloat16
    expected = own_logits(own_model("gemma2_softcap").to(torch.bfloat16), words)
    error = (logits.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert float(error.max()) < 0.05
