"""Layer 5 of exactness: the demo's target in float32, over the services, says what transformers' `generate` says.

A part of the grid of bench/exactness_grid.py, one prompt of each kind.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.cli.weights import fetch
from tests.harness.grid import KINDS, LOOKAHEADS, Grid, load_reference, save, start_grid
from tests.harness.orchestrator import ask

# A chat, code, Japanese and a list.
CHOSEN = (0, 5, 13, 15)
TOKENS = 16

# The first test may have to download the weights.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grid(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Grid]:
    weights: Path = fetch()
    reference = load_reference(weights)
    model = save(weights, reference, tmp_path_factory.mktemp("model"))
    async with start_grid(model, reference) as grid:
        yield grid


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("draft", KINDS)
async def test_a21_k1_the_demos_target_says_what_generate_says(grid: Grid, draft: str, lookahead: int) -> None:
    cases = await grid.run(draft, lookahead, CHOSEN, TOKENS)
    for case in cases:
        if case.mismatch is not None:
            print(f"{draft}, lookahead {lookahead}, prompt {case.prompt}: {case.mismatch}")
        assert case.mismatch is None or case.mismatch.excused
        assert case.generation.drafted > 0
    accepted = sum(case.generation.accepted for case in cases)
    drafted = sum(case.generation.drafted for case in cases)
    assert {"target": accepted == drafted, "early exit": 0 < accepted < drafted, "wrong": accepted == 0}[draft]


async def test_a8_penalties_change_what_is_said_and_not_whether_speculation_does(grid: Grid) -> None:
    prompt = grid.prompts[18]  # Repeat the word hello ten times.
    said = []
    for penalty in (-2.0, 2.0):
        sampling = {"temperature": 0.0, "frequency_penalty": penalty}
        orchestrator = grid.orchestrators["early exit"]
        plain = await orchestrator.generate(ask(prompt, max_tokens=TOKENS, lookahead=0, **sampling))
        one = await orchestrator.generate(ask(prompt, max_tokens=TOKENS, lookahead=4, **sampling))
        assert one.drafted > 0
        assert one.ids == plain.ids
        said.append(plain.ids)
    assert said[0] != said[1]
