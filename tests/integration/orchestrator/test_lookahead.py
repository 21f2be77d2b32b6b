"""F2, F3: the lookahead control in the running system: what it says, what it sends, and that outputs stay the same."""

import asyncio
import random
from dataclasses import replace
from itertools import count

import pytest

from orchestrator.lookahead import DraftHistory, SessionLookahead
from orchestrator.metrics import Metrics
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_GREEDY,
    PLAIN_REASON_DRAFT_PREFILL,
    PLAIN_REASON_LAST_TOKEN,
    PLAIN_REASON_NO_GAIN,
    PLAIN_REASON_PREFILL,
    OrchestratorServiceGetInfoRequest,
)
from tests.harness.faults import SPEC, draft_engine, greedy_output, target_engine
from tests.harness.meters import Meters
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.system import start_system, synthetic
from tests.harness.workers import start_draft, start_target

PROMPTS = [(index, 2, 5) for index in range(8)]
RULES = {
    "greedy": {"temperature": 0.0, "acceptance": ACCEPTANCE_GREEDY},
    "coupled": {"temperature": 1.0, "seed": 7, "acceptance": ACCEPTANCE_COUPLED},
}


async def outputs(orchestrator: RunningOrchestrator, lookahead: int | None, **rule: object) -> list[Generation]:
    requests = (ask(prompt, max_tokens=60, lookahead=lookahead, **rule) for prompt in PROMPTS)  # type: ignore[arg-type]
    return list(await asyncio.gather(*map(orchestrator.generate, requests)))


def oscillate(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every choice of the control is another one, 0 half of the time; returns what was chosen."""
    dice, chosen = random.Random(5), list[int]()

    def choose(self: SessionLookahead, draft: DraftHistory, limit: int) -> int:
        chosen.append(dice.choice([0, dice.randint(0, limit)]))
        return chosen[-1]

    monkeypatch.setattr(SessionLookahead, "_best", choose)
    return chosen


@pytest.mark.parametrize("rule", RULES)
async def test_outputs_are_the_same_with_the_control_on_off_and_swinging(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = synthetic(), synthetic(noise=0.7)
    async with start_system(target, draft, lookahead="auto") as system:
        off = [one.ids for one in await outputs(system.orchestrator, 0, **RULES[rule])]
        fixed = await outputs(system.orchestrator, 5, **RULES[rule])
        controlled = await outputs(system.orchestrator, None, **RULES[rule])
        chosen = oscillate(monkeypatch)
        swinging = await outputs(system.orchestrator, None, **RULES[rule])
        assert off == [one.ids for one in fixed] == [one.ids for one in controlled] == [one.ids for one in swinging]
        assert 0 in chosen
        assert len(set(chosen)) > 5
        assert len({one.drafted for generation in swinging for one in generation.rounds}) > 3


async def test_a_request_that_names_a_lookahead_keeps_it() -> None:
    async with start_system(synthetic(), synthetic(), lookahead="auto") as system:
        one = await system.generate(ask(max_tokens=26, lookahead=4, temperature=0.0))
        assert [each.drafted for each in one.rounds] == [0, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(("setting", "told"), [("auto", None), (3, 3), (0, 0)])
async def test_the_setting_is_told_and_kept(setting: object, told: int | None) -> None:
    async with start_system(synthetic(), synthetic(), lookahead=setting) as system:
        info = await system.orchestrator.stub.GetInfo(OrchestratorServiceGetInfoRequest())
        assert (info.default_lookahead if info.HasField("default_lookahead") else None) == told
        one = await system.generate(ask(max_tokens=21, temperature=0.0))
        if told is not None:
            assert {each.drafted for each in one.rounds[1:-1]} == {told}


async def test_blocks_are_no_longer_than_the_limit() -> None:
    async with start_system(synthetic(), synthetic(), lookahead="auto", max_lookahead=3) as system:
        one = await system.generate(ask(max_tokens=200, temperature=0.0))
        assert max(each.drafted for each in one.rounds) == 3


def slow(**settings: object) -> SyntheticEngine:
    return SyntheticEngine(SyntheticSpec(vocab_size=16, **settings))  # type: ignore[arg-type]


async def test_f2_where_blocks_do_not_pay_nothing_is_sent_but_probes_and_rounds_say_why() -> None:
    """A draft that is always wrong, and so slow that no plain round looks as long, whatever the machine does."""
    target, draft = slow(pass_ms=4), slow(pass_ms=25, agree=0.0)
    async with start_system(target, draft, lookahead="auto") as system:
        for _ in range(4):
            learned = await system.generate(ask(max_tokens=60, temperature=0.0))
            assert learned.ids == greedy_output((0, 1, 2), 60)
            assert learned.accepted == 0
        before = {kind: system.meters.count("outrider.draft_calls", kind=kind) for kind in ("block", "probe", "prefix")}
        # At most what it takes to believe it.
        assert 1 <= before["block"] <= 60
        later = [await system.generate(ask((index, 3), max_tokens=100, temperature=0.0)) for index in range(4)]
        after = {kind: system.meters.count("outrider.draft_calls", kind=kind) for kind in before}
        # One round that the machine held up may make a plain one look long.
        assert after["block"] - before["block"] <= 4
        rounds = [one for generation in later for one in generation.rounds]
        assert after["probe"] - before["probe"] <= 0.05 * len(rounds)
        # A probe may have to tell the draft the session's tokens first.
        assert after["prefix"] - before["prefix"] <= 2 * len(later)
        reasons = {one.plain_reason for one in rounds if not one.drafted}
        assert PLAIN_REASON_NO_GAIN in reasons
        assert reasons <= {
            PLAIN_REASON_NO_GAIN,
            PLAIN_REASON_PREFILL,
            PLAIN_REASON_DRAFT_PREFILL,
            PLAIN_REASON_LAST_TOKEN,
        }
        assert system.meters.count("outrider.rounds", reason="NO_GAIN") > 300


async def test_f3_a_draft_that_was_left_alone_for_long_is_right_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off for the first rounds, then on: the draft reads what it missed, and every block is kept whole."""
    choices = count()
    monkeypatch.setattr(SessionLookahead, "_best", lambda self, draft, limit: min(4 * (next(choices) > 52), limit))
    monkeypatch.setattr(SessionLookahead, "_may_probe", lambda self, draft: False)
    meters = Meters()
    async with (
        # Rounds do not run away from the pass that reads.
        start_target(target_engine(replace(SPEC, pass_ms=20.0))) as target,
        start_draft(draft_engine(SPEC)) as draft,
        start_orchestrator(
            [target.address], [draft.address], lookahead="auto", draft_timeout=20, metrics=Metrics(meters.provider)
        ) as orchestrator,
    ):
        generation = Generation()
        async for response in orchestrator.stub.Generate(ask((1, 2), max_tokens=150, temperature=0.0)):
            generation.add(response)
        assert generation.ids == greedy_output((1, 2), 150)
        first = next(index for index, one in enumerate(generation.rounds) if one.drafted)
        assert first >= 50
        assert all(not one.drafted for one in generation.rounds[:50])
        drafted = [one for one in generation.rounds[first:] if one.drafted]
        assert len(drafted) >= 15
        assert all(one.accepted == one.drafted for one in drafted)
        assert meters.count("outrider.draft_calls", kind="prefix") == 1
