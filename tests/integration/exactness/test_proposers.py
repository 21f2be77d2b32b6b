"""The exactness of every proposer under every acceptance rule and row format. A new proposer is listed by itself."""

from collections.abc import Sequence

import pytest

from draft_service.config import PROPOSERS
from outrider.lm.tokenizer import load_tokenizer
from outrider.v1 import draft_pb2
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    Acceptance,
    GenerateRequest,
)
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, ROW_FORMAT_SAMPLE, ROW_FORMAT_SUPPORT
from tests.harness.mutants import RATIO_MUTANTS, SHARED_MUTANTS
from tests.harness.orchestrator import Generation, ask
from tests.harness.outcomes import ALPHA, RIGHT, Sampling, enumerate_outcomes, p_value
from tests.harness.system import RunningSystem, start_system, synthetic

# Whatever is said first, the last token of the prompt and it stand in the prompt: there is something to copy.
PROMPT = (1, 0, 3, 1, 2, 4, 1, 3, 2, 1, 4, 5, 1, 5, 0, 1)
SPEC = {"vocab_size": 6, "seed": 5, "scale": 1.0}
SETTINGS = {"early_exit_layers": 1, "suffix_history": 4096}
PREDICTION = load_tokenizer("synthetic:vocab_size=6").decode([0, 3, 1, 2, 4, 1, 3, 2, 1, 4, 5, 1, 5, 0, 1] * 2)
BY_TOKEN = (ACCEPTANCE_GREEDY, ACCEPTANCE_COUPLED)
BY_LAW = (ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK)
FORMATS = {
    **dict.fromkeys(BY_TOKEN, (ROW_FORMAT_SAMPLE, ROW_FORMAT_LOGITS)),
    **dict.fromkeys(BY_LAW, (ROW_FORMAT_SUPPORT, ROW_FORMAT_LOGITS)),
}
LENGTH, SAMPLES = 2, 240

# Needs a target that shows features: tests/integration/orchestrator/test_fed_drafts.py.
FED = {"medusa", "eagle"}
KEEPING = {"suffix", "suffix_or_model"}

every_proposer = pytest.mark.parametrize("proposer", [name for name in PROPOSERS if name not in FED])


def request(proposer: str, rule: "Acceptance.ValueType", **fields: object) -> GenerateRequest:
    temperature = 0.0 if rule == ACCEPTANCE_GREEDY else 0.8
    made = ask(
        PROMPT,
        **{"proposer": PROPOSERS[proposer], "acceptance": rule, "temperature": temperature, "lookahead": 3, **fields},  # type: ignore[arg-type]
    )
    if made.speculation.proposer == draft_pb2.PROPOSER_PREDICTION:
        made.speculation.prediction = PREDICTION
    return made


def system(proposer: str, **draft: object):  # type: ignore[no-untyped-def]
    """Beside it the worker offers suffix, with which alone outputs are kept, and the model, which others stand on."""
    offered, settings = dict.fromkeys((proposer, "suffix", "model")), {**SETTINGS, **draft}
    return start_system(
        synthetic(**SPEC), synthetic(**SPEC, noise=1.0), proposers=",".join(offered), draft_settings=settings
    )


@every_proposer
@pytest.mark.parametrize("rule", BY_TOKEN)
async def test_a_rule_that_looks_at_tokens_says_what_plain_decoding_says(
    proposer: str, rule: "Acceptance.ValueType"
) -> None:
    async with system(proposer) as running:
        drafted = 0
        for seed in range(3):
            plain = await running.generate(request(proposer, rule, seed=seed, lookahead=0, max_tokens=24))
            for row_format in FORMATS[rule]:
                # Twice: where outputs are kept, the second has the first one's to copy.
                for _ in range(2):
                    asked = request(proposer, rule, seed=seed, row_format=row_format, max_tokens=24)
                    one = await running.generate(asked)
                    assert one.ids == plain.ids
                    drafted += one.drafted
        assert drafted > 12


