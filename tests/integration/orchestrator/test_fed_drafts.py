"""A draft that is fed by the target's features, through the services: they reach it, and again when it lost them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.lm.engine import Engine
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.draft_pb2 import PROPOSER_EAGLE, PROPOSER_MEDUSA
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_RATIO,
    PLAIN_REASON_DRAFT_PREFILL,
    PLAIN_REASON_DRAFT_UNAVAILABLE,
    StopConditions,
)
from tests.harness.medusa import HEADS, SIZE, next_token, walking_heads, walking_target
from tests.harness.models import VOCAB
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.outcomes import RIGHT, Sampling, enumerate_outcomes, p_value
from tests.harness.system import RunningSystem, forget_sessions, start_system, synthetic
from tests.harness.walking_eagle import walking_eagle
from tests.harness.workers import start_draft, start_target

PROMPT = (5, 9, 2)
GREEDY = {"temperature": 0.0}
RULES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "coupled": {"acceptance": ACCEPTANCE_COUPLED},
    "ratio": {"acceptance": ACCEPTANCE_RATIO},
    "block": {"acceptance": ACCEPTANCE_BLOCK},
}


# Drafts that are right as often as the target says what it thinks most of, and the longest block that they make.
DRAFTS: dict[str, tuple[Callable[[float], Engine], int]] = {
    "medusa": (walking_heads, HEADS),
    "eagle": (walking_eagle, 64),
}
NUMBERS = {"medusa": PROPOSER_MEDUSA, "eagle": PROPOSER_EAGLE}

every_draft = pytest.mark.parametrize("proposer", DRAFTS)


@asynccontextmanager
async def fed(
    proposer: str, scale: float = 30.0, *, draft: Engine | None = None, **settings: Any
) -> AsyncIterator[RunningSystem]:
    settings |= {"draft_settings": {proposer: "directory"}, "tokenizer": f"synthetic:vocab_size={VOCAB}"}
    draft = draft or DRAFTS[proposer][0](scale)
    async with start_system(walking_target(scale), draft, proposers=proposer, **settings) as system:
        yield system


def unsure(proposer: str, scale: float) -> Engine:
    """A draft whose blocks are rejected at every length."""
    return walking_heads(scale) if proposer == "medusa" else walking_eagle(scale, noise=1.5)


def walk(count: int) -> list[int]:
    tokens = [PROMPT[-1]]
    for _ in range(count):
        tokens.append(next_token(tokens[-1]))
    return tokens[1:]


def drafted(generation: Generation) -> list[tuple[int, int]]:
    return [(one.drafted, one.accepted) for one in generation.rounds]


@every_draft
async def test_a_right_draft_is_accepted_from_the_second_round_on(proposer: str) -> None:
    async with fed(proposer) as system:
        said = await system.orchestrator.generate(ask(PROMPT, max_tokens=25, lookahead=5, **GREEDY))
    assert said.ids == walk(25)
    # A token in the first round; then as many as there are heads or are wanted, and the target's own.
    longest = min(5, DRAFTS[proposer][1])
    assert drafted(said) == [(0, 0)] + [(longest, longest)] * (24 // (longest + 1))


@every_draft
@pytest.mark.parametrize("nodes", [0, 7])
@pytest.mark.parametrize("rule", RULES)
async def test_the_output_is_that_without_it(proposer: str, rule: str, nodes: int) -> None:
    """With a target that is not sure: blocks are rejected at every length."""
    async with fed(proposer, 3.0, draft=unsure(proposer, 3.0)) as system:
        requests = [ask(PROMPT, max_tokens=40, lookahead=3, seed=seed, **RULES[rule]) for seed in range(8)]
        for request in requests:
            request.speculation.max_nodes = nodes
        said = await asyncio.gather(*map(system.orchestrator.generate, requests))
        for request in requests:
            request.speculation.lookahead = 0
        plain = await asyncio.gather(*map(system.orchestrator.generate, requests))
    counts = {one.accepted for generation in said for one in generation.rounds if one.drafted}
    if rule != "greedy":
        assert counts == {0, 1, 2, 3}
    elif proposer == "medusa":
        assert 3 in counts
    else:
        assert len(counts) > 1
    if rule in ("greedy", "coupled"):
        assert [one.ids for one in said] == [one.ids for one in plain]


@every_draft
@pytest.mark.parametrize("nodes", [0, 5])
@pytest.mark.parametrize("rule", ["ratio", "block"])
async def test_the_outputs_law_is_the_targets(proposer: str, rule: str, nodes: int) -> None:
    law = enumerate_outcomes(walking_target(6.0), PROMPT, Sampling(temperature=0.8), 2).law
    async with fed(proposer, 6.0, draft=unsure(proposer, 6.0)) as system:
        requests = [
            ask(
                PROMPT,
                lookahead=3,
                seed=seed,
                stop=StopConditions(max_tokens=5, ignore_eos=True),
                temperature=0.8,
                **RULES[rule],
            )
            for seed in range(400)
        ]
        for request in requests:
            request.speculation.max_nodes = nodes
        said = await system.generate_all(requests, concurrency=16)
    assert sum(one.accepted for one in said) > 40
    assert sum(one.drafted - one.accepted for one in said) > 40
    assert p_value(law, [one.ids[:2] for one in said]) > RIGHT


@every_draft
async def test_features_travel_for_those_who_want_them_alone_and_are_counted(proposer: str) -> None:
    async with fed(proposer) as system:
        said = await system.orchestrator.generate(ask(PROMPT, max_tokens=17, lookahead=3, **GREEDY))
        plain = await system.orchestrator.generate(ask(PROMPT, max_tokens=17, lookahead=0, **GREEDY))
    once = 2 * SIZE
    for one in said.rounds[1:-1]:
        # Of all tokens from the target, and of the last one of each round, or all of it, to the draft.
        assert one.wire_bytes > (3 + 1) * once + (once if proposer == "medusa" else (3 + 1) * once)
    assert max(one.wire_bytes for one in plain.rounds[1:]) < 2 * once


@every_draft
async def test_a_draft_that_lost_its_sessions_is_fed_again(proposer: str) -> None:
    """One round without a block, and the next one is as good as before."""
    async with fed(proposer) as system:
        call = system.orchestrator.stub.Generate(ask(PROMPT, max_tokens=60, lookahead=3, **GREEDY), timeout=20)
        said = Generation()
        dropped = False
        async for response in call:
            said.add(response)
            if len(said.rounds) == 5 and not dropped:
                dropped = True
                forget_sessions(system)
    assert said.ids == walk(60)
    without = [index for index, one in enumerate(said.rounds) if not one.drafted]
    assert 1 <= len(without[1:]) <= 2
    after = said.rounds[without[-1] + 1 :]
    assert after
    assert all(one.accepted == 3 for one in after[:-1])


@every_draft
@pytest.mark.parametrize("lost", ["draft", "target"])
async def test_acceptance_is_back_after_a_fail_over(proposer: str, lost: str) -> None:
    tokenizer, make = f"synthetic:vocab_size={VOCAB}", DRAFTS[proposer][0]
    settings: dict[str, Any] = {"proposers": proposer, proposer: "directory"}
    async with (
        start_target(walking_target()) as first_target,
        start_target(walking_target()) as second_target,
        start_draft(make(30.0), **settings) as first_draft,
        start_draft(make(30.0), **settings) as second_draft,
        start_orchestrator(
            [first_target.address, second_target.address],
            [first_draft.address, second_draft.address],
            tokenizer=tokenizer,
            draft_timeout=5,
        ) as orchestrator,
    ):
        workers = [first_target, second_target] if lost == "target" else [first_draft, second_draft]
        said = await cut_off(orchestrator, lost, workers)
    assert said.ids == walk(200)
    tail = said.rounds[-10:-1]
    assert [(one.drafted, one.accepted) for one in tail] == [(3, 3)] * len(tail)
    assert sum(not one.drafted for one in said.rounds) <= 5


async def cut_off(orchestrator: RunningOrchestrator, lost: str, workers: Any) -> Generation:
    """A generation whose worker stops in the middle."""
    said, stopped = Generation(), False
    async for response in orchestrator.stub.Generate(
        ask(PROMPT, lookahead=3, stop=StopConditions(max_tokens=200, ignore_eos=True), **GREEDY), timeout=30
    ):
        said.add(response)
        if len(said.rounds) == 8 and not stopped:
            stopped = True
            pool = orchestrator.core.targets if lost == "target" else orchestrator.core.drafts
            address = next(link.address for link in pool.links if link.sessions)
            await next(it for it in workers if it.address == address).host.stop()
    return said


@every_draft
async def test_a_target_that_shows_no_features_leaves_it_without_blocks_and_says_why(proposer: str) -> None:
    draft, settings = DRAFTS[proposer][0](30.0), {proposer: "directory"}
    async with start_system(synthetic(vocab_size=VOCAB), draft, proposers=proposer, draft_settings=settings) as system:
        said = await system.orchestrator.generate(ask(PROMPT, max_tokens=12, lookahead=3, **GREEDY))
    assert len(said.tokens) == 12
    assert not any(one.drafted for one in said.rounds)
    reasons = [one.plain_reason for one in said.rounds]
    assert reasons[-2] == PLAIN_REASON_DRAFT_UNAVAILABLE
    assert PLAIN_REASON_DRAFT_PREFILL not in reasons[3:]


@every_draft
async def test_the_control_chooses_its_lengths(proposer: str) -> None:
    async with fed(proposer, lookahead="auto") as system:
        said = await system.orchestrator.generate(
            ask(PROMPT, proposer=NUMBERS[proposer], stop=StopConditions(max_tokens=120, ignore_eos=True), **GREEDY)
        )
    assert said.ids == walk(120)
    assert sum(one.accepted for one in said.rounds) > 0
    assert pb.PLAIN_REASON_DRAFT_UNAVAILABLE not in {one.plain_reason for one in said.rounds}
