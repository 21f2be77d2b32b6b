"""Layer 4 of exactness: three processes over gRPC, every outcome of three tokens of six enumerated.

A poor draft under each kind of parameter, and under each rule. As many requests as show each known fault of `ratio`
with probability 0.999; that they do show is tests/integration/exactness/test_statistics.py.
"""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import asdict

import pytest
import pytest_asyncio
from rich.console import Console

from outrider.cli.startup import StartupView
from outrider.cli.system import SystemOptions, running_system
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2 import ACCEPTANCE_BLOCK, ACCEPTANCE_COUPLED, ACCEPTANCE_RATIO
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, ROW_FORMAT_UNSPECIFIED
from tests.harness.orchestrator import PATIENT, Generation, ask
from tests.harness.outcomes import FAULTS, RIGHT, Sampling, enumerate_outcomes, law_after, p_value, samples_against

PROMPT, LENGTH, TOKENS = (0, 1, 2), 3, 4
TARGET = "vocab_size=6,seed=5,scale=1.0"
DRAFT = f"{TARGET},noise=1.5"
CONCURRENCY = 64
PENALTIES = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5)
CASES = {
    "temperature": (ACCEPTANCE_RATIO, Sampling(temperature=0.8)),
    "top_k": (ACCEPTANCE_RATIO, Sampling(top_k=4)),
    "top_p": (ACCEPTANCE_RATIO, Sampling(top_p=0.8)),
    "penalties": (ACCEPTANCE_RATIO, PENALTIES),
    "bias": (ACCEPTANCE_RATIO, Sampling(logit_bias={0: 1.5, 3: -100.0}, min_p=0.05)),
    "block": (ACCEPTANCE_BLOCK, PENALTIES),
    "coupled": (ACCEPTANCE_COUPLED, Sampling(top_p=0.8)),
    "trees": (ACCEPTANCE_RATIO, PENALTIES),
}
# Most tokens of a block where it may be a tree.
NODES = {"trees": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    """Of an orchestrator whose draft and target are processes of their own."""
    options = SystemOptions(f"synthetic:{TARGET}", f"synthetic:{DRAFT}", store="memory://", port=0, draft_threads=1)
    with pytest.MonkeyPatch.context() as patch:
        # A round that does not wait for its block is exact as well, and tests nothing.
        patch.setenv("OUTRIDER_DRAFT_TIMEOUT", str(PATIENT))
        async with running_system(options, StartupView(Console(file=io.StringIO()), logs=False)) as system:
            yield system.address


async def generate(stub: OrchestratorServiceStub, rule: int, sampling: Sampling, seed: int, nodes: int) -> Generation:
    """One request; every fourth one over dense rows."""
    generation = Generation()
    request = ask(
        PROMPT,
        max_tokens=TOKENS,
        lookahead=1 + seed % 2,
        seed=seed,
        acceptance=rule,
        row_format=ROW_FORMAT_UNSPECIFIED if seed % 4 else ROW_FORMAT_LOGITS,
        **asdict(sampling),
    )
    request.speculation.max_nodes = nodes
    async for response in stub.Generate(request, timeout=60):
        generation.add(response)
    return generation


async def generate_all(address: str, rule: int, sampling: Sampling, samples: int, nodes: int) -> list[Generation]:
    room = asyncio.Semaphore(CONCURRENCY)

    async def one(seed: int) -> Generation:
        async with room:
            return await generate(stub, rule, sampling, seed, nodes)

    async with connect(address) as channel:
        stub = OrchestratorServiceStub(channel)
        return list(await asyncio.gather(*map(one, range(samples))))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES)
async def test_a1_the_outcomes_of_three_processes_are_those_of_the_target(case: str, address: str) -> None:
    rule, sampling = CASES[case]
    target = enumerate_outcomes(SyntheticEngine(SyntheticSpec.parse(TARGET)), PROMPT, sampling, LENGTH)
    draft = SyntheticEngine(SyntheticSpec.parse(DRAFT))
    assert target.law.sum() == pytest.approx(1.0, abs=1e-9)
    samples = max(
        samples_against(fault, target, lambda said: law_after(draft, PROMPT, said, sampling)) for fault in FAULTS
    )
    generations = await generate_all(address, rule, sampling, samples, NODES.get(case, 0))
    assert p_value(target.law, [one.ids[:LENGTH] for one in generations]) > RIGHT
    treed = sum(one.tree_depth > 0 for generation in generations for one in generation.rounds)
    assert (treed > samples / 2) is (case in NODES)
    # The draft is poor, and it is used.
    assert 0.2 < sum(one.accepted for one in generations) / sum(one.drafted for one in generations) < 0.9