@every_proposer
@pytest.mark.parametrize("rule", BY_LAW)
async def test_dense_and_sparse_rows_give_the_same_tokens(proposer: str, rule: "Acceptance.ValueType") -> None:
    async with system(proposer, suffix_history=0) as running:
        for seed in range(4):
            sparse, dense = [
                await running.generate(request(proposer, rule, seed=seed, row_format=row_format, max_tokens=30))
                for row_format in FORMATS[rule]
            ]
            assert sparse.ids == dense.ids
            assert [one.accepted for one in sparse.rounds] == [one.accepted for one in dense.rounds]
            assert sparse.drafted > 0


async def outcomes(
    running: RunningSystem, proposer: str, rule: "Acceptance.ValueType", samples: int = SAMPLES
) -> Sequence[Generation]:
    """Those of a second and third token: the first comes without a block."""
    asked = (request(proposer, rule, seed=seed, max_tokens=LENGTH + 2) for seed in range(samples))
    return await running.generate_all(asked, concurrency=16)


@every_proposer
@pytest.mark.parametrize("rule", BY_LAW)
async def test_the_outputs_law_is_the_targets(proposer: str, rule: "Acceptance.ValueType") -> None:
    law = enumerate_outcomes(synthetic(**SPEC), PROMPT, Sampling(temperature=0.8), LENGTH).law
    async with system(proposer) as running:
        generations = await outcomes(running, proposer, rule)
    assert sum(one.accepted for one in generations) > SAMPLES / 10
    # Which outputs are kept when a request begins differs from run to run, and with them the blocks.
    assert p_value(law, [one.ids[:LENGTH] for one in generations]) > (RIGHT / 1000 if proposer in KEEPING else RIGHT)


@pytest.mark.parametrize("fault", ["residual_from_target", "squared_acceptance"])
async def test_a_mutant_of_the_rule_fails_with_suffix_too(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (SHARED_MUTANTS | RATIO_MUTANTS)[fault].install(monkeypatch)
    law = enumerate_outcomes(synthetic(**SPEC), PROMPT, Sampling(temperature=0.8), LENGTH).law
    async with system("suffix") as running:
        # Which outputs are kept when a request begins differs from run to run: more than enough in each.
        generations = await outcomes(running, "suffix", ACCEPTANCE_RATIO, 5 * SAMPLES)
    assert p_value(law, [one.ids[:LENGTH] for one in generations]) < ALPHA


async def test_trees_are_remembered_by_the_proposer_that_makes_them() -> None:
    asked = request("model", ACCEPTANCE_COUPLED, max_tokens=30)
    asked.speculation.proposer, asked.speculation.max_nodes = draft_pb2.PROPOSER_AUTO, 6
    async with system("suffix_or_model") as running:
        await running.generate(asked)
        (link,) = running.orchestrator.core.drafts.links
        kinds = {kind for kind, _, _ in link.trees}
    assert kinds
    assert draft_pb2.PROPOSER_UNSPECIFIED not in kinds


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("rule", BY_TOKEN)
async def test_what_the_orchestrator_chooses_changes_no_token(rule: "Acceptance.ValueType", named: bool) -> None:
    async with system("suffix_or_model") as running:
        made_by: set[int] = set()
        for seed in range(6):
            asked = request("model", rule, seed=seed, lookahead=0, max_tokens=30)
            plain = await running.generate(asked)
            asked.speculation.lookahead = 3
            asked.speculation.proposer = draft_pb2.PROPOSER_AUTO if named else draft_pb2.PROPOSER_UNSPECIFIED
            one = await running.generate(asked)
            assert one.ids == plain.ids
            assert any(each.proposer_choice for each in one.rounds)
            made_by |= {each.proposer for each in one.rounds if each.drafted}
        # Of each something had to be seen.
        assert made_by == {draft_pb2.PROPOSER_MODEL, draft_pb2.PROPOSER_SUFFIX}
