"""What is sampled is the target's law, whatever the draft is: rows A of shared/FAILURES.md through the services."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from orchestrator.links.draft import DraftLink
from outrider.law.sparse import SparseLaw
from outrider.net.arrays import int32s, law_from_message
from outrider.v1.draft_pb2 import DraftEvent
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_RATIO,
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
)
from tests.harness.engines import Script, ScriptedEngine
from tests.harness.orchestrator import ask
from tests.harness.system import start_system, synthetic
from tests.harness.wrappers import always_wrong

RIGHT = 1e-3
# A request with a seed is coupled unless it says otherwise.
RATIO = {"acceptance": ACCEPTANCE_RATIO}
VOCAB = 8
MINUS_INFINITY = float("-inf")


def everywhere(logits: Sequence[float]) -> Script:
    """The same law after every prefix."""
    row = [*logits, *[MINUS_INFINITY] * (16 - len(logits))]
    return lambda prefix: row


def engine(logits: Sequence[float]) -> ScriptedEngine:
    return ScriptedEngine(everywhere(logits))


def softmax(logits: Sequence[float]) -> np.ndarray:
    weights = np.exp(np.asarray(logits, float) - np.max(logits))
    return weights / weights.sum()


class Tap:
    """The blocks that reach the orchestrator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[tuple[list[int], SparseLaw]] = []
        dispatch = DraftLink._dispatch

        def seen(link: DraftLink, event: DraftEvent) -> None:
            if event.WhichOneof("outcome") == "block" and event.block.tokens:
                tokens = int32s(event.block.tokens, "tokens").tolist()
                self.blocks.append((tokens, law_from_message(event.block.law, len(tokens))))
            dispatch(link, event)

        monkeypatch.setattr(DraftLink, "_dispatch", seen)


async def test_a1_a_draft_with_a_law_of_its_own_leaves_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft draws at temperature 0.7 from its own three best; tokens are independent, so every one is a sample."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=VOCAB)
    poor = logits + 0.7 * rng.normal(size=VOCAB)
    best = np.argsort(-poor)[:3]
    draft = [poor[token] / 0.7 if token in best else MINUS_INFINITY for token in range(VOCAB)]
    tap = Tap(monkeypatch)
    async with start_system(engine(logits), engine(draft)) as system:
        requests = (ask(max_tokens=50, lookahead=3, seed=seed, **RATIO) for seed in range(60))
        generations = await system.generate_all(requests)
    seen = np.bincount([token for one in generations for token in one.ids], minlength=VOCAB)
    assert stats.chisquare(seen, softmax(logits) * seen.sum()).pvalue > RIGHT
    # The mix of origins is what makes it a test: neither all accepted nor all rejected.
    assert 0.2 < sum(one.accepted for one in generations) / sum(one.drafted for one in generations) < 0.9
    assert len(tap.blocks) > 500
    for tokens, law in tap.blocks:
        for index, token in enumerate(tokens):
            ids, probs = law.row(index)
            assert len(ids) <= 3
            assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
            assert probs[ids == token] > 0


async def test_a3_tokens_of_probability_zero_are_never_accepted() -> None:
    """Target and draft share no token. Every round then is the plain round: the same tokens for the same seed."""
    lower = [0.5, 0.1, -0.3, 0.0] + [MINUS_INFINITY] * 4
    upper = [MINUS_INFINITY] * 4 + [0.5, 0.1, -0.3, 0.0]
    async with start_system(engine(lower), engine(upper)) as system:
        for seed in range(5):
            one = await system.generate(ask(max_tokens=30, lookahead=4, seed=seed, **RATIO))
            plain = await system.generate(ask(max_tokens=30, lookahead=0, seed=seed, **RATIO))
            assert one.drafted > 0
            assert one.accepted == 0
            assert one.ids == plain.ids


async def test_a4_a_greedy_draft_ships_a_point_mass_and_leaves_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = [2.0, 1.5, 1.0, 0.5]
    tap = Tap(monkeypatch)
    async with start_system(engine(logits), engine([2.0])) as system:
        requests = (ask(max_tokens=50, lookahead=2, seed=seed, **RATIO) for seed in range(60))
        generations = await system.generate_all(requests)
    seen = np.bincount([token for one in generations for token in one.ids], minlength=4)
    assert stats.chisquare(seen, softmax(logits) * seen.sum()).pvalue > RIGHT
    assert all(law.sizes.tolist() == [1] * len(tokens) and (law.probs == 1.0).all() for tokens, law in tap.blocks)
    assert len(tap.blocks) > 500


async def test_a5_greedy_says_the_targets_argmax_though_the_draft_is_less_sure() -> None:
    target, draft = np.log([0.3, 0.5, 0.2]), np.log([0.9, 0.05, 0.05])
    async with start_system(engine(target), engine(draft)) as system:
        one = await system.generate(ask(max_tokens=20, lookahead=3, temperature=0.0))
        assert one.ids == [1] * 20
        assert one.accepted == 0


async def test_a6_top_k_1_is_greedy_token_for_token() -> None:
    async with start_system(synthetic(), synthetic(noise=0.8)) as system:
        greedy = await system.generate(ask(max_tokens=60, lookahead=0, temperature=0.0))
        for lookahead in (0, 4):
            one = await system.generate(
                ask(max_tokens=60, lookahead=lookahead, temperature=1.0, top_k=1, seed=3, **RATIO)
            )
            assert one.ids == greedy.ids


