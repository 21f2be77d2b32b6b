"""What is drawn in own tokens is told in the target's, as the target's tokenizer would have it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.translation.reading import Reading
from draft_service.translation.retelling import Retold, retell
from draft_service.translation.vocabularies import Vocabularies
from tests.harness.vocabularies import OWN, prose, target_tokenizer
from tests.unit.translation.test_reading import LOSSLESS, NAMES, reading, vocabularies

MARK, END = 2, 1


def read(of: Vocabularies, tokens: list[int]) -> Reading:
    one = reading(of)
    one.extend(tokens)
    return one


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_is_told_is_the_text_and_settled_tokens_stay(name: str, data: st.DataObject) -> None:
    """Token by token, after any tokens of the target: each step tells what is drawn so far."""
    of = vocabularies(name)
    before = data.draw(st.lists(st.integers(0, len(target_tokenizer()) - 1), max_size=6))
    context = read(of, [*before, *of.target.encode(data.draw(st.text(max_size=20)).encode())])
    ordinary = sorted(set(of.own.ids.values()))
    drawn = data.draw(st.lists(st.sampled_from(ordinary), min_size=1, max_size=8))
    for size in range(1, len(drawn) + 1):
        told = retell(of, context, drawn[:size])
        assert of.target.spell(told.tokens) == of.own.spell(drawn[:size])
        assert None not in [of.target.pieces[token] for token in told.tokens]
        assert 0 <= told.settled <= len(told.tokens)
        assert not told.ended


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name in OWN])
def test_prose_is_told_in_the_tokens_that_the_target_would_use(name: str) -> None:
    """From any token on, and what is settled is right."""
    of, text = vocabularies(name), prose()[2000:5000].encode()
    tokens = of.target.encode(text)
    right = settled = 0
    for start in range(20, 400, 7):
        context = read(of, tokens[:start])
        rest = of.target.spell(tokens[start:])[:60]
        drawn = of.own.encode(rest)[:6]
        told = retell(of, context, drawn)
        settled += told.settled
        right += sum(a == b for a, b in zip(told.tokens[: told.settled], tokens[start:], strict=False))
    assert settled > 150
    assert right > 0.9 * settled


def test_a_word_that_the_target_began_goes_on() -> None:
    """The target's tokenizer has one token for it, and the target said it in two."""
    of = vocabularies("smaller byte-level")
    (whole,) = of.target.encode(b" return")
    parts = [of.target.ids[b" re"], *of.target.encode(b"tur")]
    context = read(of, [*of.target.encode(b"if x:\n   "), *parts])
    told = retell(of, context, of.own.encode(b"n value"))
    assert of.target.spell(told.tokens) == b"n value"
    # Said by its one token the word is over.
    context = read(of, [*of.target.encode(b"if x:\n   "), whole])
    told = retell(of, context, of.own.encode(b" value"))
    assert told.tokens == of.target.encode(b" value")


def test_a_character_that_is_not_whole_is_not_settled() -> None:
    of = vocabularies("sentencepiece")
    context = read(of, of.target.encode(b"in "))
    drawn = [of.own.ids[bytes([byte])] for byte in "語".encode()]
    for size, (tokens, settled) in enumerate([(1, 0), (2, 0), (3, 3)], start=1):
        told = retell(of, context, drawn[:size])
        assert (len(told.tokens), told.settled) == (tokens, settled)
        assert of.target.spell(told.tokens) == "語".encode()[:size]


def test_a_token_that_more_text_would_change_is_not_settled() -> None:
    """One of the target's is several own ones here: it may still grow."""
    of = vocabularies("smaller byte-level")
    long = next(
        piece for piece in of.target.ids if piece.isalpha() and len(piece) > 5 and len(of.own.encode(piece)) > 2
    )
    context, drawn = read(of, of.target.encode(b"in ")), of.own.encode(long)
    assert retell(of, context, drawn) == Retold([of.target.ids[long]], 0, ended=False)
    told = retell(of, context, [*drawn, of.own.ids[b"\n"]])
    assert told == Retold([of.target.ids[long], of.target.ids[b"\n"]], 2, ended=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_special_token_ends_what_is_told(name: str) -> None:
    of = vocabularies(name)
    context = read(of, of.target.encode(b"the end"))
    drawn = of.own.encode(b".")
    told = retell(of, context, [*drawn, of.own.specials["</s>"], 5, 6])
    assert told.ended
    assert told.settled == len(told.tokens)
    assert told.tokens[-1] == END
    assert of.target.spell(told.tokens) == of.own.spell(drawn)


def test_a_special_token_of_the_draft_alone_is_told_as_nothing() -> None:
    of = vocabularies("sentencepiece")
    context = read(of, of.target.encode(b"the end"))
    told = retell(of, context, [of.own.specials["<unk>"], 300])
    assert (told.tokens, told.ended) == ([], True)


@pytest.mark.parametrize("name", LOSSLESS)
def test_names_of_special_tokens_are_told_as_text(name: str) -> None:
    of = vocabularies(name)
    context = read(of, [MARK, *of.target.encode(b"say ")])
    told = retell(of, context, of.own.encode(b"</s> and <|im_end|>"))
    assert of.target.spell(told.tokens) == b"</s> and <|im_end|>"
    assert not {0, 1, 2} & set(told.tokens)
