"""E4: what a worker really holds is shown, and a difference that costs something is said when the pair meets."""

import logging

import pytest

from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoRequest, WorkerStatus
from tests.harness.engines import DEADLINE
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.system import synthetic
from tests.harness.workers import start_draft, start_target


async def workers_of(orchestrator: RunningOrchestrator) -> list[WorkerStatus]:
    answer = await orchestrator.stub.GetInfo(OrchestratorServiceGetInfoRequest(), timeout=DEADLINE)
    return list(answer.workers)


async def test_e4_a_draft_with_a_shorter_context_is_used_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with (
        start_target(synthetic(context_length=64)) as target,
        start_draft(synthetic(context_length=16)) as draft,
        start_orchestrator([target.address], [draft.address]) as orchestrator,
    ):
        one, other = await workers_of(orchestrator)
        assert (one.model.context_length, one.model.dtype, one.max_lookahead) == (64, "float32", 64)
        assert (other.model.context_length, other.model.dtype, other.max_lookahead) == (16, "float32", 64)
        assert not one.shortfalls
        expected = "context of 16 tokens, the target has 64: longer sequences run without drafts"
        assert list(other.shortfalls) == [expected]
        logged = [record.getMessage() for record in caplog.records if record.name == "orchestrator.shortfalls"]
        assert logged == [f"draft {draft.address}: {expected}"]
        # What was said is what happens.
        generation = await orchestrator.generate(ask(max_tokens=40, lookahead=2, seed=1))
        assert all(round_.drafted == 0 for round_ in generation.rounds if round_.base_length >= 16)
        assert any(round_.drafted for round_ in generation.rounds)


async def test_e4_targets_that_differ_say_which_holds_less() -> None:
    async with (
        start_target(synthetic(context_length=64), max_lookahead=2) as small,
        start_target(synthetic(context_length=128)) as large,
        start_orchestrator([small.address, large.address], max_lookahead=8) as orchestrator,
    ):
        one, other = await workers_of(orchestrator)
        assert list(one.shortfalls) == [
            "context of 64 tokens, another target has 128: the shortest holds for all",
            "blocks of at most 2 tokens, max_lookahead is 8",
        ]
        assert not other.shortfalls


async def test_e4_a_worker_that_is_not_in_use_has_a_reason_instead() -> None:
    async with (
        start_target(synthetic()) as target,
        start_orchestrator([target.address], ["127.0.0.1:1"], expect=(1, 0)) as orchestrator,
    ):
        _, draft = await workers_of(orchestrator)
        assert draft.reason
        assert not draft.shortfalls
        assert not draft.HasField("model")
