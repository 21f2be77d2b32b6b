"""Grammars over the tokenizers of real families: what is matched is what the client reads."""

import json
import random

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from orchestrator.text.detokenizer import Spelling
from outrider.law.language import Language
from outrider.law.params import LawParams
from outrider.lm.grammars import SessionGrammar, SessionGrammars
from outrider.net.errors import OutriderError
from tests.harness import tiny_tokenizers
from tests.harness.workers import int32

SCHEMA = {
    "type": "object",
    "properties": {"naïve": {"type": "string", "maxLength": 8}, "n": {"enum": [True, None, "the café"]}},
    "required": ["naïve", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def law(tokenizer: PreTrainedTokenizerBase, language: Language, prompt_length: int) -> LawParams:
    return LawParams(grammar=language, prompt_length=prompt_length, stop_token_ids=(tokenizer.eos_token_id,))


def opened(tokenizer: PreTrainedTokenizerBase, params: LawParams) -> SessionGrammar:
    state = SessionGrammars(tokenizer, len(tokenizer)).open(params)
    assert state is not None
    return state


def drawn(tokenizer: PreTrainedTokenizerBase, language: Language, prompt: list[int], seed: int) -> str:
    """A text drawn evenly from what the masks allow, as the detokenizer shows it."""
    chosen, tokens = random.Random(seed), list(prompt)
    state = opened(tokenizer, law(tokenizer, language, len(prompt)))
    while True:
        mask = state.masks(int32(tokens), len(tokens))[0]
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(tokenizer)]
        tokens.append(chosen.choice(np.flatnonzero(bits).tolist()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    text = Spelling(tokenizer).detokenizer(int32(prompt))
    return "".join(text.push(token) for token in tokens[len(prompt) : -1]) + text.flush()


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "gemma_like"])
def test_a19_random_legal_tokens_spell_json(family: str) -> None:
    tokenizer = getattr(tiny_tokenizers, family)()
    prompt = tokenizer("the").input_ids
    for seed in range(10):
        value = json.loads(drawn(tokenizer, Language("json_schema", json.dumps(SCHEMA)), prompt, seed))
        assert list(value) == ["naïve", "n"]
        assert len(value["naïve"]) <= 8
        assert value["n"] in (True, None, "the café")


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "gemma_like", "unigram"])
def test_a19_spaces_and_characters_of_several_bytes_are_matched_as_shown(family: str) -> None:
    tokenizer = getattr(tiny_tokenizers, family)()
    prompt = tokenizer("the").input_ids
    for seed in range(5):
        assert drawn(tokenizer, Language("regex", " ?(the|é+) quick"), prompt, seed).split()[-1] == "quick"


def test_a_tokenizer_that_looks_across_tokens_refuses_grammars() -> None:
    word_piece = tiny_tokenizers.word_piece()
    for grammars in (SessionGrammars(word_piece, len(word_piece)), SessionGrammars(None, 9)):
        grammars.prepare()
        assert grammars.open(LawParams()) is None
        with pytest.raises(OutriderError, match="no spelling of their own"):
            grammars.open(LawParams(grammar=Language("regex", "a")))


def test_errors_are_those_of_the_wire() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    state = opened(tokenizer, law(tokenizer, Language("regex", "a+"), 0))
    wrong = int32(tokenizer("b").input_ids)
    for call in (lambda: state.masks(wrong, 1), lambda: state.legal(wrong, wrong)):
        with pytest.raises(OutriderError, match="committed"):
            call()
