"""A faulty acceptance rule is found out through the services: layer 4 of exactness has teeth.

The right rule is held to the same test over three processes, in tests/process/test_exactness.py.
"""

import pytest

from outrider.v1.orchestrator_pb2 import ACCEPTANCE_RATIO
from tests.harness.mutants import RATIO_MUTANTS, SHARED_MUTANTS
from tests.harness.orchestrator import ask
from tests.harness.outcomes import ALPHA, FAULTS, Sampling, enumerate_outcomes, law_after, p_value, samples_against
from tests.harness.system import start_system, synthetic

PROMPT, LENGTH, TOKENS = (0, 1, 2), 3, 4
SAMPLING = Sampling(temperature=0.8)
SPEC = {"vocab_size": 6, "seed": 5, "scale": 1.0}
TARGET = enumerate_outcomes(synthetic(**SPEC), PROMPT, SAMPLING, LENGTH)
DRAFT = synthetic(**SPEC, noise=2.0)


def samples(fault: str) -> int:
    return samples_against(fault, TARGET, lambda said: law_after(DRAFT, PROMPT, said, SAMPLING))


async def p_value_of(count: int) -> float:
    """Of the first three of four tokens, at lookahead 1 and 2."""
    async with start_system(synthetic(**SPEC), synthetic(**SPEC, noise=2.0)) as system:
        requests = (
            ask(
                PROMPT,
                max_tokens=TOKENS,
                lookahead=1 + seed % 2,
                seed=seed,
                acceptance=ACCEPTANCE_RATIO,
                temperature=SAMPLING.temperature,
            )
            for seed in range(count)
        )
        generations = await system.generate_all(requests)
    return p_value(TARGET.law, [one.ids[:LENGTH] for one in generations])


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_mutant_of_the_rule_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (RATIO_MUTANTS | SHARED_MUTANTS)[fault].install(monkeypatch)
    assert await p_value_of(samples(fault)) < ALPHA
