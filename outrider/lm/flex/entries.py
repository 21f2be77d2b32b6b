"""Which rows are computed together, which pages they read and how far they see: the tables of a kernel over pages.

An entry is a few rows of one sequence. Rows see a range of places, so causal and windowed layers differ in numbers
alone. A page says one place wherever it is held: sequences share pages by the hash of all tokens up to its end, or
because one is a twin of the other. One table from pages to places does therefore for all of them, and whose pages an
entry may see is said by the list that it reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.lm.ragged import Int64Array, Piece

Int32Table = npt.NDArray[np.int32]

# What a row sees that sees nothing: padding.
NOTHING = -1


@dataclass(frozen=True)
class Reading:
    """What entries read in layers of one window.

    Attributes:
        counts: [entries] pages of each.
        pages: [entries, most pages] which; 0 after those.
        first: [entries, height] the first place that each row sees.
    """

    counts: Int32Table
    pages: Int32Table
    first: Int32Table


class Entries:
    """The rows of pieces, cut into entries of `height` rows or fewer. The pieces hold no trees.

    Attributes:
        height: rows of an entry.
        rows: [entries, height] rows of the pass; an entry's last is repeated as padding.
        filled: [entries, height] which of them are no padding.
        last: [entries, height] the last place that each sees, its own; NOTHING for padding.
    """

    def __init__(self, pieces: Sequence[Piece], height: int, page_size: int) -> None:
        self.height, self._page_size = height, page_size
        rows = np.array([it.rows for it in pieces], np.int64)
        parts = -(-rows // height)
        owner = np.repeat(np.arange(len(pieces)), parts)
        begin = height * (np.arange(len(owner)) - np.repeat(parts.cumsum() - parts, parts))
        taken = np.minimum(rows[owner] - begin, height)
        at = np.arange(height)
        self.filled = at < taken[:, None]
        self.rows = (_of(pieces, "first_row")[owner] + begin)[:, None] + np.minimum(at, taken[:, None] - 1)
        self._start = _of(pieces, "start")[owner] + begin
        self._end = self._start + taken
        self.last = np.where(self.filled, self._start[:, None] + at, NOTHING).astype(np.int32)
        self._pages, sizes = np.concatenate([it.pages for it in pieces]), np.array([len(it.pages) for it in pieces])
        self._offset = (sizes.cumsum() - sizes)[owner]

    def __len__(self) -> int:
        return len(self._start)

    def reading(self, window: int | None) -> Reading:
        """What they read in layers that look back so many positions, their own included; None: all."""
        size = self._page_size
        lowest = np.zeros_like(self._start) if window is None else np.maximum(0, self._start + 1 - window)
        skipped = lowest // size
        counts = -(-self._end // size) - skipped
        columns = np.arange(max(1, int(counts.max())))
        at = np.minimum((self._offset + skipped)[:, None] + columns, len(self._pages) - 1)
        pages = np.where(columns < counts[:, None], self._pages[at], 0)
        first = np.zeros_like(self.last) if window is None else np.maximum(0, self.last + 1 - window)
        return Reading(counts.astype(np.int32), pages.astype(np.int32), first.astype(np.int32))


def places_of_pages(pieces: Sequence[Piece], total: int) -> Int32Table:
    """[total] which page of its sequences each page is, counted from 0; NOTHING where the pieces hold it not."""
    places = np.full(total, NOTHING, np.int32)
    for piece in pieces:
        places[piece.pages] = np.arange(len(piece.pages))
    return places


def _of(pieces: Sequence[Piece], name: str) -> Int64Array:
    return np.array([getattr(it, name) for it in pieces], np.int64)
