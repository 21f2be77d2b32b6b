"""The deltas of a generation add up to what the tokenizer itself decodes."""

import os
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from orchestrator.text.detokenizer import Detokenizer, PieceDetokenizer, Spelling, WindowDetokenizer
from outrider.law.sparse import Int32Array
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import load_tokenizer, synthetic_tokenizer
from tests.harness.tiny_tokenizers import (
    CORPUS,
    MIXED,
    byte_fallback,
    byte_level,
    gemma_like,
    text_after,
    unigram,
    word_piece,
)

REAL = os.environ.get("OUTRIDER_TEST_GGUF")
Builder = Callable[[], PreTrainedTokenizerBase]


@cache
def real() -> PreTrainedTokenizerBase:
    if REAL is None:
        pytest.skip("OUTRIDER_TEST_GGUF names no GGUF file")
    return load_tokenizer(f"gguf:{REAL}")


def array(tokens: list[int]) -> Int32Array:
    return np.array(tokens, dtype=np.int32)


def deltas(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


TOKENWISE = [byte_level, byte_fallback, gemma_like, unigram]


@pytest.mark.parametrize("build", [*TOKENWISE, real])
@pytest.mark.parametrize("text", [MIXED, *CORPUS, " ", "  a  b ", "\n\n\t", "é<tool>é", "日本語る"])
def test_d7_text_comes_out_whole(build: Builder, text: str) -> None:
    tokenizer = build()
    spelling = Spelling(tokenizer)
    tokens = encode(tokenizer, text)
    for cut in range(len(tokens) + 1):
        prompt, generated = tokens[:cut], tokens[cut:]
        if "\ufffd" in tokenizer.decode(prompt):
            continue  # inside a character: test_a_character_that_the_prompt_leaves_open
        pieces = deltas(spelling.detokenizer(array(prompt)), generated)
        assert "".join(pieces) == text_after(tokenizer, prompt, generated)
        assert all("\ufffd" not in piece and piece.encode("utf-8") is not None for piece in pieces)


def test_the_families_take_the_exact_path() -> None:
    prompt = array([5])
    for build in TOKENWISE:
        assert isinstance(Spelling(build()).detokenizer(prompt), PieceDetokenizer)
    assert isinstance(Spelling(synthetic_tokenizer(SyntheticSpec())).detokenizer(prompt), PieceDetokenizer)
    assert isinstance(Spelling(word_piece()).detokenizer(prompt), WindowDetokenizer)


def test_characters_are_not_kept_waiting() -> None:
    for build in TOKENWISE:
        tokenizer = build()
        tokens = encode(tokenizer, "한a")
        *head, last = deltas(Spelling(tokenizer).detokenizer(array(encode(tokenizer, "a"))), tokens)
        assert last == ""
        assert head[-1].endswith("a")


ids = st.lists(st.integers(0, 420), max_size=12)


@pytest.mark.parametrize("build", [byte_level, unigram])
@given(prompt=ids, generated=ids)
@settings(max_examples=300, deadline=None)
def test_any_tokens_at_all(build: Builder, prompt: list[int], generated: list[int]) -> None:
    """Invalid bytes, special tokens and ids that the vocabulary does not hold included."""
    tokenizer = build()
    detokenizer = Spelling(tokenizer).detokenizer(array(prompt))
    if detokenizer.fork().flush():
        return  # the prompt ends inside a character
    assert "".join(deltas(detokenizer, generated)) == text_after(tokenizer, prompt, generated)


BYTE_0 = 3  # id of <0x00>
TEXT = st.sampled_from(["▁", "t", "he", "▁the", "▁▁", "é"])
WHOLE = st.characters(exclude_categories=["Cs"]).map(lambda character: list(character.encode()))
BROKEN = st.sampled_from([[0xFF], [0xE3, 0x81], [0xF0, 0x9F, 0x98], [0x80], [0xC0, 0xAF], [0xED, 0xA0, 0x80]])
VALID_RUN = st.lists(WHOLE, min_size=1, max_size=3).map(lambda runs: [byte for run in runs for byte in run])
SPECIAL = st.sampled_from([0, 1, 2])


@st.composite
def fallback_tokens(draw: st.DrawFn) -> list[int]:
    """Text tokens and runs of byte tokens, each run either valid or without any complete character."""
    vocab = byte_fallback().get_vocab()
    tokens: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        tokens.append(draw(st.one_of(TEXT.map(vocab.__getitem__), SPECIAL)))
        if tokens[-1] > 2:
            tokens += [BYTE_0 + byte for byte in draw(st.one_of(VALID_RUN, BROKEN, st.just([])))]
    return tokens


@pytest.mark.parametrize("build", [byte_fallback, gemma_like])
@given(prompt=fallback_tokens(), generated=fallback_tokens())
@example(prompt=[], generated=[BYTE_0 + 0x20, BYTE_0 + 0x20])
@example(prompt=[0], generated=[0, BYTE_0 + 0x20, BYTE_0 + 0xED, 2, BYTE_0 + 0x95, BYTE_0 + 0x9C])
@settings(max_examples=300, deadline=None)
def test_any_byte_fallback_tokens(build: Builder, prompt: list[int], generated: list[int]) -> None:
    tokenizer = build()
    prompt = [*prompt, tokenizer.get_vocab()["he"]] if any(token > 2 for token in prompt) else prompt
    pieces = deltas(Spelling(tokenizer).detokenizer(array(prompt)), generated)
    assert "".join(pieces) == text_after(tokenizer, prompt, generated)


def test_a_broken_run_leaves_what_was_streamed() -> None:
    """The one documented difference: tokenizers would spell all four bytes as U+FFFD."""
    tokenizer = byte_fallback()
    vocab = tokenizer.get_vocab()
    run = [BYTE_0 + byte for byte in "한".encode()] + [BYTE_0 + 0xE3]
    pieces = deltas(Spelling(tokenizer).detokenizer(array([vocab["he"]])), [*run, vocab["he"]])
    assert pieces == ["", "", "한", "", "\ufffdhe", ""]
    assert text_after(tokenizer, [vocab["he"]], run) == "\ufffd" * 4


def test_l4_bytes_that_are_no_character_stream_as_u_fffd() -> None:
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab()
    broken = [vocab["ÿ"], vocab["þ"], vocab["a"]]  # FF FE in GPT-2's spelling
    assert deltas(Spelling(tokenizer).detokenizer(array([vocab["a"]])), broken) == ["\ufffd", "\ufffd", "a", ""]


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_a_character_that_the_prompt_leaves_open(build: Builder) -> None:
    tokenizer = build()
    tokens = encode(tokenizer, "the 😀 the")
    texts = {
        "".join(deltas(Spelling(tokenizer).detokenizer(array(tokens[:cut])), tokens[cut:]))
        for cut in range(len(tokens))
        if "\ufffd" in tokenizer.decode(tokens[:cut])
    }
    assert texts == {"😀 the"}


@pytest.mark.parametrize("build", [byte_fallback, unigram])
def test_a_leading_space_belongs_to_the_text_unless_it_starts_it(build: Builder) -> None:
    tokenizer = build()
    the = encode(tokenizer, "the")
    assert str(tokenizer.convert_ids_to_tokens(the[0])).startswith("▁")
    beginning = tokenizer.get_vocab()["<s>"]
    spelling = Spelling(tokenizer)
    assert "".join(deltas(spelling.detokenizer(array([beginning])), the)) == "the"
    assert "".join(deltas(spelling.detokenizer(array([beginning, *the])), the)) == " the"


def test_special_tokens_have_no_text_and_added_ones_have() -> None:
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab()
    tokens = [vocab["<|im_end|>"], vocab["<tool>"], vocab["</s>"], 10**6, -1]
    assert deltas(Spelling(tokenizer).detokenizer(array([5])), tokens) == ["", "<tool>", "", "", "", ""]


def test_other_decoders() -> None:
    tokenizer = word_piece()
    tokens = [tokenizer.get_vocab()[word] for word in ["the", "quick", "##er", "dog", "##s", "</s>", ".", "the"] * 5]
    for cut in range(1, len(tokens)):
        pieces = deltas(Spelling(tokenizer).detokenizer(array(tokens[:cut])), tokens[cut:])
        assert "".join(pieces) == text_after(tokenizer, tokens[:cut], tokens[cut:])


@pytest.mark.parametrize("text", [MIXED, *CORPUS])
def test_the_window_agrees_on_valid_text(text: str) -> None:
    tokenizer = byte_level()
    tokens = encode(tokenizer, "the " + text)
    pieces = deltas(WindowDetokenizer.after(tokenizer, array(tokens[:1])), tokens[1:])
    assert "".join(pieces) == text_after(tokenizer, tokens[:1], tokens[1:])
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_window_gives_up_on_bytes_that_are_no_character() -> None:
    tokenizer = byte_level()
    broken = [tokenizer.get_vocab()["ÿ"]] * 50
    pieces = deltas(WindowDetokenizer.after(tokenizer, array([5])), broken)
    assert "".join(pieces) == "\ufffd" * 50
    assert max(map(len, pieces)) <= 3


@pytest.mark.parametrize("build", [byte_level, byte_fallback, word_piece])
def test_a_fork_is_independent(build: Builder) -> None:
    tokenizer = build()
    tokens = encode(tokenizer, "the 😀 the" if build is not word_piece else "the quick dog")
    one = Spelling(tokenizer).detokenizer(array(tokens[:1]))
    for index, token in enumerate(tokens[1:], start=1):
        rest = tokens[index:]
        fork = one.fork()
        assert deltas(fork, rest) == deltas(one.fork(), rest)
        one.push(token)


def test_names() -> None:
    spelling = Spelling(byte_level())
    assert spelling.name(byte_level().get_vocab()["</s>"]) == "</s>"
    assert spelling.name(10**6) == ""
