"""Medusa heads: read from the public layout, they say what the paper's formula says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outrider.lm.engine import EngineInfo, ModelRefused, Segment
from outrider.lm.features import FeatureWindow, Feeding
from outrider.lm.load import EngineOptions
from outrider.lm.load_heads import load_medusa
from outrider.lm.medusa import CONFIG, PICKLED, WEIGHTS, MedusaEngine, MedusaHeads, MedusaWeights
from tests.harness.medusa import HEADS, SIZE, random_heads, said_by_formula
from tests.harness.models import VOCAB, save_tiny
from tests.harness.workers import int32

INFO = EngineInfo("m", VOCAB, VOCAB, 64, "float32", (), "")


def head_of(seed: int = 5) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(SIZE, VOCAB, bias=False)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_public_layout_in_both_formats(tmp_path: Path, own: bool, blocks: int) -> None:
    tensors, head = random_heads(own=own, blocks=blocks), head_of()
    MedusaWeights(HEADS, blocks, tensors).save(tmp_path / "safe", "target")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / CONFIG).write_text(json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": blocks}))
    torch.save({f"medusa_head.{name}": it for name, it in tensors.items()}, tmp_path / "pickled" / PICKLED)
    states = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
    for directory in ("safe", "pickled"):
        heads = MedusaHeads(MedusaWeights.load(tmp_path / directory), head)
        for index in range(HEADS):
            expected = said_by_formula(tensors, index, blocks, states, head.weight)
            torch.testing.assert_close(heads.logits(index, states), expected, rtol=1e-5, atol=1e-5)


def window(end: int, states: torch.Tensor) -> FeatureWindow:
    made = FeatureWindow(1)
    made.take(end - len(states), states)
    return made


def test_the_head_of_a_row_is_its_distance_from_the_last_features() -> None:
    tensors, head = random_heads(), head_of()
    engine = MedusaEngine(MedusaHeads(MedusaWeights(HEADS, 1, tensors), head), INFO, 7)
    assert engine.info.feeding == Feeding((7,), SIZE, 1, HEADS)
    states = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(2)).bfloat16()
    first, second = engine.open(int32([1])), engine.open(int32([1]))
    # Of the first, tokens 0 and 1 have features, the last alone counts; of the second tokens 0 to 3.
    segments = [
        Segment(first, int32([1, 2, 3]), 1, fed=window(2, states)),
        Segment(second, int32([1, 2, 3, 4, 5, 6]), 2, fed=window(4, states.flip(0))),
    ]
    one, two = engine.forward(segments)

    def said(index: int, state: torch.Tensor) -> torch.Tensor:
        return said_by_formula(tensors, index, 1, state[None].float(), head.weight)[0]

    torch.testing.assert_close(one[0], said(0, states[1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(two[0], said(0, states[0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(two[1], said(1, states[0]), rtol=1e-5, atol=1e-5)
    # A tree: places 3 and 4 follow place 2 both, place 5 follows place 3.
    fed = window(2, states)
    (rows,) = engine.forward([Segment(first, int32([7, 8, 9]), 3, np.array([2, 2, 3]), fed=fed)])
    for row, index in zip(rows, (1, 1, 2), strict=True):
        torch.testing.assert_close(row, said(index, states[1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "end"), [(6, 2), (2, 2), (3, 0)])
def test_rows_that_no_head_says_are_refused(tokens: int, end: int) -> None:
    engine = MedusaEngine(MedusaHeads(MedusaWeights(HEADS, 1, random_heads()), head_of()), INFO, 7)
    fed = window(end, torch.zeros(2, SIZE).bfloat16()) if end else FeatureWindow(1)
    with pytest.raises(ValueError, match=r"rows for heads|not fed"):
        engine.forward([Segment(engine.open(int32([1])), int32([0] * tokens), 1, fed=fed)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"medusa_num_heads": 0}, "0 heads of 1 blocks"),
        ({"medusa_num_heads": "x"}, "'x' heads"),
        ({"medusa_num_heads": 1, "medusa_num_layers": 99}, "1 heads of 99 blocks"),
        ({}, "medusa_num_heads"),
    ],
)
def test_a_configuration_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    MedusaWeights(HEADS, 1, random_heads()).save(tmp_path, "target")
    (tmp_path / CONFIG).write_text(json.dumps(change))
    with pytest.raises(ModelRefused, match="holds no Medusa heads") as failure:
        MedusaWeights.load(tmp_path)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_what_is_no_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no Medusa heads"):
        MedusaWeights.load(tmp_path)
    MedusaWeights(HEADS, 1, {"model.weight": torch.zeros(1)}).save(tmp_path, "target")
    with pytest.raises(ModelRefused, match="other names"):
        MedusaWeights.load(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ModelRefused, match="no Medusa heads"):
        MedusaWeights.load(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    torch.save([torch.zeros(1)], tmp_path / PICKLED)
    with pytest.raises(ModelRefused, match="no tensors by name"):
        MedusaWeights.load(tmp_path)


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    MedusaWeights(HEADS, 1, random_heads(own=False)).save(tmp_path / "heads", "target")
    target = save_tiny(tmp_path / "target", "llama")
    assert load_medusa(tmp_path / "heads", target, EngineOptions()).info.feeding == Feeding((3,), SIZE, 1, HEADS)
    wider = save_tiny(tmp_path / "wider", "llama", hidden_size=64, head_dim=16)
    with pytest.raises(ModelRefused, match="for another target"):
        load_medusa(tmp_path / "heads", wider, EngineOptions())
    with pytest.raises(ModelRefused, match="cannot be synthetic"):
        load_medusa(tmp_path / "heads", "synthetic:", EngineOptions())
