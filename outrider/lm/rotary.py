"""Rotary factors looked up by position: a model's own module takes ten small operations for them in every pass."""

from typing import Any

import torch

# Kinds whose factors at a position depend on nothing else: not on how long the sequence is.
_BY_POSITION = {"default", "linear", "llama3", "yarn"}
# Positions that are computed at a time.
_STEP = 1024


class RotaryTable:
    """What a model's rotary module gives, bit for bit: it was asked once for every position up to the last one seen.

    Args:
        rotary: transformers' module; called with (a tensor of the model's dtype, positions [1, n]).
        like: a tensor of the model's dtype and device.
    """

    def __init__(self, rotary: Any, like: torch.Tensor) -> None:
        self._rotary, self._like = rotary, like
        self._tables = self._of(0, _STEP)

    @staticmethod
    def of(rotary: Any, like: torch.Tensor) -> "RotaryTable | None":
        """None where factors depend on more than the position, or where to look at positions would stop a device."""
        if like.device.type != "cpu" or getattr(rotary, "rope_type", None) not in _BY_POSITION:
            return None
        return RotaryTable(rotary, like)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [n, dim] for positions [n] int64."""
        last, held = int(positions.numpy().max(initial=0)), len(self._tables[0])
        if last >= held:
            more = self._of(held, (last // _STEP + 1) * _STEP)
            self._tables = [torch.cat(pair) for pair in zip(self._tables, more, strict=True)]
        cos, sin = (table.index_select(0, positions) for table in self._tables)
        return cos, sin

    def _of(self, first: int, end: int) -> list[torch.Tensor]:
        return [it[0] for it in self._rotary(self._like, torch.arange(first, end)[None])]
