"""Token trees through the services: the same promises as of chains, for every rule and format of rows."""

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from outrider.lm.engine import Engine, Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import synthetic_tokenizer, vocabulary_of
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
)
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, ROW_FORMAT_UNSPECIFIED
from outrider.v1.types_pb2 import Grammar
from tests.harness.engines_lm import served_tiny_engine, tiny_engine
from tests.harness.models import VOCAB
from tests.harness.orchestrator import Generation, ask
from tests.harness.outcomes import ALPHA, RIGHT, Sampling, enumerate_outcomes, p_value
from tests.harness.system import RunningSystem, start_system, synthetic
from tests.harness.wrappers import ChangedEngine, always_wrong, served_as

module = importlib.import_module("orchestrator.acceptance.branching")

RULES = {
    "greedy": (ACCEPTANCE_GREEDY, {"temperature": 0.0}),
    "coupled": (ACCEPTANCE_COUPLED, {}),
    "ratio": (ACCEPTANCE_RATIO, {}),
    "block": (ACCEPTANCE_BLOCK, {}),
}
BY_TOKEN = ("greedy", "coupled")
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5}


def tree(nodes: int = 8, **fields: Any) -> pb.GenerateRequest:
    request = ask(**{"lookahead": 4, **fields})
    request.speculation.max_nodes = nodes
    return request


def drafting_rounds(generation: Generation) -> list[pb.Round]:
    return [one for one in generation.rounds if one.drafted]


def shapes(generations: Sequence[Generation]) -> int:
    """Rounds with trees that are none but chains."""
    return sum(one.tree_depth > 0 for generation in generations for one in generation.rounds)


@pytest.mark.parametrize("rule", RULES)
async def test_a_draft_that_is_the_target_is_kept_to_the_end_of_a_path(rule: str) -> None:
    acceptance, sampling = RULES[rule]
    async with start_system(synthetic(order=2), synthetic(order=2)) as system:
        requests = [tree(seed=seed, acceptance=acceptance, max_tokens=40, **sampling) for seed in range(6)]
        for generation in await system.generate_all(requests):
            rounds = drafting_rounds(generation)
            assert rounds
            for one in rounds:
                assert 1 <= one.accepted <= one.tree_depth or (not one.tree_depth and one.accepted == one.drafted)
            assert {token.origin for token in generation.tokens} <= {
                pb.TOKEN_ORIGIN_ACCEPTED,
                TOKEN_ORIGIN_BONUS,
                TOKEN_ORIGIN_PLAIN,
            }


@pytest.mark.parametrize("rule", RULES)
async def test_a_draft_that_is_always_wrong_gives_a_token_a_round(rule: str) -> None:
    acceptance, sampling = RULES[rule]
    sampling = {"temperature": 0.0} if rule == "greedy" else {"top_k": 1}
    async with start_system(synthetic(order=2), always_wrong(synthetic(order=2))) as system:
        generation = await system.generate(tree(seed=3, acceptance=acceptance, max_tokens=12, **sampling))
        plain = await system.generate(ask(seed=3, lookahead=0, max_tokens=12, **sampling))
        assert generation.ids == plain.ids
        assert generation.accepted == 0
        assert len(generation.rounds) == 12


@pytest.mark.parametrize("rule", BY_TOKEN)
@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["", "penalties"])
async def test_the_tokens_are_those_of_plain_decoding(rule: str, penalties: dict[str, float]) -> None:
    """Any draft, any size, beside chains in the same passes; dense rows too."""
    acceptance, sampling = RULES[rule]
    sampling = {**sampling, **penalties}
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.7)) as system:
        seeds = range(5)
        plain = [ask(seed=seed, lookahead=0, max_tokens=40, **sampling) for seed in seeds]
        expected = [one.ids for one in await system.generate_all(plain)]
        for nodes, lookahead, row_format in ((2, 1, 0), (8, 4, 0), (16, 6, ROW_FORMAT_LOGITS), (0, 3, 0)):
            fields = {"acceptance": acceptance, "lookahead": lookahead, "row_format": row_format, "max_tokens": 40}
            generations = await system.generate_all(tree(nodes, seed=seed, **fields, **sampling) for seed in seeds)
            assert [one.ids for one in generations] == expected
            assert (shapes(generations) > 0) is (nodes > 0)
            assert all(one.drafted <= max(nodes, lookahead) for it in generations for one in it.rounds)
            assert all(one.tree_depth <= lookahead for it in generations for one in it.rounds)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
