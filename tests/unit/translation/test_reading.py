"""What the draft model reads is the text of the target's tokens, however these came about."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.translation.lexicon import Lexicon
from draft_service.translation.reading import Reading
from draft_service.translation.vocabularies import Vocabularies
from outrider.lm.engine import ModelRefused
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import synthetic_tokenizer
from tests.harness.system import synthetic
from tests.harness.vocabularies import MORE_OWN, OWN, between, characters, prose, target_tokenizer

ALL = OWN | MORE_OWN
NAMES = list(ALL)
LOSSLESS = [name for name, (_, lossless) in ALL.items() if lossless]
# Beyond what tests read.
PLENTY = 1_000_000
BEGIN, END, MARK = 0, 1, 2


@cache
def vocabularies(name: str) -> Vocabularies:
    own = ALL[name][0]()
    return between(target_tokenizer(), own, synthetic(vocab_size=len(own), context_length=PLENTY))


def reading(of: Vocabularies, most: int = PLENTY) -> Reading:
    return Reading(of.target, of.own, of.shared, most)


def text_of(of: Vocabularies, tokens: list[int]) -> bytes:
    return of.target.spell(tokens)


def own_text(of: Vocabularies, ids: list[int]) -> bytes:
    """Without the space that is none."""
    text = of.own.spell(ids)
    return text.removeprefix(b" ") if of.own.leads else text


def random_tokens(chance: random.Random, size: int) -> list[int]:
    """Unicode of every kind in pieces as the tokenizer makes them, amid tokens at random: halves of characters,
    bytes that are no text, special tokens."""
    tokens: list[int] = []
    while len(tokens) < size:
        kind = chance.random()
        if kind < 0.2:
            tokens.append(chance.randrange(len(target_tokenizer())))
        elif kind < 0.5:
            at = chance.randrange(len(prose()) - 40)
            tokens += target_tokenizer()(prose()[at : at + 40], add_special_tokens=False).input_ids
        else:
            points = (chance.choice([(32, 127), (0x80, 0x800), (0x3000, 0xD800), (0x1F300, 0x1FB00)]) for _ in range(8))
            text = "".join(chr(chance.randrange(*span)) for span in points)
            tokens += target_tokenizer()(text, add_special_tokens=False).input_ids
    return tokens[:size]


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_session_of_thousands_of_tokens_never_drifts(name: str) -> None:
    """It goes token by token, with steps back; at the end it reads as if it had been read at once."""
    of, chance = vocabularies(name), random.Random(5)
    one = reading(of)
    for token in random_tokens(chance, 3500):
        one.extend([token])
        if chance.random() < 0.05:
            one.truncate(len(one.tokens) - chance.randrange(min(20, len(one.tokens))))
        if chance.random() < 0.02 or len(one.tokens) < 50:
            assert own_text(of, one.ids) == text_of(of, one.tokens)
    assert len(one.tokens) > 1500
    assert own_text(of, one.ids) == text_of(of, one.tokens)
    fresh = reading(of)
    fresh.extend(one.tokens)
    assert one.ids == fresh.ids


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_is_read_depends_on_the_tokens_alone(name: str, data: st.DataObject) -> None:
    """And what is said to be unchanged is."""
    of = vocabularies(name)
    one, before = reading(of), []
    tokens = st.lists(st.integers(0, len(target_tokenizer()) - 1), max_size=40)
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            one.truncate(data.draw(st.integers(0, len(one.tokens))))
        one.extend(data.draw(tokens))
        fresh = reading(of)
        fresh.extend(one.tokens)
        assert one.ids == fresh.ids
        kept = one.unchanged()
        assert one.ids[:kept] == before[:kept]
        before = list(one.ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=60))
def test_text_is_never_a_special_token(name: str, text: str) -> None:
    of = vocabularies(name)
    for written in (text, f"{text}</s>{text}", f"<s>{text} <|im_end|>", "<unk>[UNK]"):
        one = reading(of)
        one.extend(of.target.encode(written.encode()))
        assert not set(of.own.specials.values()) & set(one.ids[len(of.own.start) :])
        if ALL[name][1]:
            assert own_text(of, one.ids) == written.encode()


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_those_of_the_same_name(name: str) -> None:
    of = vocabularies(name)
    one = reading(of)
    words = of.target.encode(b"a word")
    one.extend([BEGIN, *words, MARK, *words, END])
    twins = [token for token in one.ids if token in of.own.specials.values()]
    names = ["<|im_end|>", "</s>"]
    # A draft model that begins texts by itself is not told to do so twice.
    assert twins == [of.own.specials["<s>"], *(of.own.specials[name] for name in names)]


def test_half_a_character_is_read_as_its_bytes() -> None:
    of = vocabularies("sentencepiece")
    one = reading(of)
    tokens = of.target.encode("x 語".encode())
    assert [of.target.pieces[token] for token in tokens[-3:]] == [b"\xe8", b"\xaa", b"\x9e"]
    one.extend(tokens[:-1])
    assert own_text(of, one.ids) == b"x \xe8\xaa"
    assert of.own.pieces[one.ids[-1]] == b"\xaa"
    one.extend(tokens[-1:])
    assert own_text(of, one.ids) == "x 語".encode()


def test_a_word_that_goes_on_is_read_anew() -> None:
    """Two of the target's tokens may be one of the draft's."""
    of = vocabularies("larger byte-level")
    one = reading(of)
    whole = next(
        piece
        for piece in of.own.ids
        if len(piece) > 4 and piece not in of.target.ids and len(of.own.encode(piece)) == 1 and piece.isalpha()
    )
    parts = of.target.encode(whole)
    assert len(parts) > 1
    one.extend(parts[:1])
    one.unchanged()
    one.extend(parts[1:])
    assert one.ids == of.own.encode(whole)
    assert one.unchanged() == 0


def test_a_token_costs_no_more_in_a_long_session(monkeypatch: pytest.MonkeyPatch) -> None:
    of, sizes = vocabularies("smaller byte-level"), []
    encode = Lexicon.encode

    def counted(lexicon: Lexicon, data: bytes) -> list[int]:
        sizes.append(len(data))
        return encode(lexicon, data)

    one = reading(of)
    one.extend(of.target.encode(prose()[:60_000].encode()))
    monkeypatch.setattr(Lexicon, "encode", counted)
    for token in of.target.encode(b"x" * 3000) + random_tokens(random.Random(1), 500):
        sizes.clear()
        one.extend([token])
        assert sum(sizes) < 2000


@pytest.mark.parametrize("most", [64, 1000])
@pytest.mark.parametrize("name", LOSSLESS)
def test_what_is_too_long_is_read_from_a_later_point_on(name: str, most: int) -> None:
    of, chance = vocabularies(name), random.Random(9)
    one, before = reading(of, most), []
    for step, token in enumerate(random_tokens(chance, 3000)):
        one.extend([token])
        if chance.random() < 0.02:
            one.truncate(len(one.tokens) - chance.randrange(min(40, len(one.tokens))))
        assert len(one.ids) <= most
        kept = one.unchanged()
        assert one.ids[:kept] == before[:kept]
        before = list(one.ids)
        assert tuple(one.ids[: len(of.own.start)]) == of.own.start
        if step % 20 == 0:
            assert text_of(of, one.tokens).endswith(own_text(of, one.ids[len(of.own.start) :]))
    one.truncate(10)
    assert own_text(of, one.ids) == text_of(of, one.tokens)


def test_a_vocabulary_of_only_other_characters_is_refused() -> None:
    own = synthetic_tokenizer(SyntheticSpec(vocab_size=16))
    with pytest.raises(ModelRefused, match=r"shares 0 of its 16 tokens with the target: too few to draft for it"):
        between(characters("日本語訳"), own, synthetic())
    shared = between(characters("zba"), own, synthetic()).shared
    assert (shared.targets.tolist(), shared.own.tolist()) == ([1, 2], [1, 0])


@pytest.mark.parametrize("name", NAMES)
def test_shared_tokens_spell_the_same(name: str) -> None:
    """Each token has one counterpart at most, and what both can spell by a token is shared."""
    of = vocabularies(name)
    pairs = list(zip(of.shared.targets.tolist(), of.shared.own.tolist(), strict=True))
    spelled = [(of.target.pieces[target], of.own.pieces[own]) for target, own in pairs]
    assert all(one == other for one, other in spelled)
    assert sum(one is not None for one, _ in spelled) == of.shared.spelled == len(of.target.ids.keys() & of.own.ids)
    assert len({own for _, own in pairs}) == len(pairs)
    assert of.shared.targets_of(of.shared.own).tolist() == of.shared.targets.tolist()
    assert of.shared.own_of(tuple(range(of.shared.size))) == dict(pairs)
