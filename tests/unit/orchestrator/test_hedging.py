"""When a second draft worker is asked for a block."""

import pytest

from orchestrator.config import OrchestratorConfig
from orchestrator.hedging import HedgeBudget, Waits


def test_patience_is_what_nearly_all_blocks_took_once_enough_is_known() -> None:
    waits = Waits()
    for _ in range(31):
        waits.observe(0.01)
    assert waits.patience is None
    for _ in range(97):
        waits.observe(0.01)
    assert waits.patience == 0.01
    waits.observe(5.0)
    assert waits.patience == 0.01, "one of a hundred is not nearly all"
    for _ in range(128):
        waits.observe(0.5)
    assert waits.patience == 0.5, "what was long ago is forgotten"


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_hedges_are_a_bounded_share_of_blocks_waited_for(share: float) -> None:
    budget = HedgeBudget(share)
    hedged = 0
    for _ in range(1_000):
        budget.waited()
        hedged += budget.spend()
    assert hedged <= 1_000 * share
    assert hedged >= 1_000 * share - 1
    assert budget.open == (share > 0)


def test_what_is_saved_up_is_bounded() -> None:
    budget = HedgeBudget(0.1)
    for _ in range(1_000):
        budget.waited()
    assert [budget.spend() for _ in range(4)] == [True, True, False, False]


def test_hedging_is_off_by_default() -> None:
    assert OrchestratorConfig(targets="h:1", tokenizer="t").draft_hedge == 0.0
