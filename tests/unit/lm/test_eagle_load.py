"""An EAGLE head and its target from directories: what is shared with the target is its own, and no other's is taken."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.lm.engine import ModelRefused, Segment
from outrider.lm.features import FeatureWindow, Feeding
from outrider.lm.load import EngineOptions
from outrider.lm.load_heads import load_eagle
from tests.harness.eagle import KEPT, SIZE, assert_says, random_eagle1, random_eagle3, said_by_formula, settings, write
from tests.harness.engines_lm import own_model, text
from tests.harness.models import VOCAB, save_tiny

FED = "eagle_aux_hidden_state_layer_ids"
OPTIONS = EngineOptions(page_size=4, kv_pages=20)


def weak(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """States of another size than a norm makes them grow from token to token otherwise."""
    return {name: it / 2 if it.is_floating_point() and "norm" not in name else it for name, it in tensors.items()}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", [1, 3])
def test_a_head_takes_of_its_target_what_it_has_not(tmp_path: Path, kind: int, own: bool) -> None:
    tensors = weak(random_eagle1() if kind == 1 else random_eagle3())
    model = own_model("llama")
    words, rows = (it.weight for it in (model.get_input_embeddings(), model.get_output_embeddings()))  # type: ignore[no-untyped-call]
    if own:
        tensors["embed_tokens.weight"] = words = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(2))
    target = save_tiny(tmp_path / "target", "llama")
    engine = load_eagle(write(tmp_path / "head", tensors, settings()), target, OPTIONS)
    assert engine.info.feeding == Feeding((3,) if kind == 1 else (2, 1, 0), SIZE, 32)
    assert (engine.info.vocab_size, engine.info.context_length) == (VOCAB, 80)
    assert engine.info.eos_token_ids == (2,)
    said, tokens = FeatureWindow(50), text(9, 1)
    states = torch.randn(8, SIZE if kind == 1 else 3 * SIZE, generator=torch.Generator().manual_seed(3)).bfloat16()
    said.take(0, states)
    (logits,) = engine.forward([Segment(engine.open(tokens), tokens, 8, fed=said)])
    given = {at: state.float() for at, state in enumerate(states)}
    expected = said_by_formula(tensors, words, rows, tokens.tolist(), given)
    assert_says(logits, expected)
    if kind == 3:
        assert np.flatnonzero(logits[0] > -1e29).tolist() == KEPT.tolist()


@pytest.mark.parametrize(
    ("target", "config", "message"),
    [
        ({"hidden_size": 64, "head_dim": 16}, {}, "whose states have 32 elements, and not 64"),
        ({}, {"vocab_size": VOCAB - 1}, f"with a vocabulary of {VOCAB - 1} tokens, and not {VOCAB}"),
        ({}, {FED: [1, 2, 4]}, "whose layers 1, 2, 4 feed it, of which this one has 3"),
        ({"num_hidden_layers": 2}, {}, "whose layers 2, 1, -1 feed it, of which this one has 2"),
    ],
)
def test_a_head_of_another_target_is_refused(
    tmp_path: Path, target: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    tensors = random_eagle3()
    if "vocab_size" in config:
        del tensors["t2d"]
    head = write(tmp_path / "head", tensors, settings(**config))
    with pytest.raises(ModelRefused, match="is for another target") as refused:
        load_eagle(head, save_tiny(tmp_path / "target", "llama", **target), OPTIONS)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_cannot_be_fed_or_has_no_target_is_refused(tmp_path: Path) -> None:
    head = write(tmp_path / "head", random_eagle3(fed=5), settings(**{FED: [0, 1, 2, 3, 3]}))
    target = save_tiny(tmp_path / "target", "llama")
    with pytest.raises(ModelRefused, match="is fed by 5 layers, more than 4"):
        load_eagle(head, target, OPTIONS)
    with pytest.raises(ModelRefused, match="the target of an EAGLE head cannot be synthetic"):
        load_eagle(head, "synthetic:", OPTIONS)
    (tmp_path / "head" / "config.json").write_text(json.dumps({"architectures": ["GPT2"]}))
    with pytest.raises(ModelRefused, match="holds no EAGLE head"):
        load_eagle(head, target, OPTIONS)


def test_of_the_target_only_its_ends_are_read(tmp_path: Path) -> None:
    """Weights of a layer that no draft needs may be anything."""
    target = save_tiny(tmp_path / "target", "llama")
    path = Path(target) / "model.safetensors"
    save_file({name: it for name, it in load_file(path).items() if "layers.2" not in name}, path, {"format": "pt"})
    assert load_eagle(write(tmp_path / "head", random_eagle3(), settings()), target, OPTIONS).info.vocab_size == VOCAB
