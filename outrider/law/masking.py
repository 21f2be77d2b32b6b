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
    """A copy of the scores, [rows, vocab_size], with -inf at what the (row, mask) pairs do not allow."""
    words = np.stack([mask for _, mask in masks])
    forbidden = ~_allowed(words, scores.shape[1], scores.device)
    if len(masks) == len(scores):
        return scores.masked_fill(forbidden, -torch.inf)
    rows = torch.tensor([row for row, _ in masks], device=scores.device)
    return scores.index_copy(0, rows, scores[rows].masked_fill_(forbidden, -torch.inf))


def _allowed(words: Words, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[rows, vocab_size] bool on the device; what crosses to it is a bit a token."""
    if device.type == "cpu":
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, :vocab_size].view(np.bool_))
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    packed = torch.from_numpy(words.view(np.int32)).to(device)
    return ((packed[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
