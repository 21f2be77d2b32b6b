"""The target's tokens as the draft model reads them: their text in own tokens, of which the end is encoded anew.

The text is cut into chunks before words, by a rule that looks at the target's tokens alone, and each chunk is encoded
by itself. So what a sequence reads as does not depend on how it came about; only the last chunk is encoded again when
tokens come or go; and text never gets lost or doubled, however long the sequence.
"""

import codecs
from collections.abc import Iterable, Sequence

from draft_service.translation.lexicon import Lexicon
from draft_service.translation.shared import SharedTokens

# A chunk ends before a word once it has so many tokens, and anywhere between two characters once it has so many tokens
# or bytes; where even that is nowhere, after a few tokens more.
_LEAST_TOKENS, _MOST_TOKENS, _MOST_BYTES, _MORE_TOKENS = 16, 64, 512, 8
_SPACES = b" \t\n\r\v\f"
_CHARACTER_BYTES = 4


class Reading:
    """One sequence.

    Attributes:
        tokens: the target's.
        ids: what the draft model is given: the end of the own tokens, where all of them are too many.

    Args:
        most: own tokens that `ids` holds at most. Beyond, its older half goes, in whole chunks where there are any.
    """

    def __init__(self, target: Lexicon, own: Lexicon, shared: SharedTokens, most: int) -> None:
        self._target, self._own, self._shared, self._most = target, own, shared, most
        # (tokens, ids) before each chunk that is read.
        self._cuts: list[tuple[int, int]] = []
        self._open_bytes = self._kept = 0
        self.ids: list[int] = []
        self.tokens: list[int] = []
        self._begin()

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens."""
        for token in tokens:
            if self._cuts_before(token):
                self._read_open()
                self._cuts.append((len(self.tokens), len(self.ids)))
                self._open_bytes = 0
            self.tokens.append(token)
            self._open_bytes += len(self._target.pieces[token] or b"")
        self._read_open()
        self._slide()

    def truncate(self, length: int) -> None:
        """Forgets the tokens after the first `length`."""
        while len(self._cuts) > 1 and self._cuts[-1][0] >= length:
            self._cuts.pop()
        if 0 < self._cuts[0][0] >= length:
            known, self.tokens = self.tokens[:length], []
            self._begin()
            self.extend(known)
            return
        del self.tokens[length:]
        self._open_bytes = len(self._target.spell(self.open_tokens))
        self._read_open()
        self._slide()

    @property
    def open_tokens(self) -> list[int]:
        """The tokens of the last chunk, which begins before a word as a rule."""
        return self.tokens[self._cuts[-1][0] :]

    def unchanged(self) -> int:
        """How many leading `ids` are what they were when this was last asked."""
        kept, self._kept = min(self._kept, len(self.ids)), len(self.ids)
        return kept

    def read_by(self, own_length: int) -> int:
        """How many of the target's tokens the first `own_length` ids hold surely."""
        return next((tokens for tokens, own in reversed(self._cuts) if own <= own_length), 0)

    def own_length(self, length: int) -> int:
        """How many ids the first `length` of the target's tokens are, to the beginning of a chunk."""
        return next((own for tokens, own in reversed(self._cuts) if tokens <= length), 0)

    def _begin(self) -> None:
        self.ids = list(self._own.start)
        self._cuts = [(0, len(self.ids))]
        self._open_bytes = self._kept = 0

    def _cuts_before(self, token: int) -> bool:
        size = len(self.tokens) - self._cuts[-1][0]
        if size < _LEAST_TOKENS and self._open_bytes < _MOST_BYTES:
            return False
        before = self._target.pieces[self.tokens[-1]]
        if size >= _LEAST_TOKENS and _begins_word(before, self._target.pieces[token]):
            return True
        if size < _MOST_TOKENS and self._open_bytes < _MOST_BYTES:
            return False
        return size >= _MOST_TOKENS + _MORE_TOKENS or not unfinished(
            self._target.spell(self.tokens[-_CHARACTER_BYTES:])
        )

    def _read_open(self) -> None:
        tokens, own = self._cuts[-1]
        new = self._read(self.tokens[tokens:], first=tokens == 0)
        old = self.ids[own:]
        same = next((at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), None)
        self._kept = min(self._kept, own + (min(len(old), len(new)) if same is None else same))
        self.ids[own:] = new

    def _read(self, tokens: Sequence[int], *, first: bool) -> list[int]:
        """A chunk in own tokens. `first`: it begins the sequence."""
        ids: list[int] = []
        text = b""
        for token in tokens:
            piece = self._target.pieces[token]
            if piece is not None:
                text += self._first(piece) if first and piece else piece
                first = first and not piece
                continue
            ids, text = ids + self._own.encode(text), b""
            twin = self._shared.specials.get(token)
            # The draft model's own beginning of a text stands there already.
            if twin is not None and not (first and not ids and twin in self._own.start):
                ids.append(twin)
        return ids + self._own.encode(text)

    def _first(self, piece: bytes) -> bytes:
        """The first piece of a text: one of the tokenizers may begin texts with a space that is none."""
        if self._target.leads == self._own.leads:
            return piece
        return b" " + piece if self._own.leads else piece.removeprefix(b" ")

    def _slide(self) -> None:
        if len(self.ids) <= self._most:
            return
        start, least = list(self._own.start), len(self.ids) - self._most // 2
        tokens, own = next(((tokens, own) for tokens, own in self._cuts if own >= least), self._cuts[-1])
        self._cuts = [(at, kept - own + len(start)) for at, kept in self._cuts if at >= tokens]
        self.ids = start + self.ids[own:][-(self._most - len(start)) :]
        self._kept = 0


def _begins_word(before: bytes | None, piece: bytes | None) -> bool:
    """Whether two pieces stand on either side of a word's beginning, where tokenizers hardly ever join them."""
    if piece is None or len(piece) < 2 or piece[0] not in _SPACES or piece[1] in _SPACES:
        return False
    return before is None or not before or before[-1] not in _SPACES


def unfinished(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    tail = data[-_CHARACTER_BYTES:]
    return len(tail) - codecs.utf_8_decode(tail, "replace", False)[1]
