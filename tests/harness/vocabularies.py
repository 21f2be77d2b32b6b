"""Vocabularies to translate between: trained on the standard library's text, and engines that speak them."""

import difflib
import inspect
import json
import re
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draft_service.translation.engine import TranslatedEngine
from draft_service.translation.lexicon import Lexicon
from draft_service.translation.vocabularies import Vocabularies
from outrider.lm.engine import Engine
from outrider.lm.tokenizer import vocabulary_of
from tests.harness import tiny_tokenizers
from tests.harness.engines import ScriptedEngine
from tests.harness.models import tiny_config
from tests.harness.tiny_tokenizers import CORPUS, MIXED, SPECIALS
from tests.harness.wrappers import ChangedEngine, served_as


@cache
def prose() -> str:
    """Some 100 kB of English and code, and a little of everything else."""
    return _text_of(json, inspect, textwrap)


def _text_of(*modules: ModuleType) -> str:
    return "".join(inspect.getsource(module) for module in modules) + MIXED + "\n".join(CORPUS)


@cache
def byte_level(size: int, text: str) -> PreTrainedTokenizerBase:
    """BPE over bytes, as GPT-2's and its heirs'."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    backend.train_from_iterator(text.splitlines(keepends=True), trainer)
    return _wrapped(backend)


@cache
def sentence_piece(size: int) -> PreTrainedTokenizerBase:
    """SentencePiece's Unigram with a byte for what it lacks, a space and a BOS before every text."""
    names = [*SPECIALS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    _train(
        trained, trainers.UnigramTrainer(vocab_size=size, special_tokens=names, unk_token="<unk>", show_progress=False)
    )
    state = json.loads(trained.to_str())
    state["model"]["byte_fallback"] = True
    # Trained as special tokens only so that they get their ids.
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in (*SPECIALS, "<unk>")]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    begin = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return _wrapped(backend)


@cache
def word_piece(size: int) -> PreTrainedTokenizerBase:
    """BERT's, which loses cases, spaces and whatever its alphabet lacks."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    _train(
        backend, trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]", *SPECIALS], show_progress=False)
    )
    return _wrapped(backend)


def characters(alphabet: str, *merged: str) -> PreTrainedTokenizerBase:
    """One character a token, and pairs of tokens that are one."""
    vocab = {token: index for index, token in enumerate((*alphabet, *(pair.replace(" ", "") for pair in merged)))}
    backend = Tokenizer(models.BPE(vocab, [tuple(pair.split()) for pair in merged]))  # type: ignore[misc]
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]


# By name, with whether text comes back from it as it was.
OWN = {
    "smaller byte-level": (lambda: byte_level(700, _text_of(textwrap)), True),
    "larger byte-level": (lambda: byte_level(1500, _text_of(inspect, difflib)), True),
    "sentencepiece": (lambda: sentence_piece(1000), True),
    "wordpiece": (lambda: word_piece(800), False),
}


# Further ones, made by hand or for a handful of sentences.
MORE_OWN = {
    "llama-like": (tiny_tokenizers.byte_fallback, True),
    "gemma-like": (tiny_tokenizers.gemma_like, True),
    "unigram without bytes": (tiny_tokenizers.unigram, False),
    "wordpiece of few words": (tiny_tokenizers.word_piece, False),
}


@cache
def target_tokenizer() -> PreTrainedTokenizerBase:
    return byte_level(1000, prose())


def between(target: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, engine: Engine) -> Vocabularies:
    """Of an engine that speaks the tokens of `own`."""
    info = replace(served_as(engine.info, vocabulary_of(own)), tokenizer=own)
    return Vocabularies.of(info, vocabulary_of(target), "the target")


def translated(target: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, engine: Engine) -> TranslatedEngine:
    """The engine, as if it spoke the tokens of `own`, in those of `target`."""
    vocabularies = between(target, own, engine)
    info = replace(served_as(engine.info, vocabulary_of(own)), tokenizer=own)
    return TranslatedEngine(ChangedEngine(engine, info=info), vocabularies)


def _train(backend: Tokenizer, trainer: trainers.Trainer) -> None:
    backend.train_from_iterator(prose().splitlines(keepends=True), trainer)


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]


class Reciter:
    """Logits of a model that knows `prose` by heart, in the tokens of any tokenizer: it looks at the last letters and
    digits, and goes on from the nearest place where they stand.

    Args:
        every: one token of so many, by its position, is another one; 0 for none.
        peak: logit of what comes next; all others have 0.
    """

    def __init__(self, lexicon: Lexicon, *, every: int = 0, peak: float = 12.0) -> None:
        self._lexicon, self._every, self._peak = lexicon, every, peak
        self._text = prose().encode()
        self._ends = [index + 1 for index, byte in enumerate(self._text) if _is_letter(byte)]
        self._letters = _letters(self._text)

    def __call__(self, prefix: tuple[int, ...]) -> list[float]:
        size = len(prefix)
        wrong = self._every and (size * 2654435761 >> 7) % self._every == 0
        at = self._place(self._lexicon.spell(list(prefix))) + (300 if wrong else 0)
        logits = [0.0] * len(self._lexicon.pieces)
        logits[(self._lexicon.encode(self._text[at : at + 40]) or [5])[0]] = self._peak
        return logits

    def _place(self, said: bytes) -> int:
        letters = _letters(said)
        found = re.finditer(re.escape(letters[-8:]), self._letters) if letters else ()
        end = min((match.end() for match in found), key=lambda one: abs(one - len(letters)), default=0)
        at = self._ends[end - 1] if end else min(len(said), len(self._text) - 400)
        rest = said[len(said.rstrip(_SEPARATORS)) :]
        return at + len(rest) if self._text.startswith(rest, at) else at


_SEPARATORS = bytes(byte for byte in range(128) if not chr(byte).isalnum())


def _is_letter(byte: int) -> bool:
    return byte not in _SEPARATORS


def _letters(text: bytes) -> bytes:
    return text.lower().translate(None, _SEPARATORS)


def reciting(tokenizer: PreTrainedTokenizerBase, **settings: float) -> Engine:
    """An engine of that model, with the tokenizer's vocabulary."""
    vocabulary = vocabulary_of(tokenizer)
    lexicon = Lexicon(tokenizer, "the model", vocabulary.size)
    engine = ScriptedEngine(Reciter(lexicon, **settings), vocab_size=vocabulary.size)  # type: ignore[arg-type]
    return ChangedEngine(engine, info=replace(served_as(engine.info, vocabulary), tokenizer=tokenizer))


def saved(tokenizer: PreTrainedTokenizerBase, directory: Path) -> str:
    """A MODEL that is a tokenizer alone."""
    tokenizer.save_pretrained(directory)
    tiny_config("llama").save_pretrained(directory)
    return str(directory)
