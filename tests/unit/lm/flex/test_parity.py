"""Attention over pages where they lie, and passes over fixed buffers, against the models' own forward in float32.

On a CPU the tables are walked by torch's own operations: the same ones that kernels get on CUDA.
"""

import logging
import sys

import numpy as np
import pytest
import torch

from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import ModelRefused, Segment
from outrider.lm.features import Tap
from outrider.lm.fixed_passes import FixedPasses
from outrider.lm.flex.fixed import FixedPass
from outrider.lm.flex.paged import FlexPass
from tests.harness.engines_lm import PAGE, assert_same, feed, own_logits, own_model, text, tiny_engine
from tests.harness.models import ARCHITECTURES
from tests.harness.steps_lm import through_broken_pages, through_steps

SERVABLE = [name for name in ARCHITECTURES if name != "falcon"]


def flex_engine(architecture: str, *, fixed: bool = False, **changes: object) -> CausalLm:
    return tiny_engine(architecture, attention="flex", graphs="on" if fixed else "off", **changes)  # type: ignore[arg-type]


class Counted:
    """How many passes went each way."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.layers, self.fixed = 0, 0
        attend, fill = FlexPass.attend, FixedPass.fill

        def counting(its: FlexPass, *given: object) -> torch.Tensor:
            self.layers += 1
            return attend(its, *given)  # type: ignore[arg-type]

        def filling(its: FixedPass, *given: object) -> None:
            self.fixed += 1
            fill(its, *given)  # type: ignore[arg-type]

        patch.setattr(FlexPass, "attend", counting)
        patch.setattr(FixedPass, "fill", filling)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.mark.parametrize("architecture", SERVABLE)
def test_ragged_batches_equal_the_models_own_forward(architecture: str, counted: Counted) -> None:
    engine = flex_engine(architecture)
    counted.layers = 0
    through_steps(engine, architecture)
    assert (counted.layers, counted.fixed) == (4 * 3, 0), "every layer of every pass"


@pytest.mark.parametrize("architecture", ["llama", "qwen2_biases", "mistral_window", "gemma2_softcap", "gpt_oss_sinks"])
def test_passes_over_fixed_buffers_equal_the_models_own_forward(architecture: str, counted: Counted) -> None:
    engine = flex_engine(architecture, fixed=True)
    counted.fixed = 0
    through_steps(engine, architecture)
    assert counted.fixed == 4


@pytest.mark.parametrize("fixed", [False, True])
def test_truncation_at_every_length_equals_a_fresh_forward(fixed: bool) -> None:
    engine, model = flex_engine("gemma2_softcap", fixed=fixed), own_model("gemma2_softcap")
    first, other = text(19, 1), text(6, 2)
    for length in range(1, len(first) + 1):
        sequence = engine.open(first[:1])
        feed(engine, sequence, first)
        sequence.truncate(length)
        expected = own_logits(model, np.concatenate([first[:length], other]))
        assert_same(feed(engine, sequence, other), expected[length:])
        sequence.free()


@pytest.mark.parametrize("fixed", [False, True])
def test_what_a_broken_session_left_in_its_pages_reaches_no_other(fixed: bool) -> None:
    """The page for padding is broken, too: nobody reads it."""
    through_broken_pages(flex_engine("llama", fixed=fixed), "llama")


def test_padding_writes_into_its_own_page_alone() -> None:
    engine, words = flex_engine("llama", fixed=True), text(16, 1)
    for tensor in engine.storage.layers:
        tensor.zero_()
    sequence = engine.open(words[:1])
    feed(engine, sequence, words[:11])
    logits = feed(engine, sequence, words[11:])  # three rows of eight are padding
    pages = sequence.pages  # type: ignore[attr-defined]
    own = {pages[place // PAGE] * PAGE + place % PAGE for place in range(16)}
    scratch = engine.storage.scratch_page
    assert scratch is not None
    assert scratch >= engine.pages()[1], "no sequence gets it"
    for tensor in engine.storage.layers:
        written = set(tensor.any(-1).any(0).nonzero()[:, 0].tolist())
        assert own <= written
        assert written - own <= set(range(scratch * PAGE, (scratch + 1) * PAGE))
    assert_same(logits, own_logits(own_model("llama"), words)[11:])  # nor into a slot of its own


def test_a_pass_changes_no_logits_that_were_given_before() -> None:
    """A graph writes into the same memory every time, and so do these."""
    engine = flex_engine("llama", fixed=True)
    fixed = FixedPass(4, engine.run, engine.storage, engine.paged, 64)  # type: ignore[arg-type]
    memory = torch.zeros(4, engine.info.padded_vocab_size)
    engine.play_from(FixedPasses([(fixed, lambda: memory.copy_(fixed.compute()))]))
    first, second = engine.open(text(4, 1)), engine.open(text(4, 2))
    held = feed(engine, first, text(4, 1))
    before = held.clone()
    feed(engine, second, text(4, 2))
    assert torch.equal(held, before)


def test_what_a_larger_pass_left_in_the_buffers_is_no_part_of_a_smaller_one(counted: Counted) -> None:
    engine, model = flex_engine("mistral_window", fixed=True, pages=400), own_model("mistral_window")
    long, words = text(150, 1), text(4, 3)
    many = [engine.open(long[:1]) for _ in range(8)]
    for it in many:
        feed(engine, it, long[:140])
    engine.forward([Segment(it, long[140:141], 1) for it in many])
    one = engine.open(words[:1])
    feed(engine, one, words[:2])
    counted.fixed = 0
    rows = engine.forward([Segment(one, words[2:], 2), Segment(many[3], long[141:145], 4)])  # 6 of 8 rows
    assert counted.fixed == 1
    assert_same(rows[0], own_logits(model, words)[2:])
    assert_same(rows[1], own_logits(model, long[:145])[141:])


@pytest.mark.parametrize("fixed", [False, True])
def test_trees_and_features_take_the_ordinary_way(fixed: bool, counted: Counted) -> None:
    engine, model = flex_engine("llama", fixed=fixed), own_model("llama")
    words, ends = text(9, 1), text(2, 5)
    sequence = engine.open(words[:1])
    feed(engine, sequence, words)
    counted.fixed = counted.layers = 0
    tap = Tap((1, 3), 0)
    logits = engine.forward([Segment(sequence, ends, 2, np.array([8, 8]), tap)])[0]
    assert (counted.fixed, counted.layers) == (0, 0), "pages are gathered"
    sequence.truncate(9)
    again = engine.forward([Segment(sequence, ends, 2, np.array([8, 8]))])[0]
    assert (counted.fixed, counted.layers) == (0, 0)
    for token, *rows in zip(ends, logits, again, strict=True):
        for row in rows:
            assert_same(row, own_logits(model, np.append(words, token))[-1])
    sequence.truncate(9)
    feed_tapped = engine.forward([Segment(sequence, ends[:1], 1, tap=tap)])[0]
    assert (counted.fixed, counted.layers) == (0, 3)
    assert_same(feed_tapped[0], own_logits(model, np.append(words, ends[0]))[-1])
    assert tap.states().shape == (3, 2 * 32)


def test_larger_passes_take_the_ordinary_way(counted: Counted) -> None:
    engine, words = flex_engine("llama", fixed=True, max_position_embeddings=600), text(257, 1)
    counted.fixed = 0
    feed(engine, engine.open(words[:1]), words)
    assert counted.fixed == 0
    feed(engine, engine.open(words[:1]), words[:256])
    assert counted.fixed == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_what_it_is(dtype: torch.dtype) -> None:
    words, expected = text(20, 5), tiny_engine("llama", dtype=dtype)
    for fixed in (False, True):
        engine = flex_engine("llama", fixed=fixed, dtype=dtype)
        logits, own = (feed(it, it.open(words[:1]), words) for it in (engine, expected))
        assert logits.dtype == dtype
        assert float((logits.float() - own.float()).norm() / own.float().norm()) < 0.05


def test_a_worker_on_a_cpu_loads_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [it for it in sys.modules if it.startswith("outrider.lm.flex.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "outrider.lm.flex", None)  # importing it raises ImportError
    engine, words = tiny_engine("llama"), text(3, 0)
    assert_same(feed(engine, engine.open(words), words), own_logits(own_model("llama"), words))
    with pytest.raises(ModelRefused, match=r"attention flex was asked for, and No module named 'outrider\.lm\.flex"):
        flex_engine("llama")


def test_the_fixed_passes_are_those_of_all_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outrider"):
        engine = flex_engine("llama", fixed=True)
    assert isinstance(engine._fixed, FixedPasses)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("attention: flex, pages are read where they lie (compiled and proved in ")
    assert said[1] == "recording passes of up to 256 positions (--graphs off does without)"
    assert any(it.startswith("recorded 9 passes in ") for it in said), said
