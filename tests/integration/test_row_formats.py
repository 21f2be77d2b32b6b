"""What crosses the wire does not change a token: LOGITS, SUPPORT and SAMPLE for the same seed, through all services."""

from typing import Any

import pytest

from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    GenerateRequest,
)
from outrider.v1.target_pb2 import (
    ROW_FORMAT_LOGITS,
    ROW_FORMAT_SAMPLE,
    ROW_FORMAT_SUPPORT,
    RowFormat,
    VerifyResult,
)
from target_service import call
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import start_draft, start_target

VOCAB = 24
TOKENIZER = f"synthetic:vocab_size={VOCAB}"
TARGET = SyntheticSpec(vocab_size=VOCAB, seed=5, order=2)
DRAFT = SyntheticSpec(vocab_size=VOCAB, seed=5, order=2, noise=0.7)

SURFACE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 6},
    {"temperature": 1.4, "top_p": 0.8},
    {"min_p": 0.1, "repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "logit_bias": {3: 4.0, 7: -100.0}},
]


def with_format(row_format: "RowFormat.ValueType", law_top: int = 0, **fields: Any) -> GenerateRequest:
    request = ask(**fields)
    request.speculation.row_format = row_format
    request.speculation.law_top = law_top
    return request


@pytest.fixture
def formats_seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kinds of rows that the target sent."""
    seen: set[str] = set()
    original = call.result_message

    def spy(job: Any) -> VerifyResult:
        result = original(job)
        seen.add(str(result.WhichOneof("rows")))
        return result

    monkeypatch.setattr(call, "result_message", spy)
    return seen


async def both(orchestrator: RunningOrchestrator, compact: int, seen: set[str], **fields: Any) -> Generation:
    """The generation under the compact format, which must be that under LOGITS token by token and round by round."""
    results = []
    for row_format, name in (
        (compact, "support" if compact == ROW_FORMAT_SUPPORT else "sample"),
        (ROW_FORMAT_LOGITS, "logits"),
    ):
        seen.clear()
        results.append(await orchestrator.generate(with_format(row_format, **fields)))  # type: ignore[arg-type]
        assert seen == {name}
    one, other = results
    assert one.ids == other.ids
    assert [token.origin for token in one.tokens] == [token.origin for token in other.tokens]
    return one


@pytest.mark.parametrize("rule", [ACCEPTANCE_RATIO, ACCEPTANCE_BLOCK])
@pytest.mark.parametrize("law_top", [1, 4, 24])
async def test_logits_and_support_give_the_same_tokens(rule: int, law_top: int, formats_seen: set[str]) -> None:
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_draft(SyntheticEngine(DRAFT)) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER, draft_timeout=30) as orchestrator,
    ):
        kinds = set()
        for index, sampling in enumerate(SURFACE):
            generation = await both(
                orchestrator,
                ROW_FORMAT_SUPPORT,
                formats_seen,
                acceptance=rule,
                law_top=law_top,
                seed=100 + index,
                max_tokens=40,
                lookahead=index % 4 + 2,
                **sampling,
            )
            kinds |= {token.origin for token in generation.tokens}
            if sampling.get("logit_bias"):
                assert 7 not in generation.ids
        assert len(kinds) == 4  # accepted, recovered, bonus and plain


async def test_logits_and_sample_give_the_same_tokens(formats_seen: set[str]) -> None:
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_draft(SyntheticEngine(DRAFT)) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER, draft_timeout=30) as orchestrator,
    ):
        for index, sampling in enumerate(SURFACE):
            fields = {"seed": 200 + index, "max_tokens": 40, **sampling}
            coupled = await both(orchestrator, ROW_FORMAT_SAMPLE, formats_seen, acceptance=ACCEPTANCE_COUPLED, **fields)
            assert coupled.accepted > 0
            greedy = {**fields, "temperature": 0.0}
            await both(orchestrator, ROW_FORMAT_SAMPLE, formats_seen, acceptance=ACCEPTANCE_GREEDY, **greedy)


@pytest.mark.parametrize("top", [2, 0])
async def test_a_large_vocabulary_with_speculation_off_and_on(top: int, formats_seen: set[str]) -> None:
    spec = SyntheticSpec(vocab_size=3000, seed=2, order=1, scale=3.0)
    noisy = SyntheticSpec(vocab_size=3000, seed=2, order=1, scale=3.0, noise=0.3)
    async with (
        start_target(SyntheticEngine(spec)) as target,
        start_draft(SyntheticEngine(noisy)) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer="synthetic:vocab_size=3000") as orchestrator,
    ):
        for lookahead in (0, 4):
            fields: dict[str, Any] = {"seed": 9, "lookahead": lookahead, "law_top": top, "max_tokens": 25}
            await both(orchestrator, ROW_FORMAT_SUPPORT, formats_seen, acceptance=ACCEPTANCE_RATIO, **fields)
            await both(orchestrator, ROW_FORMAT_SAMPLE, formats_seen, acceptance=ACCEPTANCE_COUPLED, **fields)


async def test_the_default_formats_are_the_compact_ones(formats_seen: set[str]) -> None:
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_draft(SyntheticEngine(DRAFT)) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER, draft_timeout=30) as orchestrator,
    ):
        for request, rule, kind in (
            (ask(), ACCEPTANCE_RATIO, "support"),
            (ask(seed=1), ACCEPTANCE_COUPLED, "sample"),
            (ask(temperature=0.0), ACCEPTANCE_GREEDY, "sample"),
        ):
            formats_seen.clear()
            generation = await orchestrator.generate(request)
            assert generation.started.acceptance == rule
            assert formats_seen == {kind}
            assert generation.drafted > 0


async def test_greedy_and_coupled_blocks_travel_without_their_law(monkeypatch: pytest.MonkeyPatch) -> None:
    from draft_service import answers

    laws: list[bool] = []
    original = answers.block_message

    def spy(tokens: Any, law: Any, timing: Any = None) -> Any:
        laws.append(law is not None)
        return original(tokens, law, timing)

    monkeypatch.setattr(answers, "block_message", spy)
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        # A block ahead would be made after the generation that it is for.
        start_draft(SyntheticEngine(DRAFT), ahead_blocks=0) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER, draft_timeout=30) as orchestrator,
    ):
        for fields, with_law in (({"seed": 1}, False), ({"temperature": 0.0}, False), ({}, True)):
            laws.clear()
            await orchestrator.generate(ask(**fields))  # type: ignore[arg-type]
            assert set(laws) == {with_law}
