"""Tokenizers and what two of them must agree on."""

import hashlib
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.lm.engine import ModelRefused
from outrider.lm.source import SourceKind, parse_source
from outrider.lm.synthetic_spec import SyntheticSpec

# Surrogates are no characters of their own.
_FIRST_SURROGATE, _SURROGATES = 0xD800, 0x800


@dataclass(frozen=True)
class Vocabulary:
    """What a pair of models must agree on.

    Attributes:
        size: number of real token ids.
        fingerprint: SHA-256 hex over the (id, token) pairs.
        token_hashes: CRC-32 of each token's UTF-8 text, uint32 little-endian, by id; 0 for unused ids.
        tokenizer: where it is from; None where it is bare ids.
    """

    size: int
    fingerprint: str
    token_hashes: bytes = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False, compare=False, default=None)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a MODEL. Raises ModelRefused with one sentence when there is none."""
    source = parse_source(model)
    if source.kind is SourceKind.SYNTHETIC:
        return synthetic_tokenizer(SyntheticSpec.parse(source.location))
    if source.kind is SourceKind.DISTILLED:
        raise ModelRefused(f"{model} is a distilled draft and has no tokenizer: its target has")
    try:
        if source.kind is SourceKind.GGUF:
            path = Path(source.location)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source.location)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelRefused(f"cannot load the tokenizer of {model}: {first_line}") from error
    return tokenizer


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The real vocabulary of a tokenizer, added tokens included."""
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    size = pairs[-1][0] + 1
    digest = hashlib.sha256()
    hashes = np.zeros(size, dtype="<u4")
    for index, token in pairs:
        text = token.encode("utf-8", "surrogatepass")
        digest.update(index.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text)
        hashes[index] = zlib.crc32(text)
    return Vocabulary(size, digest.hexdigest(), hashes.tobytes(), tokenizer)


def first_difference(ours: bytes, theirs: bytes) -> int | None:
    """The first token id at which two `token_hashes` differ, or None when they are equal."""
    a, b = np.frombuffer(ours, "<u4"), np.frombuffer(theirs, "<u4")
    shared = min(len(a), len(b))
    differing = np.flatnonzero(a[:shared] != b[:shared])
    if len(differing):
        return int(differing[0])
    return None if len(a) == len(b) else shared


def synthetic_tokenizer(spec: SyntheticSpec) -> PreTrainedTokenizerBase:
    """One character a token: id i is the i-th character from "a" on; characters outside encode to nothing."""
    backend = Tokenizer(BPE({_character(index): index for index in range(spec.vocab_size)}, []))
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def _character(index: int) -> str:
    code = ord("a") + index
    return chr(code if code < _FIRST_SURROGATE else code + _SURROGATES)
