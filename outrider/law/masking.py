"""Masks of one bit per token, applied to rows of scores."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

# [words] or [rows, words] uint32, token i at bit i % 32 of word i // 32.
Words: TypeAlias = npt.NDArray[np.uint32]


def word_count(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def forbid(scores: torch.Tensor, masks: Sequence[tuple[int, Words]]) -> torch.Tensor:
    """A copy of the scores, [rows, vocab_size] float32 without NaN, with -inf at what the (row, mask) pairs forbid."""
    words = np.stack([mask for _, mask in masks])
    # +inf or -inf for each token: a minimum takes the same time for every mask, a masked fill up to ten times that.
    bounds = (_bits(words, scores.shape[1], scores.device).float() - 0.5) * torch.inf
    if len(masks) == len(scores):
        return torch.minimum(scores, bounds)
    rows = torch.tensor([row for row, _ in masks], device=scores.device)
    return scores.index_copy(0, rows, torch.minimum(scores[rows], bounds))


def _bits(words: Words, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[rows, vocab_size] 0 or 1 on the device; what crosses to it is a bit a token."""
    if device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, :vocab_size])
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    packed = torch.from_numpy(words.view(np.int32)).to(device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size]
