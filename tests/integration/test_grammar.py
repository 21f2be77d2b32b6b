"""Structured output through the services: row A19."""

import re
from typing import Any

import grpc
import numpy as np
import pytest

from outrider.law.language import Language
from outrider.law.params import LawParams, to_law_spec
from outrider.lm.grammars import SessionGrammars
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1 import target_pb2
from outrider.v1.draft_pb2 import PROPOSER_MODEL, PROPOSER_PROMPT_LOOKUP, PROPOSER_SUFFIX
from outrider.v1.types_pb2 import Grammar
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.orchestrator import Generation, ask, start_orchestrator
from tests.harness.workers import (
    block_of,
    draft_error,
    error_of,
    open_command,
    reason,
    start_draft,
    start_target,
    verify_item,
)

VOCAB, EOS = 27, 26
TARGET = SyntheticSpec(vocab_size=VOCAB, seed=3, order=2, eos=EOS)
LIKE = SyntheticSpec(vocab_size=VOCAB, seed=3, order=2, eos=EOS, noise=0.8)
TOKENIZER = f"synthetic:vocab_size={VOCAB}"
REGEX = "([a-d]|xy)*(e|f[ab]+)"
RULES = (pb.ACCEPTANCE_RATIO, pb.ACCEPTANCE_BLOCK, pb.ACCEPTANCE_COUPLED)


def grammar_request(regex: str = REGEX, **fields: Any) -> pb.GenerateRequest:
    request = ask((0, 1, 2), **{"max_tokens": 40, **fields})
    request.grammar.CopyFrom(Grammar(regex=regex))
    return request


def letters(generation: Generation) -> str:
    """The output without its end."""
    assert generation.finish.reason == pb.FINISH_REASON_STOP
    assert generation.ids[-1] == EOS
    assert generation.text == "".join(chr(97 + token) for token in generation.ids[:-1])
    return generation.text


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dense", [False, True], ids=["compact", "logits"])
async def test_a19_every_output_is_a_member(rule: "pb.Acceptance.ValueType", dense: bool) -> None:
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_draft(SyntheticEngine(LIKE), proposers="model,prompt_lookup,suffix") as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER, draft_timeout=30.0) as orchestrator,
    ):
        drafted = 0
        for seed in range(8):
            request = grammar_request(seed=seed, acceptance=rule, lookahead=4, temperature=0.9)
            if dense:
                request.speculation.row_format = target_pb2.ROW_FORMAT_LOGITS
            copying = PROPOSER_SUFFIX if seed % 4 == 1 else PROPOSER_PROMPT_LOOKUP
            request.speculation.proposer = copying if seed % 2 else PROPOSER_MODEL
            generation = await orchestrator.generate(request)
            assert re.fullmatch(REGEX, letters(generation))
            drafted += generation.drafted
            # No block was refused: the worker masks, and sends nothing that the language does not allow.
            assert all(one.plain_reason != pb.PLAIN_REASON_DRAFT_INVALID for one in generation.rounds)
        assert drafted > 20


async def test_a19_dense_rows_and_no_speculation_give_the_same_tokens() -> None:
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_draft(SyntheticEngine(LIKE)) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER, draft_timeout=30.0) as orchestrator,
    ):
        for seed in range(4):
            for rule, lookahead in ((pb.ACCEPTANCE_RATIO, 3), (pb.ACCEPTANCE_COUPLED, 3), (pb.ACCEPTANCE_COUPLED, 0)):
                request = grammar_request(seed=seed, acceptance=rule, lookahead=lookahead)
                compact = await orchestrator.generate(request)
                request.speculation.row_format = target_pb2.ROW_FORMAT_LOGITS
                assert (await orchestrator.generate(request)).ids == compact.ids
                if rule == pb.ACCEPTANCE_COUPLED:
                    plain = await orchestrator.generate(grammar_request(seed=seed, acceptance=rule, lookahead=0))
                    assert compact.ids == plain.ids
        greedy = [
            (await orchestrator.generate(grammar_request(temperature=0.0, lookahead=n, max_tokens=30))).ids
            for n in (0, 1, 4)
        ]
        assert greedy[0] == greedy[1] == greedy[2]


LAW = LawParams(grammar=Language("regex", REGEX), prompt_length=3, stop_token_ids=(EOS,))


