"""The part of a sequence that is no chain: several tokens that follow the same one, while a tree is in it.

Places count the entries of a sequence as they lie in memory; positions count the tokens of a text. In a chain they are
the same. Up to its *trunk* every sequence is a chain; behind it lie the entries of the tree, each after the one that it
follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from outrider.law.sparse import Int32Array

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Branches:
    """The entries of a tree.

    Attributes:
        trunk: the place of the first one.
        parents: [n] the place of the entry that each follows, from trunk - 1 on, and before its own.
    """

    trunk: int
    parents: Int64Array

    @property
    def end(self) -> int:
        """The place after the last one."""
        return self.trunk + len(self.parents)

    @cached_property
    def positions(self) -> Int64Array:
        """[n] where each entry stands in its text."""
        positions: list[int] = []
        for parent in self.parents.tolist():
            positions.append(1 + (parent if parent < self.trunk else positions[parent - self.trunk]))
        return np.array(positions, np.int64)

    @cached_property
    def seen(self) -> npt.NDArray[np.bool_]:
        """[n, n] which entries of the tree each one sees: those that its text holds, its own included."""
        seen = np.eye(len(self.parents), dtype=np.bool_)
        for index, parent in enumerate((self.parents - self.trunk).tolist()):
            if parent >= 0:
                seen[index] |= seen[parent]
        return seen

    def positions_of(self, places: Int64Array) -> Int64Array:
        """Where the entries at any places of the sequence stand in their texts."""
        inside = (places >= self.trunk) & (places < self.end)
        positions = places.copy()
        positions[inside] = self.positions[places[inside] - self.trunk]
        return positions

    def restrict(self, seen: npt.NDArray[np.bool_], rows: Int64Array, keys: Int64Array) -> None:
        """Takes out of a causal mask `seen` [n, m] of the entries at places `rows` [n] over those at `keys` [m] what
        other branches hold."""
        row, key = np.flatnonzero(rows >= self.trunk), np.flatnonzero((keys >= self.trunk) & (keys < self.end))
        seen[np.ix_(row, key)] = self.seen[np.ix_(rows[row] - self.trunk, keys[key] - self.trunk)]

    def cut(self, length: int) -> "Branches | None":
        """What is left of the tree in the first `length` entries."""
        return grown(None, self.trunk, self.parents[: max(0, length - self.trunk)])

    def parent_of(self, place: int) -> int:
        """The place of the entry that one follows; -1 before the first of all."""
        return place - 1 if place < self.trunk else int(self.parents[place - self.trunk])

    def path(self, tokens: Int32Array, wanted: Int32Array) -> list[int]:
        """The places of the longest path from the trunk on that says what is wanted.

        Args:
            tokens: [n] of the entries.
            wanted: the tokens at positions trunk, trunk + 1, ...
        """
        path: list[int] = []
        last = self.trunk - 1
        for token in wanted.tolist():
            found = np.flatnonzero((self.parents == last) & (tokens == token))
            if not len(found):
                break
            last = self.trunk + int(found[0])
            path.append(last)
        return path

    def require_path(self, path: Sequence[int]) -> None:
        """Raises ValueError when the places are no path that begins at the trunk."""
        before = [self.trunk - 1, *path]
        if any(self.parent_of(place) != last for last, place in zip(before, path, strict=False)):
            raise ValueError(f"{list(path)} is no path of the tree")


def grown(before: Branches | None, length: int, parents: npt.NDArray[np.integer]) -> Branches | None:
    """The tree of a sequence of `length` entries after more of them, or None where all of them are a chain.

    Args:
        before: the tree that it has; None while it is a chain.
        parents: [n] the place of the entry that each new one follows.

    Raises ValueError when one follows none before it.
    """
    places = np.arange(length, length + len(parents))
    if ((parents < -1) | (parents >= places)).any():
        raise ValueError("a token follows none of those before it")
    apart = parents != places - 1
    if before is None and not apart.any():
        return None
    trunks = [] if before is None else [before.trunk]
    trunk = min([*trunks, *(parents[apart] + 1).tolist()])
    chain_end, old = (length, np.empty(0, np.int64)) if before is None else (before.trunk, before.parents)
    start = min(trunk, chain_end)
    whole = np.concatenate([np.arange(start, chain_end) - 1, old, parents.astype(np.int64)])
    return Branches(trunk, whole[trunk - start :])