async def test_over_a_real_model_too_where_the_cache_holds_the_paths(architecture: str) -> None:
    """float32: many sessions with trees of their own, whose accepted paths are kept and built on."""
    target, draft = served_tiny_engine(architecture), served_tiny_engine(architecture)
    async with start_system(target, draft, tokenizer=f"synthetic:vocab_size={VOCAB}") as system:
        prompts = [[1, 2, 3 + index, *range(index)] for index in range(6)]
        plain = [ask(prompt, lookahead=0, temperature=0.0, max_tokens=24) for prompt in prompts]
        wanted = [tree(12, prompt=prompt, temperature=0.0, max_tokens=24) for prompt in prompts]
        expected, said = await system.generate_all(plain), await system.generate_all(wanted)
        assert [one.ids for one in said] == [one.ids for one in expected]
        assert shapes(said) > 6
        sampled = [tree(12, prompt=prompt, seed=7, max_tokens=24) for prompt in prompts]
        coupled = [ask(prompt, lookahead=0, seed=7, max_tokens=24) for prompt in prompts]
        assert [it.ids for it in await system.generate_all(sampled)] == [
            it.ids for it in await system.generate_all(coupled)
        ]


@pytest.mark.parametrize("rule", ["ratio", "block"])
async def test_the_format_of_rows_changes_no_token(rule: str) -> None:
    acceptance, _ = RULES[rule]
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.8)) as system:
        for fields in ({}, PENALTIES, {"top_p": 0.8, "top_k": 5}):
            said = []
            for row_format in (ROW_FORMAT_UNSPECIFIED, ROW_FORMAT_LOGITS):
                requests = (
                    tree(seed=seed, acceptance=acceptance, row_format=row_format, max_tokens=30, **fields)
                    for seed in range(5)
                )
                generations = await system.generate_all(requests)
                assert shapes(generations) > 10
                said.append([[(token.id, token.origin) for token in one.tokens] for one in generations])
            assert said[0] == said[1]


PROMPT, LENGTH = (0, 1, 2), 3
TARGET = SyntheticSpec(vocab_size=6, seed=5, scale=1.0)
DRAFT = SyntheticSpec(vocab_size=6, seed=5, scale=1.0, noise=1.5)
SAMPLES = 1500


async def outcomes(system: RunningSystem, rule: int, sampling: Sampling, samples: int) -> list[Generation]:
    requests = (
        tree(
            4 + seed % 4,
            prompt=PROMPT,
            max_tokens=4,
            lookahead=1 + seed % 3,
            seed=seed,
            acceptance=rule,
            row_format=ROW_FORMAT_UNSPECIFIED if seed % 4 else ROW_FORMAT_LOGITS,
            **asdict(sampling),
        )
        for seed in range(samples)
    )
    return await system.generate_all(requests)


CASES = {
    "ratio": (ACCEPTANCE_RATIO, Sampling(temperature=0.8)),
    "block with penalties": (ACCEPTANCE_BLOCK, Sampling(repetition_penalty=1.3, presence_penalty=0.4)),
}


@pytest.mark.parametrize("case", CASES)
async def test_every_outcome_has_the_targets_probability(case: str) -> None:
    """Three tokens over several rounds, all 216 outcomes, against a law that is computed a second time."""
    rule, sampling = CASES[case]
    law = enumerate_outcomes(SyntheticEngine(TARGET), PROMPT, sampling, LENGTH).law
    async with start_system(SyntheticEngine(TARGET), SyntheticEngine(DRAFT)) as system:
        generations = await outcomes(system, rule, sampling, SAMPLES)
    assert p_value(law, [one.ids[:LENGTH] for one in generations]) > RIGHT
    assert shapes(generations) > SAMPLES / 2
    assert 0.1 < sum(one.accepted for one in generations) / sum(one.drafted for one in generations) < 0.8


MUTANTS = {
    "the target's own law after a rejection": (module, "residual", lambda left: (left.target, left.tail)),
    "candidates judged as if drawn with replacement": (module, "without", lambda draft, at: draft),
}


