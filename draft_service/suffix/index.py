"""Where the last tokens of a sequence stood before, in constant time and without a second look at the text.

For each of a few orders n a table leads from the hash of n tokens to the place where they last ended, and from each
place to the one before that shares its hash: the hash chains of LZ77 coders. A place costs twelve bytes an order,
taking the last tokens back is exact, and no walk is longer than a constant, whatever the text.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from outrider.law.sparse import Int32Array

# Longest first: the first that finds anything decides. One equal token is hardly better than chance.
ORDERS = (8, 4, 2)
# No longer match is told from this one.
MAX_MATCH = 32
# Places that one search looks at, and those that it returns.
_STEPS, _PLACES = 64, 16
# Of fewer new tokens a loop is quicker than arrays.
_BULK = 48
_FIRST_SLOTS = 256

# An odd multiplier for the polynomial, and Knuth's for the slot: the high bits of a product depend on all lower ones.
_BASE, _SPREAD, _WORD = 1_000_003, 2_654_435_761, 0xFFFFFFFF
_INT = "i"


class _Table:
    """The places of one order."""

    def __init__(self, order: int) -> None:
        self.order = order
        self._leaves = pow(_BASE, order, 1 << 32)
        self._bits = 0
        # Of the last `order` tokens up to the last place.
        self._value: int | None = None
        self.heads = array(_INT)
        self.before = array(_INT)
        self._slot_of = array(_INT)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return 4 * (len(self.heads) + len(self.before) + len(self._slot_of))

    def slot(self, gram: Sequence[int]) -> int:
        """Of `order` tokens."""
        return self._slot(_hash(gram))

    def add(self, tokens: "array[int]", start: int) -> None:
        """Takes in the places from `start` on; those before are known."""
        if len(tokens) > len(self.heads):
            self._grow(len(tokens))
            start = 0
        if len(tokens) - start >= _BULK:
            self._add_many(tokens, start)
            return
        heads, before, slot_of, bits = self.heads, self.before, self._slot_of, 32 - self._bits
        for _ in range(start, min(self.order - 1, len(tokens))):
            before.append(-1)
            slot_of.append(-1)
        for place in range(max(start, self.order - 1), len(tokens)):
            value = self._value = self._rolled(tokens, place)
            slot = ((value * _SPREAD) & _WORD) >> bits
            slot_of.append(slot)
            before.append(heads[slot])
            heads[slot] = place

    def take_back(self, length: int) -> None:
        """Forgets the places from `length` on."""
        heads, before, slot_of = self.heads, self.before, self._slot_of
        for place in range(len(before) - 1, max(length, self.order - 1) - 1, -1):
            heads[slot_of[place]] = before[place]
        del before[length:], slot_of[length:]
        self._value = None

    def _rolled(self, tokens: "array[int]", place: int) -> int:
        first = place - self.order
        if self._value is None or first < 0:
            return _hash(tokens[first + 1 : place + 1])
        return (self._value * _BASE + tokens[place] + 1 - self._leaves * (tokens[first] + 1)) & _WORD

    def _slot(self, value: int) -> int:
        return ((value * _SPREAD) & _WORD) >> (32 - self._bits)

    def _grow(self, length: int) -> None:
        self._bits = max(_FIRST_SLOTS.bit_length() - 1, (length - 1).bit_length())
        self.heads = array(_INT, [-1]) * (1 << self._bits)
        self.before, self._slot_of, self._value = array(_INT), array(_INT), None

    def _add_many(self, tokens: "array[int]", start: int) -> None:
        first = max(start, self.order - 1)
        for known in (self.before, self._slot_of):
            known.extend([-1] * (first - start))
        slots = self._slots(np.frombuffer(tokens, np.int32), first)
        # Equal slots side by side, each run in order of place.
        by_slot = np.argsort(slots, kind="stable")
        ordered = slots[by_slot]
        begins = np.r_[True, ordered[1:] != ordered[:-1]] if len(ordered) else np.empty(0, bool)
        heads = np.frombuffer(self.heads, np.int32)
        previous = np.empty(len(ordered), np.int32)
        previous[by_slot] = np.where(begins, heads[ordered], np.r_[0, by_slot[:-1]] + first)
        ends = np.r_[begins[1:], True] if len(begins) else begins
        heads[ordered[ends]] = by_slot[ends] + first
        self.before.frombytes(previous.tobytes())
        self._slot_of.frombytes(slots.tobytes())
        self._value = None

    def _slots(self, tokens: Int32Array, first: int) -> Int32Array:
        """Of every place from `first` on."""
        count = len(tokens) - first
        value = np.zeros(count, np.uint32)
        for back in range(self.order - 1, -1, -1):
            value = (
                value * np.uint32(_BASE) + tokens[first - back : first - back + count].view(np.uint32) + np.uint32(1)
            )
        return ((value * np.uint32(_SPREAD)) >> np.uint32(32 - self._bits)).astype(np.int32)


class SuffixIndex:
    """A growing sequence and its places.

    Attributes:
        tokens: the sequence; read only.
    """

    def __init__(self) -> None:
        self.tokens: array[int] = array(_INT)
        self._tables = [_Table(order) for order in ORDERS]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return 4 * len(self.tokens) + sum(table.bytes for table in self._tables)

    def extend(self, tokens: Int32Array) -> None:
        """Appends tokens; negative ones part texts that have nothing to do with each other."""
        start = len(self.tokens)
        self.tokens.frombytes(tokens.tobytes())
        for table in self._tables:
            table.add(self.tokens, start)

    def cut(self, length: int) -> None:
        """Forgets everything after the first `length` tokens, as if it had never been there; O(what is forgotten)."""
        for table in self._tables:
            table.take_back(length)
        del self.tokens[length:]

    def find(self, suffix: "array[int]", end: int) -> list[tuple[int, int]]:
        """Where the last tokens of a text stand, newest first, at most 16 places.

        Args:
            suffix: the last tokens, MAX_MATCH or fewer where the text is shorter.
            end: only places before this one count; that of the text's own last token where it is this sequence.

        Returns (tokens that match, place of the last of them), all with the longest order that is found at all.
        """
        for table in self._tables:
            places = self._places(table, suffix, end) if len(suffix) >= table.order else []
            if places:
                return [(self._matched(suffix, place, table.order), place) for place in places]
        return []

    def _places(self, table: _Table, suffix: "array[int]", end: int) -> list[int]:
        tokens, before, order = self.tokens, table.before, table.order
        gram = suffix[-order:]
        place = table.heads[table.slot(gram)] if len(table.heads) else -1
        places: list[int] = []
        for _ in range(_STEPS):
            if place < 0 or len(places) == _PLACES:
                break
            if place < end and tokens[place + 1 - order : place + 1] == gram:
                places.append(place)
            place = before[place]
        return places

    def _matched(self, suffix: "array[int]", place: int, known: int) -> int:
        tokens, longest = self.tokens, min(len(suffix), place + 1)
        if tokens[place + 1 - longest : place + 1] == suffix[-longest:]:
            return longest
        while known < longest and tokens[place - known] == suffix[-1 - known]:
            known += 1
        return known


def _hash(gram: Sequence[int]) -> int:
    value = 0
    for token in gram:
        value = (value * _BASE + token + 1) & _WORD
    return value
