"""What is done for many blocks at once: rows of different lengths in one array, and blocks that are refused alone.

numpy spends a microsecond or two on a call, whatever its size, and a block needs a hundred calls: blocks that are there
at the same time share them. Nothing of a block depends on its company, to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

# Arrays of so many numbers stay in a core's cache from one call of numpy to the next.
ENTRIES_PER_CALL = 8_192

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Segments:
    """Rows of different lengths, some of them empty, one after another in one array.

    Attributes:
        sizes: [rows] entries of each row.
        starts: [rows] where each begins.
        owners: [entries] the row of each entry.
    """

    sizes: Int64Array
    starts: Int64Array
    owners: Int64Array

    @staticmethod
    def of(sizes: Sequence[int] | npt.NDArray[np.integer]) -> "Segments":
        """Rows of these sizes."""
        lengths = np.asarray(sizes, dtype=np.int64)
        return Segments(lengths, np.cumsum(lengths) - lengths, np.repeat(np.arange(len(lengths)), lengths))

    @cached_property
    def offsets(self) -> Int64Array:
        """[entries] where each stands in its row."""
        return np.arange(len(self.owners)) - self.starts[self.owners]

    def reduce(self, ufunc: np.ufunc, values: npt.NDArray[Any], empty: float) -> npt.NDArray[Any]:
        """ufunc over the values [entries] of each row, `empty` for a row without any: [rows]."""
        filled = np.flatnonzero(self.sizes)
        result = np.full(len(self.sizes), empty, values.dtype)
        result[filled] = ufunc.reduceat(values, self.starts[filled])
        return result

    def first(self, where: BoolArray) -> tuple[Int64Array, Int64Array]:
        """(rows, entries): the first entry of each row at which `where` [entries] holds, of rows that have one."""
        found = np.flatnonzero(where)
        rows = self.owners[found]
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        return rows[first], found[first]

    def take(self, rows: Int64Array) -> tuple["Segments", Int64Array]:
        """(some of the rows, where their entries stand in the array of all)."""
        taken = Segments.of(self.sizes[rows])
        return taken, self.starts[rows][taken.owners] + taken.offsets


class Refused(Exception):
    """Some blocks cannot be used.

    Attributes:
        blocks: index of the block -> why.
    """

    def __init__(self, blocks: dict[int, str]) -> None:
        super().__init__(blocks)
        self.blocks = blocks


def refuse(bad: BoolArray, blocks: Int64Array, why: Callable[[int], str]) -> None:
    """Raises Refused for every block that has something bad.

    Args:
        bad: [things].
        blocks: [things] whose each thing is.
        why: index of a thing -> what is wrong with it; asked for the first bad one of each block.
    """
    found = np.flatnonzero(bad)
    if len(found):
        refused, first = np.unique(blocks[found], return_index=True)
        raise Refused({int(block): why(int(thing)) for block, thing in zip(refused, found[first], strict=True)})


def each_or_why(items: Sequence[Item], do: Callable[[Sequence[Item]], Sequence[Result]]) -> list[Result | str]:
    """What `do` returns for each item, or why it was refused: the others are then done without it.

    `do` raises Refused for all items that fail its first failing check: why one is refused does not depend on its
    company either.
    """
    results: dict[int, Result | str] = {}
    left = list(range(len(items)))
    while left:
        try:
            results.update(zip(left, do([items[index] for index in left]), strict=True))
            break
        except Refused as refused:
            results.update((left[index], why) for index, why in refused.blocks.items())
            left = [index for index in left if index not in results]
    return [results[index] for index in range(len(items))]
