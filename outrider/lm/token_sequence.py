"""The state of an engine that looks at nothing but tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.law.sparse import Int32Array
from outrider.lm.branches import Branches, grown
from outrider.lm.engine import SequenceState


class TokenSequence:
    """A sequence whose state is its tokens."""

    def __init__(self) -> None:
        self._tokens = np.empty(64, np.int32)
        self._length = 0
        self.branches: Branches | None = None

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self._length

    @property
    def tokens(self) -> Int32Array:
        """[length] int32, a view."""
        return self._tokens[: self._length]

    def append(self, tokens: Int32Array, parents: npt.NDArray[np.integer] | None = None) -> None:
        """Appends tokens, `parents` as in Segment; amortised O(len(tokens))."""
        if parents is None and self.branches is not None:
            parents = np.arange(self._length - 1, self._length + len(tokens) - 1)
        if parents is not None:
            self.branches = grown(self.branches, self._length, parents)
        end = self._length + len(tokens)
        if end > len(self._tokens):
            larger = np.empty(max(end, 2 * len(self._tokens)), np.int32)
            larger[: self._length] = self.tokens
            self._tokens = larger
        self._tokens[self._length : end] = tokens
        self._length = end

    def truncate(self, length: int) -> None:
        """Forgets everything after the first `length` tokens. Raises ValueError when length > self.length."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate {self._length} tokens to {length}")
        self._length = length
        self.branches = self.branches.cut(length) if self.branches is not None else None

    def keep(self, path: Sequence[int]) -> None:
        """As in SequenceState."""
        if self.branches is None:
            raise ValueError("the sequence holds no tree")
        self.branches.require_path(path)
        kept = self._tokens[list(path)]
        self.truncate(self.branches.trunk)
        self.append(kept)

    def position_of(self, place: int) -> int:
        """Where the entry at a place stands in its text."""
        return place if self.branches is None else int(self.branches.positions_of(np.array([place]))[0])

    def text_before(self, place: int, count: int) -> list[int]:
        """The last `count` tokens of the text that ends with the entry at a place; fewer where it begins sooner."""
        text: list[int] = []
        while place >= 0 and len(text) < count:
            text.append(int(self._tokens[place]))
            place = place - 1 if self.branches is None else self.branches.parent_of(place)
        return text[::-1]

    def free(self) -> None:
        """Forgets everything. Idempotent."""
        self._tokens, self._length = np.empty(0, np.int32), 0


def token_sequence(state: SequenceState) -> TokenSequence:
    """The state as what it is. Raises TypeError for another engine's."""
    if not isinstance(state, TokenSequence):
        raise TypeError(f"tokens alone are the state here, not a {type(state).__name__}")
    return state
