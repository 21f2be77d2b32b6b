"""A tokenizer as bytes: what each token spells, and the tokens of any bytes. Special tokens spell nothing and are the
tokens of no text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from outrider.lm.engine import ModelRefused
from outrider.lm.pieces import Piece, piece_table

# Bytes that are no UTF-8, as Python's "surrogateescape" spells them.
_NO_TEXT = re.compile("([\udc80-\udcff]+)")
# A UTF-8 character has at most so many.
_CHARACTER_BYTES = 4
# An ordinary text, to see what a tokenizer puts before one.
_ANCHOR = "a"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CACHED_CHARACTERS = 4_096

_State = dict[str, Any]


class Lexicon:
    """One tokenizer. Used by one thread at a time.

    Attributes:
        pieces: what each token adds to a text, by id; None for those that add nothing by themselves (special tokens,
            unused ids, the one for unknown text).
        ids: the token of some bytes, where one token spells them: the one that text is encoded to, of several.
        specials: special tokens by their names.
        start: the special tokens that the tokenizer puts before a text.
        leads: whether it puts a space before a text.
        bos, eos: the token that begins and that ends a text; None without one.

    Args:
        model: MODEL, for errors.
        size: real token ids.

    Raises ModelRefused when nothing is known of the tokenizer's workings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, model: str, size: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if tokenizer is None or not isinstance(backend, Tokenizer):
            raise ModelRefused(f"{model} has no tokenizer of tokenizer.json's kind: its tokens cannot be translated")
        state: _State = json.loads(backend.to_str())
        added = {index: token for index, token in backend.get_added_tokens_decoder().items() if index < size}
        unknown = _unknown(backend, state)
        self._silent = {index for index, token in added.items() if token.special} | unknown
        self.specials = {token.content: index for index, token in added.items() if token.special}
        self.pieces = _pieces(backend, size, self._silent)
        self.ids = _ids(backend, self.pieces)
        self.bos, self.eos = (_real(index, size) for index in (tokenizer.bos_token_id, tokenizer.eos_token_id))
        self._backend = _neutral(state)
        self._character = lru_cache(_CACHED_CHARACTERS)(self._one)
        self.start = self._start(tokenizer, unknown)
        first = backend.encode(_ANCHOR, add_special_tokens=False).ids
        self.leads = b"".join(self.pieces[index] or b"" for index in first).startswith(b" ")

    def encode(self, data: bytes) -> list[int]:
        """The tokens of a text, or of a part of one: nothing is put before it. No special token is ever among them.

        What the vocabulary cannot spell is left out; bytes that are no text are spelled by tokens for bytes.
        """
        parts = enumerate(_NO_TEXT.split(data.decode("utf-8", "surrogateescape")))
        spelled = (self._raw(_bytes(part)) if index % 2 else self._text(part) for index, part in parts if part)
        return [token for tokens in spelled for token in tokens]

    def spell(self, tokens: "list[int]") -> bytes:
        """What the tokens add to a text."""
        return b"".join(self.pieces[token] or b"" for token in tokens)

    def _text(self, text: str) -> list[int]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._silent.isdisjoint(ids):
            return ids
        # The name of a special token, or what is unknown: character by character it is neither.
        found: list[int] = []
        for token, (start, end) in zip(ids, encoding.offsets, strict=True):
            found += [token] if token not in self._silent else self._characters(text[start:end])
        return found

    def _characters(self, text: str) -> Iterator[int]:
        for character in text:
            yield from self._character(character)

    def _one(self, character: str) -> list[int]:
        ids: list[int] = self._backend.encode(character, add_special_tokens=False).ids
        return ids if self._silent.isdisjoint(ids) else self._raw(_bytes(character))

    def _raw(self, data: bytes) -> list[int]:
        found: list[int] = []
        while data:
            sizes = range(min(_CHARACTER_BYTES, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self.ids), 0)
            found += [self.ids[data[:size]]] if size else []
            data = data[size or 1 :]
        return found

    def _start(self, tokenizer: PreTrainedTokenizerBase, unknown: set[int]) -> tuple[int, ...]:
        ids: list[int] = tokenizer(_ANCHOR).input_ids
        return tuple(takewhile(lambda token: token in self._silent and token not in unknown, ids))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _real(index: int | None, size: int) -> int | None:
    return index if index is not None and index < size else None


def _unknown(backend: Tokenizer, state: _State) -> set[int]:
    """The token that stands for what the vocabulary lacks."""
    model: Mapping[str, Any] = state["model"]
    index = model.get("unk_id")
    if index is None and model.get("unk_token") is not None:
        index = backend.token_to_id(model["unk_token"])
    return set() if index is None else {index}


def _pieces(backend: Tokenizer, size: int, silent: set[int]) -> list[bytes | None]:
    table = piece_table(backend)
    spelled: Callable[[int], Piece] = table.__getitem__ if table is not None else _between(backend)
    pieces = [None if index in silent else spelled(index) for index in range(size)]
    return [piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece for piece in pieces]


def _between(backend: Tokenizer) -> Callable[[int], Piece]:
    """For decoders that look at neighbours: what a token adds after an ordinary one."""
    (anchor, *_) = backend.encode(_ANCHOR, add_special_tokens=False).ids
    before = len(backend.decode([anchor], skip_special_tokens=False))

    def spelled(index: int) -> Piece:
        known = backend.id_to_token(index) is not None
        return str(backend.decode([anchor, index], skip_special_tokens=False))[before:] if known else None

    return spelled


def _ids(backend: Tokenizer, pieces: list[bytes | None]) -> dict[bytes, int]:
    """Of several tokens that spell the same, tokens for single bytes come last, and lower ids first."""
    spelled = ((piece, index) for index, piece in enumerate(pieces) if piece)
    order = sorted(spelled, key=lambda one: (_is_byte(backend, one), one[1]), reverse=True)
    return dict(order)


def _is_byte(backend: Tokenizer, one: tuple[bytes, int]) -> bool:
    piece, index = one
    return len(piece) == 1 and _BYTE_TOKEN.fullmatch(backend.id_to_token(index) or "") is not None


def _neutral(state: _State) -> Tokenizer:
    """The tokenizer for any part of a text: it puts nothing before it, takes nothing from its ends, and takes the names
    of special tokens for text."""
    state = state | {"truncation": None, "padding": None, "post_processor": None}
    state["normalizer"] = _without_ends(state["normalizer"])
    state["pre_tokenizer"] = _without_ends(state["pre_tokenizer"])
    backend = Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = True
    return backend


def _without_ends(step: _State | None) -> _State | None:
    match step:
        case None | {"type": "Prepend" | "Strip"}:
            return None
        case {"type": "Sequence"}:
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            kept = [part for part in map(_without_ends, step[name]) if part is not None]
            return step | {name: kept} if kept else None
        case {"type": "Metaspace"}:
            return step | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return step | {"add_prefix_space": False}
    return step