async def test_a19_a_draft_never_draws_what_the_grammar_forbids() -> None:
    """Every row of the law, not only its winner: what was masked has no probability to ship."""
    state = SessionGrammars(SyntheticEngine(TARGET).info.tokenizer, VOCAB).open(LAW)
    assert state is not None
    async with start_draft(SyntheticEngine(LIKE)) as draft:
        stream = draft.stream()
        for seed in range(20):
            command = open_command("s", [0, 1, 2], 6, law=LAW, seed=seed, epoch=seed + 1)
            tokens, law = block_of(await stream.ask(command))
            assert tokens
            path = np.array([0, 1, 2, *tokens], np.int32)
            masks = state.masks(path, 3)
            for mask, row in zip(masks, np.split(law.token_ids, np.cumsum(law.sizes)[:-1]), strict=False):
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                assert bits[row].all()
                assert len(row) == bits[:VOCAB].sum()


async def test_a19_a_copied_block_is_cut_at_the_first_illegal_token() -> None:
    law = LawParams(grammar=Language("regex", "abc+"), prompt_length=7, stop_token_ids=(EOS,))
    async with start_draft(SyntheticEngine(LIKE), proposers="prompt_lookup") as draft:
        stream = draft.stream()
        # After "a b" came "c c x" in the prompt.
        command = open_command("s", [0, 1, 2, 2, 23, 5, 6, 0, 1], 4, law=law)
        assert block_of(await stream.ask(command))[0] == [2, 2]
        command.open.law.ClearField("grammar")
        command.epoch = 2
        assert block_of(await stream.ask(command))[0] == [2, 2, 23, 5]


async def test_a19_workers_that_cannot_spell_or_compile_refuse_the_item_alone() -> None:
    scripted = ScriptedEngine(next_token_script(16))
    item = verify_item("s", [0, 1, 2])
    item.row_format = target_pb2.ROW_FORMAT_SAMPLE
    item.law.CopyFrom(to_law_spec(LAW, 1))
    item.law.stop_token_ids = b""
    other = verify_item("t", [0, 1, 2])
    async with start_target(scripted) as target, start_draft(scripted) as draft:
        refused, fine = await target.verify(item, other)
        assert error_of(refused).reason == reason("INVALID_FIELD")
        assert "grammar" in str(error_of(refused))
        assert fine.status.code == 0
        command = open_command("s", [0, 1, 2], 2, law=LawParams(grammar=LAW.grammar))
        assert draft_error(await draft.stream().ask(command)).reason == reason("INVALID_FIELD")
    item.law.grammar.regex = "a("
    async with start_target(SyntheticEngine(TARGET)) as target:
        (refused,) = await target.verify(item)
        assert "unclosed group" in str(error_of(refused))
        item.law.grammar.regex = REGEX
        (fine,) = await target.verify(item)
        assert fine.status.code == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grammar": Grammar(regex="a(")}, "grammar.regex cannot be compiled"),
        ({"grammar": Grammar(json_schema="[]")}, "grammar.json_schema is no JSON object"),
        ({"grammar": Grammar(lark="start: nothing")}, "grammar.lark cannot be compiled"),
        ({"grammar": Grammar()}, "grammar names no language"),
        ({"grammar": Grammar(json_schema="{}"), "stop": {"ignore_eos": True}}, "grammar needs a token that ends"),
        ({"grammar": Grammar(regex="a"), "stop": {"min_tokens": 2}}, "stop.min_tokens is 2"),
        ({"grammar": Grammar(regex="[A-Z]")}, "no token of the vocabulary can go on"),
    ],
)
async def test_a19_bad_grammars_never_reach_a_worker(change: dict[str, Any], message: str) -> None:
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_orchestrator([target.address], tokenizer=TOKENIZER) as orchestrator,
    ):
        request = ask((0, 1, 2))
        request.MergeFrom(pb.GenerateRequest(**change))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await orchestrator.generate(request)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert message in str(caught.value.details())
        assert target.service.load().open_sessions == 0


class _Blind(SessionGrammars):
    def open(self, params: LawParams) -> None:
        return None


async def test_a19_a_target_outside_the_grammar_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("target_service.scheduler.SessionGrammars", _Blind)
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_orchestrator([target.address], tokenizer=TOKENIZER) as orchestrator,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="outside the grammar"):
            await orchestrator.generate(grammar_request("abc+", session_id="s"))
        record = await orchestrator.core.store.load("s")
        assert record is not None
        assert re.fullmatch("(a(b(c+)?)?)?", "".join(chr(97 + token) for token in record.tokens[3:].tolist()))


async def test_a19_a_draft_that_is_blind_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.service.SessionGrammars", _Blind)
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_draft(SyntheticEngine(LIKE)) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER, draft_timeout=30.0) as orchestrator,
    ):
        generations = [await orchestrator.generate(grammar_request(seed=seed, lookahead=3)) for seed in range(4)]
        assert all(re.fullmatch(REGEX, letters(generation)) for generation in generations)
        reasons = {one.plain_reason for generation in generations for one in generation.rounds}
        assert pb.PLAIN_REASON_DRAFT_INVALID in reasons
