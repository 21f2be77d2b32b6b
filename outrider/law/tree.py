"""Blocks that are trees: several candidates for one position, each with candidates of its own after it.

A block of n tokens has n + 1 rows, which its tokens follow: row 0 is the committed prefix, row i + 1 the prefix that
ends in token i. `parents` says which row each token follows. They ascend, so that siblings stand together, in the order
in which they were drawn. In a chain token i follows row i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outrider.law.noise import Int64Array, RoundNoise
from outrider.law.sparse import Int32Array, SparseLaw


@dataclass(frozen=True, eq=False)
class Tree:
    """The shape of a block in which some token has a sibling. Where a shape is asked for, that of a chain is None.

    Attributes:
        parents: [lookahead] int32, the row that each token follows.
    """

    parents: Int32Array

    @staticmethod
    def of(parents: Int32Array) -> "Tree | None":
        """The shape of these tokens; None for a chain. Raises ValueError when a token follows none of the rows before
        it, or the rows do not ascend."""
        order = np.arange(len(parents))
        if ((parents < 0) | (parents > order)).any() or (np.diff(parents) < 0).any():
            raise ValueError("every token of a tree follows a row before it, and these ascend")
        return None if (parents == order).all() else Tree(parents)

    @cached_property
    def depths(self) -> Int64Array:
        """[lookahead + 1] tokens of the block that each row ends in: it stands at position base_length + depth."""
        depths = [0]
        for parent in self.parents.tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths)

    @cached_property
    def ranks(self) -> Int64Array:
        """[lookahead] how many siblings of each token were drawn before it."""
        return np.arange(len(self.parents)) - np.searchsorted(self.parents, self.parents)

    @property
    def depth(self) -> int:
        """Of the longest path."""
        return int(self.depths.max())

    def children(self, row: int) -> range:
        """The tokens that follow a row, in the order in which they were drawn."""
        return range(*np.searchsorted(self.parents, [row, row + 1]).tolist())

    def path(self, row: int) -> tuple[int, ...]:
        """The tokens that a row ends in, first to last."""
        path: list[int] = []
        while row:
            path.append(row - 1)
            row = int(self.parents[row - 1])
        return tuple(reversed(path))

    def leaves(self) -> list[int]:
        """The rows that no token follows."""
        followed = set(self.parents.tolist())
        return [row for row in range(len(self.parents) + 1) if row not in followed]

    def noises(self, noise: RoundNoise) -> list[RoundNoise]:
        """[lookahead + 1] of each row in a round."""
        noises = [noise]
        for parent, rank in zip(self.parents.tolist(), self.ranks.tolist(), strict=True):
            noises.append(noises[parent].branch(noise.base_length + int(self.depths[parent]), rank))
        return noises

    def head(self, count: int) -> "Tree | None":
        """The shape of the first tokens of the block."""
        return Tree.of(self.parents[:count])

    def law_of_head(self, law: SparseLaw, count: int) -> SparseLaw:
        """What is left of the block's law: rows that no token follows any more are empty."""
        if not count:
            return law.head(0)
        followed = int(self.parents[count - 1]) + 1
        cut = law.head(followed)
        return SparseLaw(np.pad(cut.sizes, (0, count - followed)), cut.token_ids, cut.probs)


def depths_of(tree: Tree | None, rows: int) -> Sequence[int]:
    """[rows] how many of the block's tokens each row ends in."""
    return range(rows) if tree is None else tree.depths.tolist()
