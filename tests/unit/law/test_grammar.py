"""Masks against an oracle that knows nothing of llguidance: a token is allowed when some member goes on that way."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.law import grammar as module
from outrider.law.adjust import RowContext
from outrider.law.grammar import MAX_GRAMMAR_BYTES, GrammarError, Grammars
from outrider.law.language import Language
from outrider.law.masking import forbid, word_count
from outrider.law.params import LawParams, ParamError, from_law_spec, to_law_spec
from outrider.law.transforms import NonFiniteLogits, greedy_tokens, law_probs
from outrider.law.tree import Tree
from outrider.v1.types_pb2 import Grammar, LawSpec

# Two ways to spell "ab", two tokens that are "b", a token without a text, one that is no UTF-8, and an ordinary stop.
TOKENS = [b"a", b"b", b"ab", b"b", None, b"ba", b"c", b"\xff", b"abc", b"d"]
VOCAB, STOP, ORDINARY_STOP = len(TOKENS), 4, 9
STOPS = (STOP, ORDINARY_STOP)
REGEX = Language("regex", "(ab|ba)+c?d*")
PROMPT = [7, 7, 7]


def make(language=REGEX, stops=STOPS):
    return Grammars(lambda: TOKENS).state(language, len(PROMPT), stops)


def int32(tokens):
    return np.array(tokens, np.int32)


def ids(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


EVERY = set(range(VOCAB))


def members(length=9):
    """Texts of the language up to a length; long enough for every prefix below to have its continuations."""
    letters = (b"a", b"b", b"c", b"d")
    texts = (b"".join(text) for n in range(length) for text in itertools.product(letters, repeat=n))
    return {text for text in texts if re.fullmatch(b"(ab|ba)+c?d*", text)}


MEMBERS = members()
PREFIXES = {text[:n] for text in MEMBERS for n in range(len(text) + 1)}


def spelled(tokens):
    return b"".join(TOKENS[token] or b"" for token in tokens)


def oracle(generated):
    """The tokens that may follow: those that a member goes on with, and the stops after a member."""
    text = spelled(generated)
    allowed = {token for token in EVERY - {*STOPS} if TOKENS[token] and text + TOKENS[token] in PREFIXES}
    return allowed | ({*STOPS} if text in MEMBERS else set())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=3), max_size=5), st.randoms())
def test_a19_the_state_is_the_replay_of_the_tokens_whatever_was_tried(blocks, random):
    state, committed = make(), []
    for block in blocks:
        if len(spelled(committed)) > 3:
            break
        rows = state.masks(int32(PROMPT + committed + block), len(PROMPT) + len(committed))
        alive, path = True, list(committed)
        for row, token in zip(rows, [*block, None], strict=True):
            expected = oracle(path) if alive and len(spelled(path)) < 6 else None
            assert expected is None or ids(row) == expected
            assert alive or ids(row) == EVERY
            alive = alive and token in ids(row) and token not in STOPS
            path.append(token)
        choices = sorted(oracle(committed) - {*STOPS})
        if not choices:
            break
        committed.append(random.choice(choices))


def test_every_spelling_is_allowed_and_not_only_the_tokenizers_own():
    rows = make(Language("regex", "abc")).masks(int32([*PROMPT, 0, 1]), len(PROMPT))
    assert [ids(row) for row in rows] == [{0, 2, 8}, {1, 3}, {6}]


def test_stop_tokens_end_the_output_exactly_where_it_is_a_member():
    rows = make().masks(int32([*PROMPT, 0, 1, STOP, 0]), len(PROMPT))
    assert [STOP in ids(row) for row in rows[:3]] == [False, False, True]
    # "d" may stand there by the language, but this session ends with it.
    assert [ORDINARY_STOP in ids(row) for row in rows[:3]] == [False, False, True]
    assert ids(rows[3]) == ids(rows[4]) == EVERY
    assert ORDINARY_STOP in ids(make(stops=(STOP,)).masks(int32([*PROMPT, 2]), len(PROMPT) + 1)[0])


def test_legal_counts_up_to_the_first_illegal_candidate():
    state = make()
    before = int32([*PROMPT, 0])
    for candidates, count in (([], 0), ([0], 0), ([1, 2, 7], 2), ([1, STOP], 2), ([1, STOP, 0], 2), ([STOP], 0)):
        assert state.legal(before, int32(candidates)) == count
        assert state.legal(before, int32([3])) == 1


def test_committed_tokens_outside_the_language_are_refused():
    state = make()
    for wrong in ([6], [0, 1, STOP, 0], [7]):
        with pytest.raises(GrammarError, match="committed"):
            state.masks(int32(PROMPT + wrong), len(PROMPT) + len(wrong))
    assert ids(state.masks(int32(PROMPT), len(PROMPT))[0]) == oracle([])


def test_a_candidate_that_leads_nowhere_does_not_end_the_session():
    state = make(Language("regex", "aZ|bc"))
    for _ in range(2):
        rows = state.masks(int32([*PROMPT, 0]), len(PROMPT))
        assert ids(rows[0]) == {0, 1, 3}
        assert ids(rows[1]) == EVERY
        with pytest.raises(GrammarError, match="no token of the vocabulary can go on"):
            state.masks(int32([*PROMPT, 0]), len(PROMPT) + 1)
    assert ids(state.masks(int32([*PROMPT, 1]), len(PROMPT) + 1)[0]) == {6}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "ab\\", "escape sequence"),
        ("regex", "Z", "no token of the vocabulary can go on"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), f"limit {MAX_GRAMMAR_BYTES}"),
        ("json_schema", "{", "no JSON"),
        ("json_schema", "{}\nx: y", "no JSON"),
        ("json_schema", "[]", "no JSON object"),
        ("json_schema", "[" * 100_000, "no JSON"),
        ("json_schema", '{"type": "nope"}', "nope"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
        ("lark", 'rule: "a"', "no start rule"),
        ("lark", 'start: "a" foo', "foo"),
    ],
)
def test_a19_what_cannot_be_compiled_is_refused_with_a_sentence(kind, text, message):
    with pytest.raises(ParamError, match=message) as caught:
        make(Language(kind, text))
    assert caught.value.field == f"grammar.{kind}"
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_all_three_kinds_mean_the_same():
    kinds = [Language("regex", "a(b|c)"), Language("lark", 'start: "a" ("b" | "c")')]
    one, other = ([ids(row) for row in make(one).masks(int32([*PROMPT, 0]), len(PROMPT))] for one in kinds)
    assert one == other == [{0, 2}, {1, 3, 6}]


def test_compiled_grammars_are_kept_and_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MAX_COMPILED", 2)
    grammars = Grammars(lambda: TOKENS)
    compiled = []
    real = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda language: compiled.append(language.text) or real(language))
    for text in ("a", "a", "b", "a", "c", "a", "b"):
        grammars.state(Language("regex", text), 0, STOPS)
    assert compiled == ["a", "b", "c", "b"]
    assert len(grammars._compiled) == 2


def test_sessions_of_one_grammar_do_not_meet():
    grammars = Grammars(lambda: TOKENS)
    one, other = (grammars.state(REGEX, 0, STOPS) for _ in range(2))
    one.masks(int32([0, 1, 6]), 3)
    assert ids(other.masks(int32([]), 0)[0]) == oracle([])
    assert ids(one.masks(int32([0, 1, 6]), 3)[0]) == oracle([0, 1, 6])


@pytest.mark.parametrize("greedy", [False, True])
def test_masked_rows_are_laws_and_others_are_untouched(greedy):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, VOCAB + 2, generator=generator)
    mask = make().masks(int32(PROMPT), len(PROMPT))[0]
    params = LawParams(temperature=0.0 if greedy else 0.7, top_k=3)
    contexts = [RowContext(params, int32(PROMPT), mask if row % 2 else None) for row in range(4)]
    plain = law_probs(logits, [RowContext(params, int32(PROMPT))] * 4, VOCAB)
    probs = law_probs(logits, contexts, VOCAB)
    assert torch.equal(probs[::2], plain[::2])
    allowed = sorted(ids(mask))
    alone = logits.clone()
    alone[:, [token for token in range(VOCAB) if token not in allowed]] = -torch.inf
    expected = law_probs(alone, [RowContext(params, int32(PROMPT))] * 4, VOCAB)
    assert torch.equal(probs[1::2], expected[1::2])
    if greedy:
        assert greedy_tokens(logits, contexts, VOCAB).tolist() == probs.argmax(1).tolist()


def test_a_mask_and_a_ban_that_leave_nothing_are_named():
    params = LawParams(logit_bias=((6, -100.0),))
    mask = make(Language("regex", "abc")).masks(int32([*PROMPT, 0, 1]), len(PROMPT) + 2)[0]
    with pytest.raises(NonFiniteLogits):
        law_probs(torch.zeros(1, VOCAB), [RowContext(params, int32(PROMPT), mask)], VOCAB)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70])
def test_masks_are_applied_bit_by_bit(vocab):
    rng = np.random.default_rng(vocab)
    words = rng.integers(0, 2**32, size=(3, word_count(vocab)), dtype=np.uint64).astype(np.uint32)
    scores = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    masked = forbid(scores, [(row, words[row]) for row in range(3)])
    for row, token in itertools.product(range(4), range(vocab)):
        allowed = row == 3 or int(words[row][token // 32]) >> token % 32 & 1
        assert masked[row, token] == (scores[row, token] if allowed else -torch.inf)


def test_the_language_travels_with_the_law():
    for kind in ("json_schema", "regex", "lark"):
        params = LawParams(grammar=Language(kind, "{}"), prompt_length=3, stop_token_ids=(4,))
        assert from_law_spec(to_law_spec(params, 9)) == (params, 9)
    with pytest.raises(ParamError, match=r"law\.grammar names no language"):
        from_law_spec(LawSpec(grammar=Grammar()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tree_has_the_masks_of_its_paths(data):
    """Illegal candidates, stop tokens and their descendants among them; the committed tokens move on in between."""
    state, committed = make(), []
    for _ in range(2):
        count = data.draw(st.integers(2, 7))
        shape = Tree.of(np.array(sorted(data.draw(st.integers(0, it)) for it in range(count)), np.int32))
        tokens = int32([*PROMPT, *committed, *(data.draw(st.integers(0, VOCAB - 1)) for _ in range(count))])
        first = len(PROMPT) + len(committed)
        rows = state.masks(tokens, first, shape)
        for row in range(count + 1):
            path = np.arange(row) if shape is None else np.array(shape.path(row), np.int64)
            alone = make().masks(np.concatenate([tokens[:first], tokens[first + path]]), first)
            assert rows[row].tolist() == alone[-1].tolist()
        following = sorted(ids(rows[0]) - set(STOPS))
        if not following:
            return
        committed.append(data.draw(st.sampled_from(following)))
