"""Incremental detokenisation: the text of each token as it comes, none of it ever taken back.

Special tokens have no text. The deltas and the flush together equal what `tokenizer.decode(prompt + generated,
skip_special_tokens=True, clean_up_tokenization_spaces=False)` adds to the decoded prompt, with one exception: where a
run of byte tokens (`<0xE3>`) is invalid as a whole, tokenizers spells every byte of the run as U+FFFD, and here the
characters that were complete when they were streamed stay.
"""

import codecs
from typing import Protocol, Self

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from outrider.law.sparse import Int32Array
from outrider.lm.pieces import PieceTable, piece_table

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most so many.
_CHARACTER_BYTES = 4
# Context in which a decoder that looks at its neighbours sees a token.
_WINDOW = 8


class Detokenizer(Protocol):
    """The text of one generation. Its state depends on the tokens alone."""

    def push(self, token: int) -> str:
        """The text that the token adds; empty inside a character. O(1), amortised."""

    def flush(self) -> str:
        """The text of what is left at the end: U+FFFD for bytes that never became a character. Idempotent."""

    def fork(self) -> Self:
        """An independent copy. O(1)."""


class Spelling:
    """How a tokenizer spells tokens. Built once per process and shared by all sessions."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._table = piece_table(backend) if isinstance(backend, Tokenizer) else None

    def detokenizer(self, prompt: Int32Array) -> Detokenizer:
        """A detokenizer for what follows the prompt. A character that the prompt leaves open is completed."""
        if self._table is None:
            return WindowDetokenizer.after(self._tokenizer, prompt[-_WINDOW:])
        return PieceDetokenizer.after(self._table, prompt)

    def name(self, token: int) -> str:
        """The token as the vocabulary spells it; empty for an id that it does not hold."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        return name if isinstance(name, str) else ""


class PieceDetokenizer:
    """For decoders that spell each token by itself: a table look-up and at most three bytes of state."""

    def __init__(self, table: PieceTable, pending: bytes, *, at_start: bool) -> None:
        self._table = table
        self._pending = pending
        self._at_start = at_start

    @classmethod
    def after(cls, table: PieceTable, prompt: Int32Array) -> Self:
        """The state behind a prompt; only its last few spelled tokens matter."""
        tail: list[int] = []
        for token in reversed(prompt.tolist()):
            if table[token] is not None:
                tail.append(token)
            if len(tail) == _CHARACTER_BYTES:
                break
        detokenizer = cls(table, b"", at_start=table.strips_start and not tail)
        for token in reversed(tail):
            detokenizer.push(token)
        return detokenizer

    def push(self, token: int) -> str:
        """The text that the token adds."""
        piece = self._table[token]
        if piece is None:
            return ""
        at_start, self._at_start = self._at_start, False
        if at_start and (isinstance(piece, str) or piece.isascii()):
            return self._table.at_start(token)
        return self.flush() + piece if isinstance(piece, str) else self._decode(piece, final=False)

    def flush(self) -> str:
        """The text of an unfinished character."""
        return self._decode(b"", final=True)

    def fork(self) -> Self:
        """An independent copy."""
        return type(self)(self._table, self._pending, at_start=self._at_start)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, self._table.errors, final)
        self._pending = data[used:]
        return text


class WindowDetokenizer:
    """For every other decoder: decodes the last tokens anew and takes what is not out yet.

    Exact for decoders whose text of a token depends on the few tokens before it only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: tuple[int, ...], shown: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._shown = shown  # characters of the decoded tokens that are out

    @classmethod
    def after(cls, tokenizer: PreTrainedTokenizerBase, prompt: Int32Array) -> Self:
        """The state behind a prompt."""
        detokenizer = cls(tokenizer, tuple(prompt.tolist()), 0)
        detokenizer._slide()
        return detokenizer

    def push(self, token: int) -> str:
        """The text that the token adds."""
        self._tokens += (token,)
        added = self._show(final=False)
        if len(self._tokens) > 2 * _WINDOW:
            self._slide()
        return added

    def flush(self) -> str:
        """The text of an unfinished character."""
        return self._show(final=True)

    def fork(self) -> Self:
        """An independent copy."""
        return type(self)(self._tokenizer, self._tokens, self._shown)

    def _show(self, *, final: bool) -> str:
        text = self._decode()
        end = len(text) if final else _settled(text)
        added = text[self._shown : end]
        self._shown = max(self._shown, end)
        return added

    def _slide(self) -> None:
        self._tokens = self._tokens[-_WINDOW:]
        self._shown = _settled(self._decode())

    def _decode(self) -> str:
        tokens = list(self._tokens)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _settled(text: str) -> int:
    """The length of the text without what may still become a character: at most three bytes, each spelled U+FFFD."""
    open_bytes = len(text) - len(text.rstrip(_REPLACEMENT))
    return len(text) - min(open_bytes, _CHARACTER_BYTES - 1)
