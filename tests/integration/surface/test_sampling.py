"""Every sampling parameter at accepted, recovered, bonus and plain positions alike, whatever the rule and the format:
rows A6, A7, A8 and A18 of shared/FAILURES.md.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_RATIO,
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
    GenerateRequest,
)
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, ROW_FORMAT_UNSPECIFIED
from tests.harness.engines import ScriptedEngine
from tests.harness.orchestrator import Generation, ask
from tests.harness.system import start_system, synthetic

RIGHT = 1e-3
VOCAB = 16
MINUS_INFINITY = float("-inf")
ORIGINS = (TOKEN_ORIGIN_ACCEPTED, TOKEN_ORIGIN_RECOVERED, TOKEN_ORIGIN_BONUS, TOKEN_ORIGIN_PLAIN)
RULES = [ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK, ACCEPTANCE_COUPLED]
FORMATS = [ROW_FORMAT_UNSPECIFIED, ROW_FORMAT_LOGITS]


def everywhere(probs: Sequence[float]) -> ScriptedEngine:
    """The same law after every prefix; tokens beyond those given are impossible."""
    row = [*np.log(probs), *[MINUS_INFINITY] * (VOCAB - len(probs))]
    return ScriptedEngine(lambda prefix: row)


def request(rule: int, row_format: int, **fields: object) -> GenerateRequest:
    made = ask(**{"max_tokens": 60, "lookahead": 2, "acceptance": rule, **fields})  # type: ignore[arg-type]
    made.speculation.row_format = row_format  # type: ignore[assignment]
    return made


def said(generations: Sequence[Generation]) -> dict[int, set[int]]:
    """The tokens of each origin."""
    tokens = [token for one in generations for token in one.tokens]
    return {origin: {token.id for token in tokens if token.origin == origin} for origin in ORIGINS}


TARGET, DRAFT = [0.3, 0.25, 0.2, 0.15, 0.1], [0.1, 0.3, 0.1, 0.2, 0.3]


@pytest.mark.parametrize("row_format", FORMATS, ids=["compact", "logits"])
@pytest.mark.parametrize("rule", RULES, ids=["ratio", "block", "coupled"])
@pytest.mark.parametrize(
    ("sampling", "law"),
    [
        ({"banned_token_ids": [0, 4]}, [0, 0.25, 0.2, 0.15, 0]),
        ({"allowed_token_ids": [1, 3, 9]}, [0, 0.25, 0, 0.15, 0]),
        ({"allowed_token_ids": [1, 2, 3], "banned_token_ids": [2]}, [0, 0.25, 0, 0.15, 0]),
        ({"logit_bias": {0: -100.0, 3: float(np.log(2))}}, [0, 0.25, 0.2, 0.3, 0.1]),
        ({"min_p": 0.6}, [0.3, 0.25, 0.2, 0, 0]),
    ],
    ids=["banned", "allowed", "both", "bias", "min_p"],
)
async def test_a7_the_law_of_every_kind_of_token(
    rule: int, row_format: int, sampling: dict[str, object], law: list[float]
) -> None:
    """Tokens are independent here, so every one is a sample of the law."""
    async with start_system(everywhere(TARGET), everywhere(DRAFT)) as system:
        requests = (request(rule, row_format, seed=seed, **sampling) for seed in range(20))
        generations = await system.generate_all(requests)
    possible = {token for token, prob in enumerate(law) if prob}
    assert all(tokens and tokens <= possible for tokens in said(generations).values())
    seen = np.bincount([token for one in generations for token in one.ids], minlength=len(law))
    weights = np.array([law[token] for token in sorted(possible)])
    expected = weights / weights.sum() * seen.sum()
    assert stats.chisquare(seen[sorted(possible)], expected).pvalue > RIGHT


@pytest.mark.parametrize("rule", [*RULES, 0], ids=["ratio", "block", "coupled", "default"])
async def test_a7_a_draft_that_always_proposes_what_is_banned(rule: int) -> None:
    """The request's ban reaches the draft as well; this one proposes the token all the same, it knows no other."""
    only = [1e-6] * 16
    only[5] = 1.0
    target = [1 / 16] * 16
    async with start_system(everywhere(target), everywhere(only)) as system:
        bans: list[dict[str, object]] = [
            {"logit_bias": {5: -100.0}}, {"banned_token_ids": [5]}, {"allowed_token_ids": [1, 2, 3]},
        ]  # fmt: skip
        for sampling in bans:
            generations = await system.generate_all(
                request(rule, 0, seed=seed, max_tokens=100, **sampling) for seed in range(4)
            )
            assert all(5 not in one.ids for one in generations)
            assert len({token for one in generations for token in one.ids}) >= 3
        always = await system.generate(request(rule, 0, seed=1, logit_bias={7: 100.0}))
        assert set(always.ids) == {7}
        one_left = await system.generate(request(rule, 0, seed=1, allowed_token_ids=[9]))
        assert set(one_left.ids) == {9}


async def test_a7_masks_and_stop_tokens_too_early() -> None:
    """min_tokens masks the stop token at every position of a block; afterwards it is drawn."""
    async with start_system(everywhere([0.9, 0.1]), everywhere([0.9, 0.1])) as system:
        for rule in RULES:
            made = request(rule, 0, seed=3, allowed_token_ids=[0, 1])
            made.stop.token_ids.append(0)
            made.stop.min_tokens = 17
            one = await system.generate(made)
            assert one.ids[:17] == [1] * 17
            assert one.ids[-1] == 0
            assert one.finish.matched_stop


SHAPES: list[dict[str, object]] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": -1.5, "top_p": 0.8},
    {"repetition_penalty": 1.8, "top_k": 6},
    {"logit_bias": {3: 4.0, 5: -100.0}, "min_p": 0.05},
    {"allowed_token_ids": [1, 2, 3, 4, 5, 6, 7], "temperature": 1.4},
    {"banned_token_ids": [0, 2, 4], "temperature": 0.6},
]


@pytest.mark.parametrize("row_format", FORMATS, ids=["compact", "logits"])
async def test_a8_whatever_shapes_the_law_coupled_tokens_are_those_of_plain_decoding(row_format: int) -> None:
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.6)) as system:
        for shape in SHAPES:
            plain = await system.generate(request(ACCEPTANCE_COUPLED, 0, seed=5, lookahead=0, **shape))
            one = await system.generate(request(ACCEPTANCE_COUPLED, row_format, seed=5, lookahead=5, **shape))
            assert one.ids == plain.ids
            assert 0 < one.accepted < one.drafted


@pytest.mark.parametrize("rule", [ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK], ids=["ratio", "block"])
async def test_a8_whatever_shapes_the_law_the_format_does_not_show(rule: int) -> None:
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.6)) as system:
        for shape in SHAPES:
            dense, compact = [
                await system.generate(request(rule, row_format, seed=5, lookahead=5, **shape))
                for row_format in (ROW_FORMAT_LOGITS, ROW_FORMAT_UNSPECIFIED)
            ]
            assert dense.ids == compact.ids
            assert [each.accepted for each in dense.rounds] == [each.accepted for each in compact.rounds]
