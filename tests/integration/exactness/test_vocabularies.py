"""Drafts of another vocabulary: whatever they draft and however it is translated, the output is the target's."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from draft_service.config import TranslationWay
from outrider.law.draft import truncate
from outrider.lm.engine import Engine, Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import vocabulary_of
from outrider.v1.draft_pb2 import (
    TRANSLATION_INTERSECTION,
    TRANSLATION_STRING,
    TRANSLATION_UNSPECIFIED,
    Translation,
)
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    Acceptance,
    GenerateRequest,
    OrchestratorServiceGetInfoRequest,
)
from outrider.v1.types_pb2 import Grammar
from tests.harness.faults import HookedEngine
from tests.harness.orchestrator import Generation, ask
from tests.harness.outcomes import RIGHT, Sampling, enumerate_outcomes, p_value
from tests.harness.system import RunningSystem, start_system
from tests.harness.vocabularies import OWN, characters, prose, reciting, saved, target_tokenizer, translated
from tests.harness.wrappers import ChangedEngine, served_as

TOKENS = 40
MARK = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(target_tokenizer(), tmp_path_factory.mktemp("target"))


@asynccontextmanager
async def pair(
    tokenizer: str, name: str, way: TranslationWay = TranslationWay.AUTO, mistakes: int = 9
) -> AsyncIterator[RunningSystem]:
    """A target that recites with some mistakes, and a draft of another vocabulary that recites with others."""
    target, own = target_tokenizer(), OWN[name][0]()
    draft = translated(target, own, reciting(own, every=mistakes))
    async with start_system(reciting(target, every=7), draft, tokenizer=tokenizer, translation=way) as system:
        yield system


def prompt(at: int, size: int = 60) -> list[int]:
    """The beginning of what is recited, so that both know where they are."""
    return target_tokenizer()(prose()[:4000], add_special_tokens=False).input_ids[: size + at]  # type: ignore[no-any-return]


def requests(rule: Acceptance.ValueType, lookahead: int) -> list[GenerateRequest]:
    temperature = 0.0 if rule == ACCEPTANCE_GREEDY else 1.0
    return [
        ask(
            prompt(at),
            max_tokens=TOKENS,
            lookahead=lookahead,
            seed=at,
            temperature=temperature,
            acceptance=rule,
        )
        for at in (0, 7, 40)
    ]


def acceptance(generations: list[Generation]) -> float:
    return sum(one.accepted for one in generations) / sum(one.drafted for one in generations)


def dropped(system: RunningSystem) -> int:
    """Blocks that could not be used."""
    reasons = ("malformed", "wrong_length", "token_outside_vocabulary", "audit", "grammar")
    return sum(system.meters.count("outrider.draft_discarded", reason=reason) for reason in reasons)


def ways(generations: list[Generation]) -> set[Translation.ValueType]:
    return {each.translation for one in generations for each in one.rounds if each.drafted}


@pytest.mark.parametrize("way", [TranslationWay.INTERSECTION, TranslationWay.STRING])
@pytest.mark.parametrize("name", OWN)
async def test_greedy_and_coupled_say_what_they_say_without_a_draft(
    tokenizer: str, name: str, way: TranslationWay
) -> None:
    expected = TRANSLATION_STRING if way is TranslationWay.STRING else TRANSLATION_INTERSECTION
    async with pair(tokenizer, name, way) as system:
        for rule in (ACCEPTANCE_GREEDY, ACCEPTANCE_COUPLED):
            plain = await system.generate_all(requests(rule, 0))
            for lookahead in (1, 5):
                drafted = await system.generate_all(requests(rule, lookahead))
                assert [one.ids for one in drafted] == [one.ids for one in plain], (rule, lookahead)
                assert ways(drafted) == {expected}
                # A tokenizer that loses spaces drafts little of use.
                assert acceptance(drafted) > 0.1 or not OWN[name][1], (rule, lookahead)
        assert dropped(system) == 0


@pytest.mark.parametrize("rule", [ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK])
@pytest.mark.parametrize("name", OWN)
async def test_rules_that_need_a_law_get_that_of_the_shared_tokens(
    tokenizer: str, name: str, rule: Acceptance.ValueType
) -> None:
    """The orchestrator audits every block: tokens that are not drawn from the law beside them would be dropped."""
    async with pair(tokenizer, name) as system:
        drafted = await system.generate_all(requests(rule, 4))
        assert ways(drafted) == {TRANSLATION_INTERSECTION}
        assert acceptance(drafted) > 0.1 or not OWN[name][1]
        assert dropped(system) == 0


async def test_a_law_that_is_not_renormalised_is_dropped(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: what the draft model gives to tokens that the target lacks is missing from the law."""

    def lacking(*arguments: object) -> object:
        return [(ids, probs * 0.97) for ids, probs in truncate(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr("draft_service.proposers.model.truncate", lacking)
    async with pair(tokenizer, "larger byte-level") as system:
        drafted = await system.generate_all(requests(ACCEPTANCE_RATIO, 4))
        assert sum(one.drafted for one in drafted) == 0
        assert system.meters.count("outrider.draft_discarded", reason="audit") > 0


async def test_by_default_each_rule_gets_its_way_and_says_so(tokenizer: str) -> None:
    """What masks tokens does so in the target's; GetInfo says what is shared."""
    async with pair(tokenizer, "sentencepiece") as system:
        info = await system.orchestrator.stub.GetInfo(OrchestratorServiceGetInfoRequest(), timeout=10)
        (draft,) = (worker for worker in info.workers if worker.kind == "draft")
        own = OWN["sentencepiece"][0]()
        assert draft.usable
        assert draft.model.vocab_size == len(target_tokenizer())
        assert draft.translated.own_size == len(own)
        assert 256 < draft.translated.shared_tokens < len(own)
        assert list(draft.translated.ways) == [TRANSLATION_INTERSECTION, TRANSLATION_STRING]
        (plain,) = await system.generate_all(requests(ACCEPTANCE_GREEDY, 0)[:1])
        assert {each.translation for each in plain.rounds} == {TRANSLATION_UNSPECIFIED}
        (greedy,) = await system.generate_all(requests(ACCEPTANCE_GREEDY, 4)[:1])
        assert ways([greedy]) == {TRANSLATION_STRING}
        masked = requests(ACCEPTANCE_GREEDY, 4)[0]
        masked.grammar.CopyFrom(Grammar(regex="[a-z ]{8,}"))
        masked.stop.token_ids.append(1)
        one = await system.generate(masked)
        assert ways([one]) == {TRANSLATION_INTERSECTION}


async def test_biases_bans_and_penalties_are_in_the_targets_tokens(tokenizer: str) -> None:
    async with pair(tokenizer, "smaller byte-level") as system:
        for rule in (ACCEPTANCE_GREEDY, ACCEPTANCE_COUPLED):
            said = []
            for lookahead in (0, 5):
                request = requests(rule, lookahead)[0]
                request.sampling.frequency_penalty = 0.7
                request.sampling.repetition_penalty = 1.3
                request.sampling.logit_bias[300] = 11.0
                request.sampling.banned_token_ids.extend(range(310, 400))
                request.stop.token_ids.append(1)
                request.stop.min_tokens = 10
                said.append((await system.generate(request)).ids)
            assert said[0] == said[1]


async def test_special_tokens_in_the_prompt_and_halves_of_characters(tokenizer: str) -> None:
    """What stands in the prompt need not be text; a draft of it is a draft like any other."""
    halves = target_tokenizer()("日本 語る 👩‍👩‍👧", add_special_tokens=False).input_ids
    async with pair(tokenizer, "sentencepiece") as system:
        for tokens in ([0, *prompt(0)], [MARK], halves[:-1], [MARK, *halves[:2], 0, 1, *prompt(3)], [1, 1, 1]):
            said = [
                (await system.generate(ask(tokens, max_tokens=30, lookahead=lookahead, temperature=0.0)))
                for lookahead in (0, 4)
            ]
            assert said[0].ids == said[1].ids
            assert said[1].drafted > 0


def unhurried(engine: Engine) -> Engine:
    """Passes are long enough for a block to be made meanwhile, on any machine."""
    slow = HookedEngine(engine)

    def wait(segments: Sequence[Segment], rows: list[torch.Tensor]) -> list[torch.Tensor]:
        time.sleep(0.03)
        return rows

    slow.edit = wait
    return slow


async def test_drafting_ahead_goes_on_in_another_vocabulary(tokenizer: str) -> None:
    """Without mistakes on either side every block is accepted whole, and all but the first were there before."""
    target, own = target_tokenizer(), OWN["larger byte-level"][0]()
    draft = translated(target, own, reciting(own))
    async with start_system(unhurried(reciting(target)), draft, tokenizer=tokenizer) as system:
        (one,) = await system.generate_all([ask(prompt(0), max_tokens=80, lookahead=4, temperature=0.0)])
        rounds = [each for each in one.rounds if each.drafted]
        assert acceptance([one]) > 0.6
        assert sum(each.drafted_ahead > 0 for each in rounds) > len(rounds) / 3


SPEC = {"vocab_size": 6, "scale": 1.0}
SMALL_TARGET = characters("abcd", "a b", "c d")
SMALL_OWN = characters("dcba", "b c", "c d")
SAMPLING = Sampling(temperature=0.8)


def small(seed: int) -> Engine:
    return SyntheticEngine(SyntheticSpec(seed=seed, **SPEC))  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK])
async def test_the_output_has_the_targets_law(rule: Acceptance.ValueType, tmp_path: Path) -> None:
    """Every outcome of three tokens; one token of each vocabulary is not in the other."""
    start, count = (0, 4, 2), 500
    law = enumerate_outcomes(small(5), start, SAMPLING, 3).law
    draft = translated(SMALL_TARGET, SMALL_OWN, small(8))
    assert draft.vocabularies.shared.targets.tolist() == [0, 1, 2, 3, 5]
    target = ChangedEngine(small(5), info=served_as(small(5).info, vocabulary_of(SMALL_TARGET)))
    async with start_system(target, draft, tokenizer=saved(SMALL_TARGET, tmp_path)) as system:
        generations = await system.generate_all(
            ask(start, max_tokens=4, lookahead=1 + seed % 2, seed=seed, temperature=0.8, acceptance=rule)
            for seed in range(count)
        )
        assert acceptance(generations) > 0.2
        assert p_value(law, [one.ids[:3] for one in generations]) > RIGHT
        assert dropped(system) == 0
