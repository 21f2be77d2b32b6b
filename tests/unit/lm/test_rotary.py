"""The table of rotary factors against the module that it was made from."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.lm.rotary import RotaryTable

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "dynamic": {"factor": 4.0},
}


def rotary(kind: str) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=48,
        num_attention_heads=2,
        head_dim=24,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_the_table_is_the_module_to_the_last_bit(kind: str, dtype: torch.dtype) -> None:
    like, module = torch.zeros(1, 48, dtype=dtype), rotary(kind)
    table = RotaryTable.of(module, like)
    assert table is not None
    # Within what is there, beyond it, one, many, and twice the same.
    for positions in ([0], [5, 4, 5], [1023, 1024], [4095], [3, 7000, 12], list(range(2000))):
        at = torch.tensor(positions)
        for found, expected in zip(table(at), module(like, at[None]), strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, expected[0])


def test_factors_that_depend_on_the_length_are_left_to_the_module() -> None:
    """`dynamic` changes all of them when a sequence is longer than those before."""
    assert RotaryTable.of(rotary("dynamic"), torch.zeros(1, 48)) is None
    assert RotaryTable.of(torch.nn.Identity(), torch.zeros(1, 48)) is None
    assert RotaryTable.of(rotary("default"), torch.zeros(1, 48, device="meta")) is None
