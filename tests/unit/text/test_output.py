"""What of a round is kept, committed, emitted and counted."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.text.detokenizer import Spelling
from orchestrator.text.output import EmittedToken, Output, RoundToken
from orchestrator.text.stopping import LENGTH, Finish, StopRules, stopped_by
from outrider.law.sparse import Int32Array
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import synthetic_tokenizer
from outrider.v1 import orchestrator_pb2 as pb
from tests.harness.tiny_tokenizers import MIXED, byte_fallback, byte_level, text_after

LETTERS = Spelling(synthetic_tokenizer(SyntheticSpec(vocab_size=26)))
PROMPT: Int32Array = np.array([0], dtype=np.int32)
ORIGINS = [pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_RECOVERED, pb.TOKEN_ORIGIN_BONUS, pb.TOKEN_ORIGIN_PLAIN]


def letters(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def tokens_of(ids: list[int]) -> list[RoundToken]:
    return [RoundToken(token, ORIGINS[index % 4]) for index, token in enumerate(ids)]


@dataclass
class Run:
    committed: list[int]
    emitted: list[EmittedToken]
    finish: Finish | None
    usage: pb.Usage
    rounds: list[list[EmittedToken]]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.emitted)


def run(output: Output, ids: list[int], sizes: list[int]) -> Run:
    """Feeds tokens in rounds of the given sizes, the last size repeated, until the output ends or they do."""
    tokens, committed = tokens_of(ids), list[int]()
    rounds = list[list[EmittedToken]]()
    finish, before, delivered = None, output.generated, output.usage(0).completion_tokens
    while tokens and finish is None:
        size = sizes[min(len(rounds), len(sizes) - 1)]
        kept = output.keep(tokens[:size])
        assert kept.finish is not None or len(kept.tokens) == len(tokens[:size])
        committed += kept.tokens.tolist()
        emission = output.emit(kept)
        assert emission.finish == kept.finish
        finish = kept.finish
        rounds.append(list(emission.tokens))
        tokens = tokens[size:]
        assert output.generated == before + len(committed)
        assert output.usage(0).completion_tokens == delivered + sum(map(len, rounds))
    emitted = [token for tokens in rounds for token in tokens]
    return Run(committed, emitted, finish, output.usage(len(rounds)), rounds)


def reference(ids: list[int], rules: StopRules, spelling: Spelling) -> tuple[int, str, Finish | None]:
    """The definition, token by token over the whole: (tokens kept, text, finish)."""
    detokenizer = spelling.detokenizer(PROMPT)
    shielded, watched = "", ""
    for index, token in enumerate(ids):
        stop_token = index >= rules.min_tokens and token in rules.token_ids
        last = stop_token or index + 1 == rules.max_tokens
        text = "" if stop_token else detokenizer.push(token)
        text += detokenizer.flush() if last else ""
        if index < rules.min_tokens:
            shielded += text
        else:
            for character in text:
                watched += character
                found = [string for string in rules.strings if watched.endswith(string)]
                if found:
                    longest = max(found, key=len)
                    return index + 1, shielded + watched[: -len(longest)], stopped_by(longest)
        if last:
            return index + 1, shielded + watched, stopped_by(spelling.name(token)) if stop_token else LENGTH
    return len(ids), shielded + watched, None


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@st.composite
def stop_rules(draw: st.DrawFn, alphabet: str, top: int) -> StopRules:
    max_tokens = draw(st.integers(1, 24))
    return StopRules(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        strings=tuple(draw(st.lists(st.text(alphabet, min_size=1, max_size=5), max_size=3))),
        token_ids=frozenset(draw(st.lists(st.integers(0, top), max_size=2))),
    )


def check_against_reference(spelling: Spelling, ids: list[int], rules: StopRules, sizes: list[int]) -> None:
    count, text, finish = reference(ids, rules, spelling)
    result = run(Output(rules, spelling, PROMPT), ids, sizes)
    assert (result.committed, result.finish) == (ids[:count], finish)
    assert [token.id for token in result.emitted] == ids[: len(result.emitted)]
    assert [token.origin for token in result.emitted] == [ORIGINS[i % 4] for i in range(len(result.emitted))]
    if finish is None:
        assert text.startswith(result.text), "held back, and never more than the longest stop string could need"
        longest = max(map(len, rules.strings), default=1)
        held = ids[len(result.emitted) : count]
        assert len(text) - len(result.text) <= longest - 1 + max(
            (len(spelling.name(token)) for token in held), default=0
        )
    else:
        assert (len(result.emitted), result.text) == (count, text)
    usage = result.usage
    parts = [usage.accepted_tokens, usage.recovered_tokens, usage.bonus_tokens, usage.plain_tokens]
    assert usage.completion_tokens == len(result.emitted) == sum(parts)
    assert usage.prompt_tokens == 1


@given(ids=st.lists(st.integers(0, 2), max_size=24), rules=stop_rules("abc", 2), sizes=SIZES)
@settings(max_examples=1000, deadline=None)
def test_any_rounds_of_letters(ids: list[int], rules: StopRules, sizes: list[int]) -> None:
    check_against_reference(LETTERS, ids, rules, sizes)


@given(ids=st.lists(st.integers(0, 410), max_size=16), rules=stop_rules("a t\ufffdé", 410), sizes=SIZES)
@settings(max_examples=300, deadline=None)
def test_any_rounds_of_byte_level_tokens(ids: list[int], rules: StopRules, sizes: list[int]) -> None:
    check_against_reference(Spelling(byte_level()), ids, rules, sizes)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_d7_streamed_text_is_whole_and_valid(build: object, size: int) -> None:
    assert callable(build)
    tokenizer = build()
    prompt = list(tokenizer("the").input_ids)
    ids = list(tokenizer(MIXED, add_special_tokens=False).input_ids)
    output = Output(StopRules(len(ids)), Spelling(tokenizer), np.array(prompt, dtype=np.int32))
    result = run(output, ids, [size])
    assert result.text == text_after(tokenizer, prompt, ids)
    assert "\ufffd" not in result.text
    for token in result.emitted:
        assert pb.Token(text=token.text).text == token.text


@pytest.mark.parametrize("j", range(1, 13))
@pytest.mark.parametrize("size", [1, 5, 6])
def test_d1_nothing_after_a_stop_token_inside_a_block(j: int, size: int) -> None:
    ids = letters("bcdefghijklmnop")
    rules = StopRules(15, token_ids=frozenset({ids[j]}))
    result = run(Output(rules, LETTERS, PROMPT), ids, [size])
    assert result.committed == [token.id for token in result.emitted] == ids[: j + 1]
    assert result.text == "bcdefghijklmnop"[:j]
    assert result.emitted[-1].text == ""
    assert result.finish == Finish(pb.FINISH_REASON_STOP, "bcdefghijklmnop"[j])


@pytest.mark.parametrize("max_tokens", range(1, 21))
@pytest.mark.parametrize("size", range(2, 10))
def test_d3_exactly_max_tokens(max_tokens: int, size: int) -> None:
    ids = letters("abcdefghijklmnopqrstuvwxyz")
    result = run(Output(StopRules(max_tokens), LETTERS, PROMPT), ids, [size])
    assert len(result.committed) == len(result.emitted) == result.usage.completion_tokens == max_tokens
    assert result.finish == Finish(pb.FINISH_REASON_LENGTH, "")


@pytest.mark.parametrize("size", range(1, 10))
def test_d4_a_stop_string_early_in_a_block(size: int) -> None:
    result = run(Output(StopRules(99, strings=("b",)), LETTERS, PROMPT), letters("abcdefgh"), [size])
    assert (result.text, result.committed) == ("a", letters("ab"))
    assert [token.text for token in result.emitted] == ["a", ""]
    assert result.finish == stopped_by("b")


@pytest.mark.parametrize("first", range(1, 7))
@pytest.mark.parametrize("second", range(1, 7))
def test_d4_a_stop_string_across_tokens_rounds_and_failover(first: int, second: int) -> None:
    ids = letters("abcdefgh")
    rules = StopRules(99, strings=("cdef",))
    whole = run(Output(rules, LETTERS, PROMPT), ids, [first, second, 1])
    assert (whole.text, whole.committed, whole.finish) == ("ab", letters("abcdef"), stopped_by("cdef"))
    # Another replica goes on from the committed tokens alone.
    before = run(Output(rules, LETTERS, PROMPT), ids[:first], [first])
    if before.finish is None:
        resumed = Output(rules, LETTERS, PROMPT)
        resumed.emit(resumed.keep(tokens_of(ids[:first])))
        after = run(resumed, ids[first:], [second])
        assert before.text + after.text == "ab"
        assert before.committed + after.committed == letters("abcdef")
        assert after.finish == stopped_by("cdef")


def test_text_is_held_only_while_it_may_begin_a_stop_string() -> None:
    output = Output(StopRules(99, strings=("cat",)), LETTERS, PROMPT)
    rounds = run(output, letters("accaxcat"), [1]).rounds
    assert ["".join(token.text for token in tokens) for tokens in rounds] == ["a", "", "c", "", "cax", "", "", ""]
    assert [len(tokens) for tokens in rounds] == [1, 0, 1, 0, 3, 0, 0, 3]


def test_held_text_is_delivered_at_the_end() -> None:
    result = run(Output(StopRules(4, strings=("cdx",)), LETTERS, PROMPT), letters("abcd"), [1])
    assert (result.text, len(result.emitted), result.finish) == ("abcd", 4, LENGTH)
    stop = StopRules(9, strings=("cdx",), token_ids=frozenset(letters("e")))
    result = run(Output(stop, LETTERS, PROMPT), letters("abcde"), [1])
    assert (result.text, len(result.emitted), result.finish) == ("abcd", 5, stopped_by("e"))


def test_min_tokens_shields_its_tokens_from_every_stop() -> None:
    rules = StopRules(99, min_tokens=3, strings=("bc", "cd"), token_ids=frozenset(letters("b")))
    result = run(Output(rules, LETTERS, PROMPT), letters("abcdcdb"), [4])
    assert (result.text, result.finish) == ("abcd", stopped_by("cd"))
    result = run(Output(rules, LETTERS, PROMPT), letters("abcdb"), [4])
    assert (result.text, result.finish) == ("abcd", stopped_by("b"))


def test_an_unfinished_character_comes_as_u_fffd_with_the_last_token() -> None:
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab()
    half = [vocab["a"], vocab["ã"], vocab["ģ"]]  # E3 81, the beginning of a Japanese character
    for ids, rules in [
        (half, StopRules(3)),
        ([*half, vocab["</s>"]], StopRules(9, token_ids=frozenset({vocab["</s>"]}))),
    ]:
        result = run(Output(rules, Spelling(tokenizer), PROMPT), ids, [1])
        assert [token.text for token in result.emitted] == ["a", *[""] * (len(ids) - 2), "\ufffd"]


def test_keep_changes_nothing_until_emit() -> None:
    output = Output(StopRules(99, strings=("cat",)), LETTERS, PROMPT)
    output.emit(output.keep(tokens_of(letters("xc"))))
    dropped = output.keep(tokens_of(letters("at")))
    assert dropped.finish is not None
    assert (output.generated, output.finish, output.usage(1).completion_tokens) == (2, None, 1)
    again = output.keep(tokens_of(letters("ax")))
    emission = output.emit(again)
    assert "".join(token.text for token in emission.tokens) == "cax"
    for spent in (dropped, again):
        with pytest.raises(ValueError, match="once"):
            output.emit(spent)


def test_keep_leaves_an_open_character_as_it_was() -> None:
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab()
    output = Output(StopRules(99), Spelling(tokenizer), PROMPT)
    output.emit(output.keep(tokens_of([vocab["ã"], vocab["ģ"]])))  # E3 81
    for _ in range(2):
        kept = output.keep(tokens_of([vocab["Ĥ"]]))  # 82
    assert [token.text for token in output.emit(kept).tokens] == ["あ"]


def test_mistakes_of_the_caller() -> None:
    output = Output(StopRules(1), LETTERS, PROMPT)
    with pytest.raises(ValueError, match="without tokens"):
        output.keep([])
    output.emit(output.keep(tokens_of(letters("a"))))
    with pytest.raises(ValueError, match="ended"):
        output.keep(tokens_of(letters("b")))


def test_d6_counters_follow_delivery_not_commits() -> None:
    output = Output(StopRules(99, strings=("cdz",)), LETTERS, PROMPT)
    output.emit(output.keep([RoundToken(letters("b")[0], pb.TOKEN_ORIGIN_PLAIN)]))
    block = [RoundToken(token, pb.TOKEN_ORIGIN_ACCEPTED) for token in letters("cd")]
    output.emit(output.keep(block))
    assert output.usage(2) == pb.Usage(prompt_tokens=1, completion_tokens=1, plain_tokens=1, rounds=2)
    output.emit(output.keep([RoundToken(letters("x")[0], pb.TOKEN_ORIGIN_RECOVERED)]))
    assert output.usage(3) == pb.Usage(
        prompt_tokens=1, completion_tokens=4, plain_tokens=1, accepted_tokens=2, recovered_tokens=1, rounds=3
    )
