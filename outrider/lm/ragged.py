"""The shape of one forward pass: which rows belong to which sequence, and which slots they read and write.

Everything that does not depend on the layer is computed here, once per pass, on the CPU, and moved to the device in
one piece per tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.lm.branches import Branches

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
        start: place of the first in its sequence.
        pages: the sequence's pages up to the last of them.
        branches: the tree that the sequence holds with them; None in a chain, where places are positions.
    """

    first_row: int
    rows: int
    start: int
    pages: Int64Array
    branches: Branches | None = None

    @property
    def end(self) -> int:
        """Length of the sequence with them."""
        return self.start + self.rows

    @property
    def places(self) -> Int64Array:
        """[rows] where they lie in the sequence."""
        return np.arange(self.start, self.end)

    @property
    def first(self) -> int:
        """The smallest of their positions."""
        return self.start if self.branches is None else int(self.positions.min())

    @property
    def positions(self) -> Int64Array:
        """[rows] where they stand in their texts."""
        return self.places if self.branches is None else self.branches.positions_of(self.places)


@dataclass(frozen=True)
class View:
    """What a group of pieces reads in one kind of layer.

    Attributes:
        rows: [sequences * n] rows of the pass, a piece's last repeated as padding; None for all rows in order.
        sequences: how many pieces.
        pages: [2 * kv_heads * sequences * pages] rows of KvStorage.read, padded with the null page.
        mask: [sequences, group * n, keys] added to the scores, for whole pages of keys; None when every row sees every
            key.
    """

    rows: torch.Tensor | None
    sequences: int
    pages: torch.Tensor
    mask: torch.Tensor | None


class RaggedBatch:
    """One pass over sequences of different lengths with different numbers of new positions.

    Attributes:
        slots: [n] int64, where each row's key and value go.
        positions: [n] int64, each row's position in its text.
        pieces: the sequences.
    """

    def __init__(self, pieces: Sequence[Piece], null_page: int, page_size: int, device: torch.device) -> None:
        self.pieces = pieces
        self._null_page, self._page_size, self._device = null_page, page_size, device
        self._groups = _group([part for piece in pieces for part in _split(piece, page_size)])
        self._count = sum(piece.rows for piece in pieces)
        self._views: dict[tuple[int | None, int, int, torch.dtype], list[View]] = {}
        self.slots = self._tensor(slots_of(pieces, page_size))
        self.positions = self._tensor(positions_of(pieces))

    @property
    def straight(self) -> bool:
        """Whether no sequence holds a tree."""
        return all(piece.branches is None for piece in self.pieces)

    def views(self, window: int | None, heads: int, kv_heads: int, dtype: torch.dtype) -> list[View]:
        """What layers with this window and these heads read; computed once a pass."""
        key = window, heads, kv_heads, dtype
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = [self._view(pieces, *key) for pieces in self._groups]
        return views

    def _view(self, pieces: list[Piece], window: int | None, heads: int, kv_heads: int, dtype: torch.dtype) -> View:
        most_rows = max(piece.rows for piece in pieces)
        firsts = [0 if window is None else max(0, piece.first + 1 - window) // self._page_size for piece in pieces]
        most_pages = max(len(piece.pages) - first for piece, first in zip(pieces, firsts, strict=True))
        pages = np.full((len(pieces), most_pages), self._null_page)
        rows = np.empty((len(pieces), most_rows), np.int64)
        for index, (piece, first) in enumerate(zip(pieces, firsts, strict=True)):
            pages[index, : len(piece.pages) - first] = piece.pages[first:]
            rows[index] = np.minimum(np.arange(most_rows), piece.rows - 1)
        starts = np.array([piece.start for piece in pieces])
        keys = np.array(firsts)[:, None] * self._page_size + np.arange(most_pages * self._page_size)
        mask = _mask(rows + starts[:, None], keys, window, [piece.branches for piece in pieces])
        rows += np.array([piece.first_row for piece in pieces])[:, None]
        whole = rows.size == self._count and bool((rows.ravel() == np.arange(self._count)).all())
        head_rows = np.arange(2 * kv_heads)[:, None] * (self._null_page + 1) + pages.ravel()
        return View(
            None if whole else self._tensor(rows.ravel()),
            len(pieces),
            self._tensor(head_rows.ravel()),
            None if mask is None else self._additive(mask, heads // kv_heads, dtype),
        )

    def _additive(self, mask: npt.NDArray[np.bool_], group: int, dtype: torch.dtype) -> torch.Tensor:
        seen = torch.from_numpy(mask).to(self._device)
        additive = torch.zeros(mask.shape, dtype=dtype, device=self._device).masked_fill_(~seen, float("-inf"))
        return additive.repeat(1, group, 1)

    def _tensor(self, array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def slots_of(pieces: Sequence[Piece], page_size: int) -> Int64Array:
    """[n] where each row's key and value go."""
    places = [piece.places for piece in pieces]
    parts = [it.pages[at // page_size] * page_size + at % page_size for it, at in zip(pieces, places, strict=True)]
    return np.concatenate(parts)


def positions_of(pieces: Sequence[Piece]) -> Int64Array:
    """[n] where each row stands in its text."""
    return np.concatenate([piece.positions for piece in pieces])


def _mask(
    rows: Int64Array, keys: Int64Array, window: int | None, trees: Sequence[Branches | None]
) -> npt.NDArray[np.bool_] | None:
    """[sequences, n, keys]: which of the keys at places [sequences, keys] the rows at places [sequences, n] see. None
    when all are seen."""
    seen = keys[:, None] <= rows[:, :, None]
    for index, tree in enumerate(trees):
        if tree is not None:
            tree.restrict(seen[index], rows[index], keys[index])
            rows[index], keys[index] = tree.positions_of(rows[index]), tree.positions_of(keys[index])
    if window is not None:
        seen &= keys[:, None] > rows[:, :, None] - window
    return None if seen.all() else seen


def _split(piece: Piece, page_size: int) -> list[Piece]:
    parts = []
    for offset in range(0, piece.rows, MAX_PIECE_ROWS):
        start, rows = piece.start + offset, min(MAX_PIECE_ROWS, piece.rows - offset)
        pages = piece.pages[: -(-(start + rows) // page_size)]
        parts.append(Piece(piece.first_row + offset, rows, start, pages, piece.branches))
    return parts


def _group(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces that are computed together: short ones, of similar context, longest first; order kept when all fit."""
    groups: list[list[Piece]] = [[piece] for piece in pieces if piece.rows > MAX_GROUPED_ROWS]
    open_group: list[Piece] = []
    for piece in sorted((it for it in pieces if it.rows <= MAX_GROUPED_ROWS), key=lambda it: -it.end):
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
    longest = group[0].end
    if longest * (len(group) + 1) > _MAX_GROUP_SLOTS:
        return False
    return longest <= _SHORT or piece.end >= longest * _MIN_FILL
