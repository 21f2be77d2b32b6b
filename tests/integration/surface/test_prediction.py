"""The client's own expected output as the draft: as good as it is right, and never more than a draft."""

from itertools import pairwise

import pytest

from outrider.lm.tokenizer import load_tokenizer
from outrider.v1.draft_pb2 import PROPOSER_MODEL, PROPOSER_PREDICTION
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_RATIO,
    PLAIN_REASON_DRAFT_UNAVAILABLE,
    PLAIN_REASON_NO_PROPOSAL,
    TOKEN_ORIGIN_ACCEPTED,
    GenerateRequest,
)
from tests.harness.orchestrator import ask
from tests.harness.system import RunningSystem, start_system, synthetic
from tests.harness.wrappers import always_wrong

LENGTH = 60
TOKENIZER = load_tokenizer("synthetic:vocab_size=16")


def request(prediction: str = "", **fields: object) -> GenerateRequest:
    made = ask(**{"max_tokens": LENGTH, "lookahead": 5, "temperature": 0.0, **fields})  # type: ignore[arg-type]
    made.speculation.prediction = prediction
    return made


async def plain(system: RunningSystem, **fields: object) -> list[int]:
    return (await system.generate(request(**{**fields, "lookahead": 0}))).ids


def text(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids))


async def test_a_right_prediction_is_accepted_whole() -> None:
    """By a worker whose model is always wrong, so that nothing else can have made the blocks."""
    async with start_system(synthetic(order=3), always_wrong(synthetic()), proposers="model,prediction") as system:
        expected = await plain(system)
        one = await system.generate(request(text(expected)))
        assert one.ids == expected
        assert one.accepted == one.drafted > 0
        assert one.finish.usage.accepted_tokens >= LENGTH * 4 // 5
        chosen = await system.generate(request(text(expected), proposer=PROPOSER_PREDICTION))
        assert chosen.accepted == one.accepted


async def test_an_edit_costs_a_few_rounds_and_no_token() -> None:
    async with start_system(synthetic(order=3), synthetic(), proposers="prediction") as system:
        expected = await plain(system)
        shorter = expected[:20] + expected[24:]
        longer = [*expected[:30], 15, 15, 15, *expected[30:]]
        for prediction in (shorter, longer, expected[10:], expected[::-1], [3] * 200):
            one = await system.generate(request(text(prediction)))
            assert one.ids == expected
            if len(set(prediction)) > 1 and prediction != expected[::-1]:
                accepted = sum(token.origin == TOKEN_ORIGIN_ACCEPTED for token in one.tokens[-20:])
                assert accepted >= 10, prediction


@pytest.mark.parametrize("rule", [ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK, ACCEPTANCE_COUPLED])
async def test_what_the_target_rules_out_is_not_said(rule: int) -> None:
    """Every third token of the prediction is one that the request bans."""
    async with start_system(synthetic(order=2), synthetic(), proposers="prediction") as system:
        fields = {"temperature": 1.0, "seed": 4, "acceptance": rule, "banned_token_ids": [15]}
        expected = await plain(system, **fields)
        wrong = [token for pair in pairwise(expected) for token in (*pair, 15)]
        one = await system.generate(request(text(wrong), **fields))
        assert 15 not in one.ids
        assert one.accepted < one.drafted
        likely = await system.generate(request(text(expected), **fields))
        assert likely.accepted > 0
        if rule == ACCEPTANCE_COUPLED:
            assert one.ids == likely.ids == expected
            assert likely.accepted == likely.drafted


async def test_beyond_the_prediction_there_is_no_proposal() -> None:
    async with start_system(synthetic(order=3), synthetic(), proposers="prediction") as system:
        expected = await plain(system)
        one = await system.generate(request(text(expected[:20])))
        assert one.ids == expected
        assert one.rounds[-2].plain_reason == PLAIN_REASON_NO_PROPOSAL


async def test_a_worker_that_does_not_offer_it_says_so() -> None:
    async with start_system(synthetic(), synthetic(), proposers="model") as system:
        one = await system.generate(request("abc"))
        assert one.drafted == 0
        assert one.rounds[1].plain_reason == PLAIN_REASON_DRAFT_UNAVAILABLE
        assert one.ids == (await system.generate(request(proposer=PROPOSER_MODEL))).ids
