"""Sessions whose rows come at the same moment, through the Judge: each as if alone."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.acceptance import Block, Outcome
from orchestrator.judge import Judge, decide
from orchestrator.proposal import Proposal
from orchestrator.stats import RoundStats
from orchestrator.verifying import Rows, Verified
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array
from outrider.net.errors import OutriderError
from outrider.v1.orchestrator_pb2 import Acceptance
from tests.harness.blocks import random_block

RULES = (Acceptance.ACCEPTANCE_RATIO, Acceptance.ACCEPTANCE_BLOCK, Acceptance.ACCEPTANCE_GREEDY)


def arguments(block: Block, number: int) -> tuple[Any, Int32Array, Proposal, Rows]:
    """Of `decide`; the fourth of each ten has rows that are no law."""
    rule = RULES[number % 3]
    plan = SimpleNamespace(acceptance=rule, seed=block.noise.seed, logprobs=None)
    rows: Rows = block.rows
    if rule == Acceptance.ACCEPTANCE_GREEDY:
        rows = np.append(block.tokens, np.int32(5))
    elif number % 10 == 3:
        rows = SupportRows(block.rows.probs, block.rows.tail_masses * np.nan, block.rows.tail_tokens)
    return plan, np.zeros(block.noise.base_length, np.int32), Proposal(block.tokens, block.law), rows


async def test_outcomes_of_sessions_that_come_together_are_those_of_each_alone() -> None:
    rng = np.random.default_rng(5)
    cases = [arguments(random_block(rng), number) for number in range(60)]
    judge = Judge()

    async def judged(plan: Any, tokens: Int32Array, proposal: Proposal, rows: Rows) -> Outcome:
        stats = RoundStats(len(tokens))
        outcome, logprobs = await judge.outcome(plan, tokens, proposal, Verified(rows), stats)
        assert stats.accept_micros > 0
        assert logprobs == []
        return outcome

    results = await asyncio.gather(*(judged(*case) for case in cases), return_exceptions=True)
    refused = 0
    for case, result in zip(cases, results, strict=True):
        if isinstance(result, BaseException):
            assert isinstance(result, OutriderError)
            with pytest.raises(OutriderError, match="NaN or a probability below 0") as raised:
                decide(*case)
            assert (result.reason, result.message) == (raised.value.reason, raised.value.message)
            refused += 1
        else:
            assert result == decide(*case)
    assert refused >= 4
    judge.close()
