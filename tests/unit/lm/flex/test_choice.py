"""Which attention serves, and whether passes are recorded: what fails is refused or replaced, and said."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.lm import attention_choice
from outrider.lm.attention import PagedPass
from outrider.lm.attention_choice import choose_attention, page_size_for
from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import ModelRefused
from outrider.lm.flex.entries import Entries, Reading
from outrider.lm.flex.paged import MANY, Flex
from outrider.lm.flex.walked import walk
from outrider.lm.graph_choice import choose_graphs
from outrider.lm.kv_storage import LayerShape
from tests.harness.engines_lm import PAGE, tiny_engine

CUDA = torch.device("cuda")
WIDE = [LayerShape(2, 16, 16, torch.float32, None, 4)]


@pytest.fixture
def engine() -> CausalLm:
    """It believes to be on a GPU; nothing is computed."""
    engine = tiny_engine("llama", graphs="on", attention="flex")
    engine.play_from(None)
    engine._device = CUDA
    return engine


class Check:
    """Fails so many times."""

    def __init__(self, failures: int = 0) -> None:
        self.calls, self._failures = 0, failures

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self._failures:
            raise RuntimeError("no C compiler\nfound in PATH")


@pytest.mark.parametrize(
    ("shapes", "page", "failures", "why"),
    [
        (WIDE, PAGE, 0, "its kernels want pages of a power of two from 16 on, not of 4 tokens"),
        (WIDE, 48, 0, "not of 48 tokens"),
        ([*WIDE, LayerShape(2, 16, 8, torch.float32, None, 4)], 16, 0, "its kernels want heads of 16 or wider, not 8"),
        (WIDE, 16, 1, "no C compiler"),
    ],
)
def test_what_flex_cannot_serve_is_gathered_or_refused(
    engine: CausalLm, caplog: pytest.LogCaptureFixture, shapes: list[LayerShape], page: int, failures: int, why: str
) -> None:
    with caplog.at_level(logging.INFO, "outrider"):
        choose_attention(engine, shapes, "auto", page, check := Check(failures))
    assert engine.paged is PagedPass
    assert check.calls == failures + 1, "what serves in the end is checked"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(why), record.getMessage()
    with pytest.raises(ModelRefused, match=f"^attention flex was asked for, and .*{why}$"):
        choose_attention(engine, shapes, "flex", page, Check(failures))


def test_flex_is_the_choice_on_cuda_and_gathering_elsewhere(engine: CausalLm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "_agree_on_a_prompt", lambda *_: None)  # would compute
    choose_attention(engine, WIDE, "auto", 64, check := Check())
    assert isinstance(engine.paged, Flex)
    assert check.calls == 1
    assert tiny_engine("llama").paged is PagedPass
    engine.attend_by(PagedPass)
    choose_attention(engine, WIDE, "gather", 64, check := Check())
    assert engine.paged is PagedPass
    assert check.calls == 1


def test_prompts_that_flex_computes_otherwise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Entries.reading

    def reading(its: Entries, window: int | None) -> Reading:
        read = own(its, window)
        return read if its.height < MANY else replace(read, counts=np.maximum(1, read.counts - 1))

    monkeypatch.setattr(Entries, "reading", reading)
    with pytest.raises(ModelRefused, match="a prompt by flex differs from the model's own forward"):
        tiny_engine("llama", attention="flex")


def test_a_gathering_that_fails_its_check_is_not_served(engine: CausalLm) -> None:
    with pytest.raises(RuntimeError, match="no C compiler"):
        choose_attention(engine, WIDE, "auto", 64, Check(2))


def test_graphs_that_fail_are_left_out_or_refused(engine: CausalLm, caplog: pytest.LogCaptureFixture) -> None:
    """Here for want of a GPU."""
    for paged, why in ((PagedPass, "they need attention flex"), (Flex(walk, WIDE), "")):
        engine.attend_by(paged)
        caplog.clear()
        choose_graphs(engine, "auto", Check(), lambda _part, _what: None)
        assert engine._fixed is None
        record = caplog.records[-1]
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith(f"no graphs, every kernel is launched by itself, because {why}")
        with pytest.raises(ModelRefused, match=f"^graphs were asked for, and {why}"):
            choose_graphs(engine, "on", Check(), lambda _part, _what: None)
        choose_graphs(engine, "off", Check(9), lambda _part, _what: None)


def test_passes_that_compute_something_else_are_not_played() -> None:
    engine = tiny_engine("llama", graphs="on", attention="flex")
    engine.play_from(None)
    with pytest.raises(ModelRefused, match=r"^graphs were asked for, and no C compiler$"):
        choose_graphs(engine, "on", Check(1), lambda _part, _what: None)


def test_graphs_on_a_cpu_need_flex() -> None:
    with pytest.raises(ModelRefused, match="they need attention flex"):
        tiny_engine("llama", graphs="on")


def test_pages_are_larger_where_a_kernel_reads_them_one_by_one() -> None:
    assert [page_size_for(0, it) for it in (torch.device("cpu"), CUDA)] == [16, 64]
    assert page_size_for(32, CUDA) == 32
