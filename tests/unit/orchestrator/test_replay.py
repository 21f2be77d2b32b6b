"""What another replica makes of a session's tokens is what was delivered, wherever it takes over."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from orchestrator.records import new_record, repeats, request_of
from orchestrator.replay import replay
from orchestrator.request import GenerationPlan, ServingLimits, plan_request
from orchestrator.store.base import FINISHED, SessionCorrupt, SessionRecord
from orchestrator.text.detokenizer import Spelling
from orchestrator.text.output import EmittedToken, Output, RoundToken
from outrider.law.language import Language
from outrider.law.params import LawParams
from outrider.lm.grammars import SessionGrammars
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import synthetic_tokenizer
from outrider.net.errors import OutriderError
from outrider.v1 import orchestrator_pb2 as pb
from tests.harness.tiny_tokenizers import MIXED, byte_fallback, byte_level

LETTERS = synthetic_tokenizer(SyntheticSpec(vocab_size=26))
PLAIN = pb.TOKEN_ORIGIN_PLAIN


def plan(tokenizer: PreTrainedTokenizerBase, request: pb.GenerateRequest) -> GenerationPlan:
    limits = ServingLimits(len(tokenizer), context_length=512, max_lookahead=16, default_lookahead=4)
    return plan_request(request, tokenizer, limits)


def request(**stop: object) -> pb.GenerateRequest:
    conditions = pb.StopConditions(**{"max_tokens": 64, **stop})  # type: ignore[arg-type]
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0]), stop=conditions, session_id="s", resumable=True)


def record(made: GenerationPlan, asked: pb.GenerateRequest, ids: list[int], finish: int = 0) -> SessionRecord:
    new = new_record(made, asked)
    tokens = np.concatenate([new.tokens, np.array(ids, np.int32)])
    state = FINISHED if finish else new.state
    return SessionRecord(new.session_id, tokens, new.prompt_length, 1, state, finish, new.meta)


def fed(output: Output, ids: list[int], size: int) -> list[EmittedToken]:
    """What rounds of so many tokens emit, to the end of the output or of the tokens."""
    emitted: list[EmittedToken] = []
    while ids and output.finish is None:
        kept = output.keep([RoundToken(token, PLAIN) for token in ids[:size]])
        emitted += output.emit(kept).tokens
        ids = ids[size:]
    return emitted


def texts(tokens: list[EmittedToken]) -> list[tuple[int, str]]:
    return [(token.id, token.text) for token in tokens]


def check_every_cut(tokenizer: PreTrainedTokenizerBase, asked: pb.GenerateRequest, ids: list[int], size: int) -> None:
    """Token for token, text for text: before the cut, replayed after it, and on from there."""
    made, spelling = plan(tokenizer, asked), Spelling(tokenizer)

    def output() -> Output:
        return Output(made.stop, spelling, made.prompt)

    undisturbed = output()
    whole = fed(undisturbed, ids, size)
    for cut in range(len(ids)):
        before = output()
        seen = fed(before, ids[:cut], size)
        if before.finish is not None:
            break
        left = replay(made, record(made, asked, ids[:cut]), output(), None)
        replayed = list(left.emission.tokens)
        assert texts(replayed) == texts(seen)
        assert {token.origin for token in replayed} <= {pb.TOKEN_ORIGIN_REPLAYED}
        after = fed(left.output, ids[cut:], size)
        assert texts(replayed + after) == texts(whole)
        assert left.output.finish == undisturbed.finish
        usage = left.output.usage(0)
        assert usage.completion_tokens == len(whole)
        assert usage.replayed_tokens + usage.plain_tokens == len(whole)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_d7_characters_of_several_tokens(build: object, size: int) -> None:
    assert callable(build)
    tokenizer = build()
    ids = list(tokenizer(MIXED, add_special_tokens=False).input_ids)
    check_every_cut(tokenizer, request(max_tokens=len(ids)), ids, size)


@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    strings=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    min_tokens=st.integers(0, 6),
    size=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_g4_stop_strings_across_the_cut(ids: list[int], strings: list[str], min_tokens: int, size: int) -> None:
    check_every_cut(LETTERS, request(strings=strings, min_tokens=min_tokens, token_ids=[2]), ids, size)


def test_an_ended_session_has_its_end() -> None:
    asked = request(strings=["cd"])
    made = plan(LETTERS, asked)
    output = Output(made.stop, Spelling(LETTERS), made.prompt)
    left = replay(made, record(made, asked, [0, 1, 2, 3], pb.FINISH_REASON_STOP), output, None)
    assert [token.text for token in left.emission.tokens] == ["a", "b", "", ""]
    assert left.emission.finish is not None
    assert left.emission.finish.matched_stop == "cd"
    assert not left.running


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4], [2, 3]])
def test_l6_tokens_behind_the_end_are_no_session(ids: list[int]) -> None:
    asked = request(strings=["cd"])
    made = plan(LETTERS, asked)
    with pytest.raises(SessionCorrupt):
        replay(made, record(made, asked, ids), Output(made.stop, Spelling(LETTERS), made.prompt), None)


def test_g5_a_grammar_stands_where_the_tokens_end() -> None:
    made = plan(LETTERS, request())
    law = LawParams(grammar=Language("regex", "ab(c|d)"), prompt_length=1, stop_token_ids=(25,))
    for ids, legal in (([], [0]), ([0], [1]), ([0, 1], [2]), ([0, 1], [3]), ([0, 1, 2], [25])):
        grammar = SessionGrammars(LETTERS, 26).open(law)
        output = Output(made.stop, Spelling(LETTERS), made.prompt)
        left = replay(made, record(made, request(), ids), output, grammar)
        assert left.grammar is not None
        assert left.grammar.legal(left.record.tokens, np.array(legal, np.int32)) == 1
        assert left.grammar.legal(left.record.tokens, np.array([5], np.int32)) == 0
    with pytest.raises(OutriderError, match="does not allow"):
        replay(made, record(made, request(), [1]), Output(made.stop, Spelling(LETTERS), made.prompt), grammar)


def test_a_session_is_gone_on_with_as_it_was_planned() -> None:
    """Where the replicas' defaults differ, what the first one chose counts."""
    asked = pb.GenerateRequest(prompt="abc", session_id="s", resumable=True)
    made = plan(LETTERS, asked)
    assert made.stop.max_tokens == 256
    stored = new_record(made, asked)
    limits = ServingLimits(26, context_length=300, max_lookahead=8, default_lookahead=2)
    again = plan_request(request_of(stored, 26), LETTERS, limits)
    assert again.prompt.tolist() == made.prompt.tolist()
    assert (again.seed, again.acceptance, again.stop) == (made.seed, made.acceptance, made.stop)
    assert (again.session_id, again.resumable) == ("s", True)


def test_a_request_repeats_another_when_it_says_nothing_else() -> None:
    asked = pb.GenerateRequest(prompt="abc", session_id="s", resumable=True)
    stored = new_record(plan(LETTERS, asked), asked)
    assert repeats(stored, asked)
    assert repeats(stored, request_of(stored, 26)) is False  # its prompt is spelled in another way
    for name, value in (("prompt", "abd"), ("seed", 1), ("n", 1), ("logprobs", 0), ("token_by_token", True)):
        other = pb.GenerateRequest()
        other.CopyFrom(asked)
        setattr(other, name, value)
        assert repeats(stored, other) == (name == "n"), name
