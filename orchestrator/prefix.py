"""The committed tokens of a session and what each worker is believed to hold of them."""

import numpy as np

from outrider.law.sparse import Int32Array
from outrider.net.arrays import PrefixHash, to_bytes


class TokenBuffer:
    """A growing int32 array; appending is amortised O(1), views are free."""

    def __init__(self, tokens: Int32Array) -> None:
        self._data = np.array(tokens, dtype=np.int32)
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    def append(self, tokens: Int32Array) -> None:
        """Appends tokens, doubling the room when it runs out."""
        needed = self._length + len(tokens)
        if needed > len(self._data):
            grown = np.empty(max(needed, 2 * len(self._data)), dtype=np.int32)
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        self._data[self._length : needed] = tokens
        self._length = needed

    def view(self, start: int = 0, stop: int | None = None) -> Int32Array:
        """tokens[start:stop], not copied."""
        return self._data[start : self._length if stop is None else min(stop, self._length)]


class PeerPrefix:
    """How many of a session's committed tokens one worker is believed to hold.

    A belief, not a truth: the worker checks length and hash, answers SESSION_NOT_FOUND or PREFIX_MISMATCH when the
    belief is wrong, and `lost` makes the next message carry everything.
    """

    def __init__(self) -> None:
        self.known = 0
        self._hash = PrefixHash()

    def lost(self) -> None:
        """The worker holds nothing (any more)."""
        self.known = 0

    def suffix(self, tokens: TokenBuffer) -> tuple[bytes, int]:
        """(tokens that the next message must carry, hash of those before). At least the last token is carried, because
        its logits are wanted."""
        start = min(self.known, len(tokens) - 1)
        if start < self._hash.length:
            self._hash = PrefixHash()
        self._hash.extend(tokens.view(self._hash.length, start))
        return to_bytes(tokens.view(start)), self._hash.value()
