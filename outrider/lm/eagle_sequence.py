"""What an EAGLE head keeps of one text: the entries of its tokens, and the outputs that the next ones are made of.

An entry belongs to a token and is made of it and of the state before it: the target's where that is known, otherwise
the head's own output for the entry that it follows. The first tokens of a text may have none, where nothing is known of
the states before them.
"""

from collections.abc import Sequence

import torch

from outrider.law.sparse import Int32Array
from outrider.lm.branches import Branches
from outrider.lm.engine import SequenceState
from outrider.lm.kv import PagedSequence


class EagleSequence:
    """A SequenceState.

    Attributes:
        entries: their pages; places in it count from the first entry.
        begin: place of the first entry in the text.
    """

    def __init__(self, entries: PagedSequence) -> None:
        self.entries, self.begin = entries, 0
        self._outputs: dict[int, torch.Tensor] = {}

    @property
    def length(self) -> int:
        """Number of leading tokens whose entries are there or will never be."""
        return self.begin + self.entries.length

    def skip(self, count: int) -> None:
        """The next tokens have no entry; there is none before them."""
        self.begin += count

    def append(self, tokens: Int32Array, branches: Branches | None, outputs: torch.Tensor, followed: int) -> None:
        """Counts entries whose keys and values were written.

        Args:
            branches: the tree that the entries hold with them.
            outputs: [n, hidden size] of the head.
            followed: the first place whose entry may be followed by one that is made of its output.
        """
        start = self.length
        self.entries.append(tokens, branches)
        self._outputs = {place: row for place, row in self._outputs.items() if place >= followed}
        first = max(start, followed)
        if first < self.length:
            # A copy: rows of the pass would keep all of it.
            self._outputs |= zip(range(first, self.length), outputs[first - start :].clone().unbind(), strict=True)

    def output(self, place: int) -> torch.Tensor:
        """[hidden size] of the entry at a place. Raises ValueError where it was not kept."""
        if place not in self._outputs:
            raise ValueError(f"there is neither a state nor an output of place {place}")
        return self._outputs[place]

    def truncate(self, length: int) -> None:
        """Forgets everything after the first `length` tokens. Raises ValueError when length > self.length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.entries.truncate(max(0, length - self.begin))
        self.begin = min(self.begin, length)
        self._outputs = {place: row for place, row in self._outputs.items() if place < length}

    def keep(self, path: Sequence[int]) -> None:
        """As in SequenceState, but keeps nothing of the tree: its entries are made of the head's own outputs, and those
        of what was committed are computed again with the target's states."""
        branches = self.entries.branches
        if branches is None:
            raise ValueError("the sequence holds no tree")
        branches.require_path([place - self.begin for place in path])
        self.truncate(self.begin + branches.trunk)

    def free(self) -> None:
        """Gives every page back. Idempotent."""
        self.entries.free()
        self.begin = 0
        self._outputs.clear()


def eagle_sequence(state: SequenceState) -> EagleSequence:
    """The state as what it is. Raises ValueError for another engine's, or one that was freed."""
    if not isinstance(state, EagleSequence) or state.entries.freed:
        raise ValueError("the sequence was freed or belongs to another engine")
    return state