@pytest.mark.parametrize("mutant", MUTANTS)
async def test_a_mutant_is_seen_through_the_services(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, sampling = CASES["ratio"]
    law = enumerate_outcomes(SyntheticEngine(TARGET), PROMPT, sampling, LENGTH).law
    monkeypatch.setattr(*MUTANTS[mutant])
    async with start_system(SyntheticEngine(TARGET), SyntheticEngine(DRAFT)) as system:
        generations = await outcomes(system, rule, sampling, SAMPLES)
    assert p_value(law, [one.ids[:LENGTH] for one in generations]) < ALPHA


@pytest.mark.parametrize("rule", ["greedy", "coupled", "ratio"])
async def test_a_tree_gets_further_than_a_chain_as_deep(rule: str) -> None:
    acceptance, sampling = RULES[rule]
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.7)) as system:
        kept = []
        for nodes in (0, 12):
            requests = (tree(nodes, seed=seed, acceptance=acceptance, max_tokens=60, **sampling) for seed in range(8))
            rounds = [it for one in await system.generate_all(requests) for it in drafting_rounds(one)]
            kept.append(sum(it.accepted for it in rounds) / len(rounds))
    assert kept[1] > 1.1 * kept[0]


async def test_log_probabilities_are_those_of_plain_decoding() -> None:
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.7)) as system:
        for row_format in (ROW_FORMAT_UNSPECIFIED, ROW_FORMAT_LOGITS):
            for rule, sampling in RULES.values():
                request = tree(seed=5, max_tokens=25, acceptance=rule, row_format=row_format, **sampling)
                request.logprobs = 2
                generation = await system.generate(request)
                assert shapes([generation])
                whole = [0, 1, 2]
                for token in generation.tokens:
                    logits = _logits(whole)
                    assert token.logprob == pytest.approx(logits[token.id], abs=1e-4)
                    assert [it.id for it in token.top_logprobs] == np.argsort(-logits)[:2].tolist()
                    whole.append(token.id)


def _logits(prefix: list[int]) -> np.ndarray:
    engine, tokens = synthetic(order=2), np.array(prefix, np.int32)
    (rows,) = engine.forward([Segment(engine.open(tokens), tokens, 1)])
    return rows[0].log_softmax(dim=0).numpy()


async def test_every_output_is_a_member_of_its_grammar() -> None:
    spec = {"vocab_size": 27, "seed": 3, "order": 2, "eos": 26}
    async with start_system(synthetic(**spec), synthetic(**spec, noise=0.8)) as system:
        for rule, sampling in RULES.values():
            request = tree(seed=2, max_tokens=40, acceptance=rule, **sampling)
            request.grammar.CopyFrom(Grammar(regex="([a-d]|xy)*(e|f[ab]+)"))
            plain = ask(seed=2, max_tokens=40, lookahead=0, **sampling)
            plain.grammar.CopyFrom(request.grammar)
            generation = await system.generate(request)
            if rule in (ACCEPTANCE_GREEDY, ACCEPTANCE_COUPLED):
                assert generation.ids == (await system.generate(plain)).ids
            assert sum(one.drafted for one in generation.rounds) > 0


async def test_a_target_that_knows_no_trees_gets_chains() -> None:
    async with start_system(synthetic(order=2), synthetic(order=2, noise=0.5)) as system:
        for link in system.orchestrator.core.targets.usable:
            link.max_tree_nodes = 0
        generation = await system.generate(tree(seed=1, max_tokens=20))
        assert not shapes([generation])
        assert generation.accepted > 0


def crowded() -> Engine:
    """With room for two sessions at a time."""
    inner = tiny_engine("llama", pages=30)
    vocabulary = vocabulary_of(synthetic_tokenizer(SyntheticSpec(vocab_size=VOCAB)))
    return ChangedEngine(inner, info=served_as(inner.info, vocabulary))


async def test_sessions_go_on_where_the_workers_forgot_them() -> None:
    """Six sessions push each other out of both caches: the whole prefix travels again, and a tree with it."""
    prompts = [[1, 2, 3 + index, *range(2 * index)] for index in range(6)]
    tokenizer = f"synthetic:vocab_size={VOCAB}"
    async with start_system(served_tiny_engine("llama"), tokenizer=tokenizer) as system:
        plain = [ask(prompt, lookahead=0, temperature=0.0, max_tokens=24) for prompt in prompts]
        expected = [one.ids for one in await system.generate_all(plain)]
    async with start_system(crowded(), crowded(), tokenizer=tokenizer) as system:
        wanted = [tree(12, prompt=prompt, temperature=0.0, max_tokens=24) for prompt in prompts]
        generations = await system.generate_all(wanted)
        assert [one.ids for one in generations] == expected
        assert shapes(generations) > 6
        assert system.meters.count("outrider.prefix_resent") > 0


async def test_what_is_out_of_range_is_refused() -> None:
    async with start_system(synthetic(), synthetic()) as system:
        with pytest.raises(Exception, match="max_nodes is 65, must be in"):
            await system.generate(tree(65))
