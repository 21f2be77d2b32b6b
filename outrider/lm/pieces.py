"""What each token of a tokenizer adds to the text: bytes, or whole text, found once per token and then looked up."""

import codecs
import json
import re
from collections.abc import Callable

from tokenizers import Tokenizer

# A token's share of the text: raw bytes, text that no neighbour completes, or None for a token that is not spelled
# (special tokens, ids that the vocabulary does not hold).
Piece = bytes | str | None

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders that work on one token at a time, but for the ends of the text.
_TOKENWISE = {"Replace", "ByteFallback", "Metaspace", "Fuse", "Strip"}
# An ordinary token to stand before another, so that the other is not the first of its text.
_ANCHOR = "a"


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# tokenizers' ByteFallback puts U+FFFD for each invalid byte; its ByteLevel and Python's "replace" for each maximal
# invalid part.
EACH_BYTE = "outrider.each_byte"
codecs.register_error(EACH_BYTE, _each_byte)


class PieceTable:
    """The pieces of one tokenizer. Filled on demand, at most one entry per token id.

    Attributes:
        errors: how bytes that are no UTF-8 are spelled, a codecs error handler.
        strips_start: whether the first token of a text is spelled differently from the others.
    """

    def __init__(self, backend: Tokenizer, spell: Callable[[str], bytes | str], *, errors: str, strips_start: bool):
        self._backend = backend
        self._spell = spell
        self._special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        self._size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._pieces: dict[int, Piece] = {}
        self.errors = errors
        self.strips_start = strips_start

    def __getitem__(self, token: int) -> Piece:
        """The piece of any token id, unknown ones included."""
        if token not in self._pieces:
            if not 0 <= token < self._size:
                return None
            self._pieces[token] = self._find(token)
        return self._pieces[token]

    def _find(self, token: int) -> Piece:
        text = None if token in self._special else self._backend.id_to_token(token)
        return None if text is None else self._spell(text)

    def at_start(self, token: int) -> str:
        """What a token spells as the first of a text: SentencePiece's leading space is none."""
        text = self._backend.id_to_token(token)
        return str(self._backend.decoder.decode([text])) if text is not None else ""


def piece_table(backend: Tokenizer) -> PieceTable | None:
    """The table of a tokenizer, or None when its decoder makes text of several tokens together."""
    steps = _decoder_steps(backend)
    kinds = [str(step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceTable(backend, _byte_level, errors="replace", strips_start=False)
    if not kinds or not set(kinds) <= _TOKENWISE or not _only_strips_after_fuse(steps):
        return None
    spell = _with_bytes(_tokenwise(backend)) if "ByteFallback" in kinds else _tokenwise(backend)
    return PieceTable(backend, spell, errors=EACH_BYTE, strips_start=bool({"Strip", "Metaspace"} & set(kinds)))


def _decoder_steps(backend: Tokenizer) -> list[dict[str, object]]:
    """The tokenizer's decoder as the list of its parts, sequences flattened."""

    def flat(step: dict[str, object]) -> list[dict[str, object]]:
        parts = step["decoders"] if step["type"] == "Sequence" else None
        return [leaf for part in parts for leaf in flat(part)] if isinstance(parts, list) else [step]

    # The decoder's own state: that of the whole tokenizer would spell out its vocabulary, for a second or two.
    return flat(json.loads(backend.decoder.__getstate__())) if backend.decoder else []


def _only_strips_after_fuse(steps: list[dict[str, object]]) -> bool:
    """Whether nothing looks across tokens but a strip of the text's start."""
    kinds = [step["type"] for step in steps]
    after = kinds[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    return set(after) <= {"Strip"} and all(step.get("stop", 0) == 0 for step in steps if step["type"] == "Strip")


def _tokenwise(backend: Tokenizer) -> Callable[[str], str]:
    decode = backend.decoder.decode
    anchor = len(decode([_ANCHOR]))
    return lambda token: str(decode([_ANCHOR, token]))[anchor:]


def _with_bytes(spell: Callable[[str], str]) -> Callable[[str], bytes | str]:
    def spell_bytes(token: str) -> bytes | str:
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else spell(token)

    return spell_bytes


def _byte_level(token: str) -> bytes:
    """GPT-2's spelling of bytes as printable characters, read backwards; other text stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _byte_characters() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, inverted: printable latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
