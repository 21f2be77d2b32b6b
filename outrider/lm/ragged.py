"""The shape of one forward pass: which rows belong to which sequence, and which slots they read and write.

Everything that does not depend on the layer is computed here, once per pass, on the CPU, and moved to the device in
one piece per tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]

# Rows of a longer piece are split: a mask then never grows beyond this many rows, and half of the work that a causal
# mask would throw away is never done.
MAX_PIECE_ROWS = 256
# Longer pieces have enough work of their own; grouping them would only pad.
MAX_GROUPED_ROWS = 16
# A group's shortest context is at least this part of its longest, or it is shorter than _SHORT.
_MIN_FILL = 0.5
_SHORT = 256
# Slots that a group reads at most: bounds what a layer gathers at once.
_MAX_GROUP_SLOTS = 1 << 17


@dataclass(frozen=True)
class Piece:
    """Consecutive new positions of one sequence.

    Attributes:
        first_row: where they are in the pass.
        rows: how many.
        start: position of the first in its sequence.
        slots: [start + rows] slots of the sequence up to the last of them.
    """

    first_row: int
    rows: int
    start: int
    slots: Int64Array


@dataclass(frozen=True)
class View:
    """What a group of pieces reads in one kind of layer.

    Attributes:
        rows: [sequences * n] rows of the pass, a piece's last repeated as padding; None for all rows in order.
        sequences: how many pieces.
        keys: [sequences * keys] slots, padded with the null slot.
        mask: [sequences, 1, group * n, keys] added to the scores; None when every row sees every key.
    """

    rows: torch.Tensor | None
    sequences: int
    keys: torch.Tensor
    mask: torch.Tensor | None


class RaggedBatch:
    """One pass over sequences of different lengths with different numbers of new positions.

    Attributes:
        slots: [n] int64, where each row's key and value go.
        positions: [n] int64, each row's position in its sequence.
    """

    def __init__(self, pieces: Sequence[Piece], null_slot: int, device: torch.device) -> None:
        self._null_slot, self._device = null_slot, device
        self._groups = _group([part for piece in pieces for part in _split(piece)])
        self._count = sum(piece.rows for piece in pieces)
        self._views: dict[tuple[int | None, int, torch.dtype], list[View]] = {}
        self.slots = self._tensor(np.concatenate([piece.slots[piece.start :] for piece in pieces]))
        self.positions = self._tensor(
            np.concatenate([np.arange(piece.start, piece.start + piece.rows) for piece in pieces])
        )

    def views(self, window: int | None, group: int, dtype: torch.dtype) -> list[View]:
        """What layers with this window read, for `group` query heads to a key head; computed once a pass."""
        views = self._views.get((window, group, dtype))
        if views is None:
            views = [self._view(pieces, window, group, dtype) for pieces in self._groups]
            self._views[window, group, dtype] = views
        return views

    def _view(self, pieces: list[Piece], window: int | None, group: int, dtype: torch.dtype) -> View:
        most_rows = max(piece.rows for piece in pieces)
        firsts = [0 if window is None else max(0, piece.start + 1 - window) for piece in pieces]
        most_keys = max(len(piece.slots) - first for piece, first in zip(pieces, firsts, strict=True))
        keys = np.full((len(pieces), most_keys), self._null_slot)
        rows = np.empty((len(pieces), most_rows), np.int64)
        for index, (piece, first) in enumerate(zip(pieces, firsts, strict=True)):
            keys[index, : len(piece.slots) - first] = piece.slots[first:]
            rows[index] = np.minimum(np.arange(most_rows), piece.rows - 1)
        starts = np.array([piece.start for piece in pieces])
        mask = _mask(rows + starts[:, None], np.array(firsts), most_keys, window)
        rows += np.array([piece.first_row for piece in pieces])[:, None]
        whole = rows.size == self._count and bool((rows.ravel() == np.arange(self._count)).all())
        return View(
            None if whole else self._tensor(rows.ravel()),
            len(pieces),
            self._tensor(keys.ravel()),
            None if mask is None else self._additive(mask, group, dtype),
        )

    def _additive(self, mask: npt.NDArray[np.bool_], group: int, dtype: torch.dtype) -> torch.Tensor:
        seen = torch.from_numpy(mask).to(self._device)[:, None].repeat(1, 1, group, 1)
        return torch.zeros(seen.shape, dtype=dtype, device=self._device).masked_fill_(~seen, float("-inf"))

    def _tensor(self, array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _mask(positions: Int64Array, firsts: Int64Array, keys: int, window: int | None) -> npt.NDArray[np.bool_] | None:
    """[sequences, n, keys]: which keys a row sees; row and key positions as in the sequence. None when all are seen."""
    key_positions = firsts[:, None, None] + np.arange(keys)
    seen = key_positions <= positions[:, :, None]
    if window is not None:
        seen &= key_positions > positions[:, :, None] - window
    return None if seen.all() else seen


def _split(piece: Piece) -> list[Piece]:
    return [
        Piece(
            piece.first_row + offset,
            min(MAX_PIECE_ROWS, piece.rows - offset),
            piece.start + offset,
            piece.slots[: piece.start + min(offset + MAX_PIECE_ROWS, piece.rows)],
        )
        for offset in range(0, piece.rows, MAX_PIECE_ROWS)
    ]


def _group(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces that are computed together: short ones, of similar context, longest first; order kept when all fit."""
    groups: list[list[Piece]] = [[piece] for piece in pieces if piece.rows > MAX_GROUPED_ROWS]
    open_group: list[Piece] = []
    for piece in sorted((it for it in pieces if it.rows <= MAX_GROUPED_ROWS), key=lambda it: -len(it.slots)):
        if open_group and not _fits(piece, open_group):
            groups.append(open_group)
            open_group = []
        open_group.append(piece)
    if open_group:
        groups.append(open_group)
    for group in groups:
        group.sort(key=lambda it: it.first_row)
    return groups


def _fits(piece: Piece, group: list[Piece]) -> bool:
    longest = len(group[0].slots)
    if longest * (len(group) + 1) > _MAX_GROUP_SLOTS:
        return False
    return longest <= _SHORT or len(piece.slots) >= longest * _MIN_FILL
