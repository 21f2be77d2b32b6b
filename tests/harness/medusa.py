"""Medusa heads for tests."""

import torch

from tests.harness.models import VOCAB

SIZE, HEADS = 32, 3


def random_heads(*, own: bool = True, blocks: int = 1, seed: int = 3) -> dict[str, torch.Tensor]:
    """By the names of the public layout."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(HEADS):
        for block in range(blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(SIZE, SIZE, generator=generator) / 4
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(SIZE, generator=generator)
        if own:
            tensors[f"{head}.{blocks}.weight"] = torch.randn(VOCAB, SIZE, generator=generator)
    return tensors


def said_by_formula(
    tensors: dict[str, torch.Tensor], head: int, blocks: int, states: torch.Tensor, target_rows: torch.Tensor
) -> torch.Tensor:
    """Cai et al. 2024, section 2.1, float32."""
    for block in range(blocks):
        weight, bias = (tensors[f"{head}.{block}.linear.{name}"] for name in ("weight", "bias"))
        inner = states @ weight.T + bias
        states = states + inner * torch.sigmoid(inner)
    return states @ tensors.get(f"{head}.{blocks}.weight", target_rows).T
