"""The tables of entries.py on the device, and one layer's attention as a kernel sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from outrider.lm.flex.entries import NOTHING, Entries
from outrider.lm.ragged import Int64Array


@dataclass(frozen=True)
class Tables:
    """What entries read in layers of one window; all int32.

    Attributes:
        counts: [entries] pages of each.
        pages: [entries, most pages] which they are.
        first, last: [entries, height] the first and last place that each row sees.
        places: [pages of the storage] which page of its sequences each page is.
    """

    counts: torch.Tensor
    pages: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class Scoring:
    """How a layer makes weights of products.

    Attributes:
        scale: factor of the products.
        softcap: scores become softcap * tanh(scores / softcap); None leaves them.
        summed: whether the logarithm of the sum of the exponentials is wanted, too.
        fixed: whether the shapes of a call are those of all calls, so that a kernel may be made for them alone.
    """

    scale: float
    softcap: float | None
    summed: bool
    fixed: bool


class Kernel(Protocol):
    """Attention over pages."""

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables, scoring: Scoring, /
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Query [entries, heads, height, key_dim], keys [1, kv_heads, slots, key_dim] and values [1, kv_heads, slots,
        value_dim] to the output [entries, heads, height, value_dim] and, where wanted, the logarithms [entries, heads,
        height] float32. A row that sees nothing has output 0."""


@dataclass(frozen=True)
class Group:
    """Entries of one height on the device.

    Attributes:
        height: rows of an entry.
        rows: [entries * height] int64 rows of the pass.
        tables: by window.
    """

    height: int
    rows: torch.Tensor
    tables: dict[int | None, Tables]


def tables_of(entries: Entries, window: int | None, places: torch.Tensor) -> Tables:
    """A kernel's shapes begin at two entries of two pages: torch would make another one for a single one."""
    reading = entries.reading(window)
    counts, pages = reading.counts, reading.pages
    first, last = reading.first, entries.last
    missing, narrow = max(0, 2 - len(counts)), max(0, 2 - pages.shape[1])
    return Tables(
        _on(np.pad(counts, (0, missing)), places),
        _on(np.pad(pages, ((0, missing), (0, narrow))), places),
        _on(np.pad(first, ((0, missing), (0, 0))), places),
        _on(np.pad(last, ((0, missing), (0, 0)), constant_values=NOTHING), places),
        places,
    )


def rows_of(entries: Entries) -> Int64Array:
    """[entries * height], as many entries as `tables_of` makes."""
    return np.pad(entries.rows, ((0, max(0, 2 - len(entries))), (0, 0))).ravel()


def places_back(groups: Sequence[Entries], count: int) -> Int64Array:
    """[count] where each row of the pass stands in the groups' outputs, one after the other."""
    back, offset = np.zeros(count, np.int64), 0
    for entries in groups:
        at = np.flatnonzero(entries.filled.ravel())
        back[entries.rows.ravel()[at]] = offset + at
        offset += max(2, len(entries)) * entries.height
    return back


def _on(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
