"""Texts as batches: which ones go together, and what they look like as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.distill.shard import ScoredText

# Texts of similar length are found among so many neighbours.
_WINDOW = 256


@dataclass(frozen=True)
class Batch:
    """Texts side by side.

    Attributes:
        tokens: [texts, n] int64, padded at the end.
        wanted: [texts, n] bool, where there is a law.
        columns: [laws, k] int64, its likeliest tokens as rows of the student's head; 0 where the head has none.
        probs: [laws, k] float32, their probabilities among the k; 0 where the head has none.
        states: [texts, n, width] float32, those of the texts; None where they have none.
    """

    tokens: torch.Tensor
    wanted: torch.Tensor
    columns: torch.Tensor
    probs: torch.Tensor
    states: torch.Tensor | None = None


def plan(texts: Sequence[ScoredText], tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """One turn through all texts: indices of each batch, at most `tokens` long with its padding (or one text)."""
    order = rng.permutation(len(texts)).tolist()
    batches: list[list[int]] = [[]]
    for start in range(0, len(order), _WINDOW):
        for index in sorted(order[start : start + _WINDOW], key=lambda it: len(texts[it].tokens)):
            if batches[-1] and len(texts[index].tokens) * (len(batches[-1]) + 1) > tokens:
                batches.append([])
            batches[-1].append(index)
        batches.append([])
    batches = [batch for batch in batches if batch]
    rng.shuffle(batches)
    return batches


class Batcher:
    """Makes batches for a student that knows the tokens `kept` [n] of `vocab_size`."""

    def __init__(self, kept: torch.Tensor, vocab_size: int, device: torch.device) -> None:
        self._column_of = np.full(vocab_size, -1, np.int64)
        self._column_of[kept.numpy()] = np.arange(len(kept))
        self._device = device

    def batch(self, texts: Sequence[ScoredText]) -> Batch:
        """These texts side by side."""
        shape = len(texts), max(len(text.tokens) for text in texts)
        tokens, wanted = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)], wanted[row, : len(text.tokens)] = text.tokens, text.scored
        weights = np.exp(np.concatenate([text.logits for text in texts]).astype(np.float32))
        columns = self._column_of[np.concatenate([text.ids for text in texts])]
        probs = np.where(columns < 0, 0.0, weights / weights.sum(1, keepdims=True)).astype(np.float32)
        arrays = (tokens, wanted, columns.clip(0), probs)
        states = torch.nn.utils.rnn.pad_sequence(known, True).float() if (known := _states(texts)) else None
        batch = Batch(*(torch.from_numpy(array).to(self._device) for array in arrays))
        return batch if states is None else replace(batch, states=states.to(self._device))


def _states(texts: Sequence[ScoredText]) -> list[torch.Tensor]:
    """Of each text [n, width] bfloat16, copied out of its file."""
    return [torch.from_numpy(np.array(it.states)).view(torch.bfloat16) for it in texts if it.states is not None]
