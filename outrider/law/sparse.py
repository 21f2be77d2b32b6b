"""The draft law of a block: sparse, and the very numbers that were drawn from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SparseLaw:
    """Rows of (token id, probability) pairs, concatenated; row i is the law of draft token i.

    Attributes:
        sizes: [lookahead] int32, entries per row.
        token_ids: [sum(sizes)] int32, distinct within a row.
        probs: [sum(sizes)] float32, each row summing to 1 within 1e-5.
    """

    sizes: Int32Array
    token_ids: Int32Array
    probs: Float32Array

    def row(self, index: int) -> tuple[Int32Array, Float32Array]:
        """(token_ids, probs) of one draft token, as views."""
        start = int(self.sizes[:index].sum())
        stop = start + int(self.sizes[index])
        return self.token_ids[start:stop], self.probs[start:stop]

    def head(self, rows: int) -> "SparseLaw":
        """The first `rows` rows, as views."""
        stop = int(self.sizes[:rows].sum())
        return SparseLaw(self.sizes[:rows], self.token_ids[:stop], self.probs[:stop])

    @staticmethod
    def concatenate(rows: list[tuple[Int32Array, Float32Array]]) -> "SparseLaw":
        """Builds the law from one (token_ids, probs) pair per draft token."""
        if not rows:
            return SparseLaw(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))
        return SparseLaw(
            np.array([len(ids) for ids, _ in rows], dtype=np.int32),
            np.concatenate([ids for ids, _ in rows]).astype(np.int32, copy=False),
            np.concatenate([probs for _, probs in rows]).astype(np.float32, copy=False),
        )
