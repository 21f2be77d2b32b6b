"""Passes of few rows, played from what was recorded for their size."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from outrider.law.sparse import Int32Array
from outrider.lm.ragged import Int64Array, Piece

if TYPE_CHECKING:
    from outrider.lm.flex.fixed import FixedPass

# Gives the logits of what lies in a pass's buffers.
Play = Callable[[], torch.Tensor]


class FixedPasses:
    """Passes of several sizes.

    Args:
        played: each with what computes it, by rising number of rows.
    """

    def __init__(self, played: Sequence[tuple["FixedPass", Play]]) -> None:
        self._played = played

    def logits(self, pieces: Sequence[Piece], tokens: Int32Array, wanted: Int64Array) -> torch.Tensor | None:
        """[m, head rows] of the rows `wanted` [m] of a pass over `tokens` [n]; None where it is too large, or a
        sequence holds a tree."""
        fitting = next((it for it in self._played if it[0].rows >= len(tokens)), None)
        if fitting is None or any(piece.branches is not None for piece in pieces):
            return None
        fixed, play = fitting
        fixed.fill(pieces, tokens, wanted)
        return play()[: len(wanted)].clone()  # the next pass writes over it
