"""EAGLE heads for tests: random weights in the public layout, spelled as they are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.harness.models import VOCAB

SIZE, INNER, HEADS, PAIRS, DIM = 32, 48, 4, 2, 8
KEPT = torch.tensor([1, 2, 5, 8, 13, 21, 34, 55])


def settings(**changes: object) -> dict[str, Any]:
    """A `config.json` as published for either kind."""
    plain = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "max_position_embeddings": 256,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": PAIRS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": VOCAB,
    }
    return {name: value for name, value in (plain | changes).items() if value != "absent"}


def random_eagle1(*, seed: int = 3, bias: bool = True) -> dict[str, torch.Tensor]:
    """By the published names of EAGLE-1 and EAGLE-2."""
    shapes = _layer("layers.0.", SIZE) | {"fc.weight": (SIZE, 2 * SIZE)} | ({"fc.bias": (SIZE,)} if bias else {})
    return _random(shapes, seed)


def random_eagle3(*, seed: int = 3, fed: int = 3) -> dict[str, torch.Tensor]:
    """By the published names of EAGLE-3, with a vocabulary of KEPT."""
    shapes = _layer("midlayer.", 2 * SIZE) | {"fc.weight": (SIZE, fed * SIZE), "norm.weight": (SIZE,)}
    shapes |= {"midlayer.input_layernorm.weight": (SIZE,), "midlayer.hidden_norm.weight": (SIZE,)}
    tensors = _random(shapes | {"lm_head.weight": (len(KEPT), SIZE)}, seed)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[KEPT] = True
    return tensors | {"d2t": KEPT - torch.arange(len(KEPT)), "t2d": known}


def write(directory: Path, tensors: dict[str, torch.Tensor], config: object, *, pickled: bool = False) -> Path:
    """The directory, with both files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory


def _layer(prefix: str, seen: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, seen),
        f"{prefix}self_attn.k_proj.weight": (PAIRS * DIM, seen),
        f"{prefix}self_attn.v_proj.weight": (PAIRS * DIM, seen),
        f"{prefix}self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (INNER, SIZE),
        f"{prefix}mlp.up_proj.weight": (INNER, SIZE),
        f"{prefix}mlp.down_proj.weight": (SIZE, INNER),
        f"{prefix}post_attention_layernorm.weight": (SIZE,),
    }


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / 4 + ("norm" in name) for name, shape in sorted(shapes.items())
    }
