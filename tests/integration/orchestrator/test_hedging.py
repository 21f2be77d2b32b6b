"""Late blocks asked for at a second draft worker: speed alone depends on it, and only a bounded part of rounds."""

from collections.abc import Sequence

import pytest
import torch

from orchestrator import hedging
from outrider.lm.engine import Segment
from outrider.v1.orchestrator_pb2 import ACCEPTANCE_COUPLED, ACCEPTANCE_RATIO, Acceptance
from tests.harness.faults import Counters, HookedEngine, draft_engine, target_engine
from tests.harness.orchestrator import ask, start_orchestrator
from tests.harness.workers import start_draft, start_target

# 25 blocks, which earn two hedges. How long blocks take is known shortly before the last of them, the one that never
# comes: a machine that stops for a while would spend both on blocks before it.
PASSES, FEWEST = 100, 22


def stuck_after(passes: int) -> HookedEngine:
    """A draft whose model stands still in the middle of a block."""
    model = draft_engine()

    def hold(segments: Sequence[Segment], rows: list[torch.Tensor]) -> list[torch.Tensor]:
        if model.passes == passes:
            model.hold()
        return rows

    model.edit = hold
    return model


@pytest.mark.parametrize("acceptance", [ACCEPTANCE_RATIO, ACCEPTANCE_COUPLED])
async def test_a_second_draft_takes_over_from_one_that_is_late_and_the_output_stays(
    acceptance: Acceptance.ValueType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedging, "_FEWEST", FEWEST)
    counters, stuck = Counters(), stuck_after(PASSES)
    request = ask(max_tokens=200, seed=5, acceptance=acceptance)
    async with (
        start_target(target_engine()) as target,
        # Without blocks ahead every round waits for its own.
        start_draft(stuck, ahead_blocks=0) as first,
        start_draft(draft_engine(), ahead_blocks=0) as second,
    ):
        async with start_orchestrator([target.address], [second.address], draft_timeout=60) as undisturbed:
            expected = await undisturbed.generate(request)
        async with start_orchestrator(
            [target.address],
            [first.address, second.address],
            draft_timeout=60,
            draft_hedge=0.1,
            metrics=counters.metrics,
        ) as orchestrator:
            try:
                generation = await orchestrator.generate(request)
            finally:
                stuck.let_go()
            # Every round but the first and the last had its block: that of the worker which answered.
            assert [one.drafted for one in generation.rounds] == [one.drafted for one in expected.rounds]
            # Noise knows no worker: with equal models, even `ratio` gives the tokens that it gives without any of this.
            assert generation.ids == expected.ids
            seen = counters.read()
            assert seen["outrider.draft_hedges{True}"] >= 1
            assert seen["outrider.draft_hedges"] <= 0.1 * len(generation.rounds)
