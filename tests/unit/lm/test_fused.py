"""Which models are taken apart, and that what is left computes what they did (test_parity holds every architecture)."""

import pytest
import torch

from outrider.lm.attention import ATTENTION
from outrider.lm.fused import FusedDecoder, RmsNorm
from outrider.lm.load import _record
from tests.harness.engines_lm import assert_same, feed, own_logits, own_model, text, tiny_engine

TAKEN = ["llama", "llama_tied", "qwen2_biases", "qwen3", "mistral_window"]


@pytest.mark.parametrize("architecture", TAKEN)
def test_llama_like_models_are_taken_apart(architecture: str) -> None:
    assert isinstance(tiny_engine(architecture)._run, FusedDecoder)


@pytest.mark.parametrize("architecture", ["gemma2_softcap", "phi", "mixtral", "gpt2"])
def test_others_stay_whole(architecture: str) -> None:
    model = own_model(architecture)
    model.set_attn_implementation(ATTENTION)
    before = [id(module) for module in model.modules()]
    assert FusedDecoder.of(model, _record(model), pack=True) is None
    assert [id(module) for module in model.modules()] == before


def test_factors_that_no_table_holds_are_the_models_own() -> None:
    changed = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}}
    engine, words = tiny_engine("llama", **changed), text(20, 1)
    assert isinstance(engine.run, FusedDecoder)
    assert engine.run._table is None
    assert_same(feed(engine, engine.open(words[:1]), words), own_logits(own_model("llama", **changed), words))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [1, 9])
@torch.inference_mode()
def test_the_norm_is_the_models_own(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    norm = own_model("llama").to(dtype).base_model.norm
    generator = torch.Generator().manual_seed(1)
    inputs = (40 * torch.randn(rows, 32, generator=generator) - 7).to(dtype)
    torch.testing.assert_close(RmsNorm(norm)(inputs), norm(inputs), rtol=tolerance, atol=tolerance)


def test_weights_are_not_held_twice() -> None:
    model = own_model("llama")
    model.set_attn_implementation(ATTENTION)
    shapes = _record(model)
    assert FusedDecoder.of(model, shapes, pack=True) is not None
    assert not any("q_proj" in name for name, _ in model.named_parameters())