@pytest.mark.parametrize(
    ("sampling", "allowed"), [({"top_p": 0.5}, {0, 1}), ({"min_p": 0.6}, {0, 1}), ({"top_k": 3}, {0, 1, 2})]
)
async def test_a6_nothing_outside_the_nucleus_at_any_kind_of_position(
    sampling: dict[str, float], allowed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's own nucleus is another one: it proposes what the target's law excludes."""
    target, draft = np.log([0.3, 0.25, 0.15, 0.1, 0.1, 0.1]), np.log([0.3, 0.05, 0.05, 0.3, 0.2, 0.1])
    tap = Tap(monkeypatch)
    async with start_system(engine(target), engine(draft)) as system:
        requests = (ask(max_tokens=50, lookahead=2, seed=seed, **RATIO, **sampling) for seed in range(30))
        generations = await system.generate_all(requests)
    for origin in (TOKEN_ORIGIN_ACCEPTED, TOKEN_ORIGIN_RECOVERED, TOKEN_ORIGIN_BONUS, TOKEN_ORIGIN_PLAIN):
        said = {token.id for one in generations for token in one.tokens if token.origin == origin}
        assert said, origin
        assert said <= allowed, origin
    assert {token for one in generations for token in one.ids} == allowed
    assert any(token not in allowed for tokens, _ in tap.blocks for token in tokens)


@pytest.mark.parametrize("noise", [0.0, 0.8])
@pytest.mark.parametrize("lookahead", [1, 5])
async def test_a8_penalties_hold_inside_blocks(noise: float, lookahead: int) -> None:
    """Each penalty, greedily: another output than without it, and that of lookahead 0."""
    penalties: list[dict[str, object]] = [
        {},
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"logit_bias": {3: 4.0, 5: -100.0}},
    ]
    async with start_system(synthetic(), synthetic(noise=noise)) as system:
        shapes = [{"temperature": 0.0, **one} for one in penalties]
        plain = await system.generate_all(ask(max_tokens=40, lookahead=0, **shape) for shape in shapes)  # type: ignore[arg-type]
        drafted = await system.generate_all(ask(max_tokens=40, lookahead=lookahead, **shape) for shape in shapes)  # type: ignore[arg-type]
    assert [one.ids for one in drafted] == [one.ids for one in plain]
    assert len({tuple(one.ids) for one in plain}) == len(penalties)
    assert noise or all(one.accepted == one.drafted for one in drafted)


async def test_a10_penalties_count_nothing_that_was_rejected() -> None:
    shapes = [{"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"repetition_penalty": 3.0}]
    async with start_system(synthetic(), always_wrong(synthetic())) as system:
        for shape in shapes:
            plain = await system.generate(ask(max_tokens=40, lookahead=0, temperature=0.0, **shape))
            one = await system.generate(ask(max_tokens=40, lookahead=6, temperature=0.0, **shape))
            assert one.ids == plain.ids
            # A penalty moves the worst token as well, now and then to the top.
            assert one.accepted < one.drafted / 20


async def test_a11_a_rejected_point_mass_is_not_drawn_again() -> None:
    async with start_system(engine(np.log([0.5, 0.3, 0.2])), engine([0.0])) as system:
        requests = (ask(max_tokens=50, lookahead=1, seed=seed, **RATIO) for seed in range(60))
        generations = await system.generate_all(requests)
    recovered = [token.id for one in generations for token in one.tokens if token.origin == TOKEN_ORIGIN_RECOVERED]
    seen = np.bincount(recovered, minlength=3)
    assert seen[0] == 0
    assert stats.binomtest(int(seen[1]), len(recovered), 0.6).pvalue > RIGHT
    assert len(recovered) > 750


async def test_a15_a_seed_repeats_its_tokens_after_a_restart_and_another_does_not() -> None:
    said: dict[int, list[list[int]]] = {1: [], 2: []}
    for _ in range(2):
        async with start_system(synthetic(), synthetic(noise=0.7)) as system:
            for seed, outputs in said.items():
                for _ in range(2):
                    outputs.append((await system.generate(ask(max_tokens=40, lookahead=4, seed=seed, **RATIO))).ids)
    assert all(len({*map(tuple, outputs)}) == 1 for outputs in said.values())
    assert said[1][0] != said[2][0]


async def test_a15_a_seed_repeats_its_tokens_among_others() -> None:
    """The same request alone, and while others with other lookaheads, seeds and lengths come and go."""
    async with start_system(synthetic(), synthetic(noise=0.7)) as system:
        request = ask(max_tokens=40, lookahead=4, seed=11, **RATIO)
        alone = await system.generate(request)
        others = [ask((index % 16,), max_tokens=5 + index, lookahead=index % 9, seed=index) for index in range(16)]
        among, _ = await asyncio.gather(system.generate(request), system.generate_all(others))
    assert among.ids == alone.ids
    assert [each.accepted for each in among.rounds] == [each.accepted for each in alone.rounds]


async def test_a15_the_seed_in_use_is_told_and_repeats_an_unseeded_output() -> None:
    async with start_system(synthetic(), synthetic(noise=0.7)) as system:
        unseeded = await system.generate(ask(max_tokens=40, lookahead=4))
        again = await system.generate(ask(max_tokens=40, lookahead=4, seed=unseeded.started.seed, **RATIO))
        assert again.ids == unseeded.ids


async def test_a16_unseeded_requests_differ() -> None:
    async with start_system(synthetic(), synthetic(noise=0.7)) as system:
        outputs = [(await system.generate(ask(max_tokens=16, lookahead=4))).ids for _ in range(64)]
        assert len({*map(tuple, outputs)}) >= 60
