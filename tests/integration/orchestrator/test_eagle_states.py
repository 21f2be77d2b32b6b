"""EAGLE through the services: every row that it says is made of just the states that the target had."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.v1.orchestrator_pb2 import ACCEPTANCE_RATIO, GenerateRequest, StopConditions
from tests.harness.checked_eagle import CheckedEagle
from tests.harness.eagle import eagle_engine, loaded
from tests.harness.engines_lm import own_model, served_tiny_engine
from tests.harness.medusa import walking_model, walking_target
from tests.harness.models import VOCAB
from tests.harness.orchestrator import Generation, ask
from tests.harness.system import RunningSystem, forget_sessions, start_system
from tests.harness.walking_eagle import walking_eagle, walking_tensors

SCALE = 6.0


@asynccontextmanager
async def system(target: Any, draft: CheckedEagle) -> AsyncIterator[RunningSystem]:
    settings: dict[str, Any] = {"draft_settings": {"eagle": "head"}, "tokenizer": f"synthetic:vocab_size={VOCAB}"}
    async with start_system(target, draft, proposers="eagle", **settings) as running:
        yield running


def walking(window: int, pages: int = 1200) -> CheckedEagle:
    """Right about two thirds of the time, and its outputs are never the target's states."""
    inner = walking_eagle(SCALE, noise=1.0, pages=pages)
    return CheckedEagle(inner, walking_model(SCALE), walking_tensors(1.0), window)


def requests(count: int, tokens: int, nodes: int = 0) -> list[GenerateRequest]:
    made = [
        ask(
            [(7 * seed + at) % VOCAB for at in range(2 + 3 * seed)],
            lookahead=4,
            seed=seed,
            stop=StopConditions(max_tokens=tokens, ignore_eos=True),
            temperature=0.7,
            acceptance=ACCEPTANCE_RATIO,
        )
        for seed in range(count)
    ]
    for request in made:
        request.speculation.max_nodes = nodes
    return made


@pytest.mark.parametrize("nodes", [0, 6])
@pytest.mark.parametrize("window", [6, 128])
async def test_of_many_sessions_accepted_and_rejected(window: int, nodes: int) -> None:
    draft = walking(window)
    async with system(walking_target(SCALE), draft) as running:
        said = await running.generate_all(requests(5, 24, nodes))
    assert draft.wrong == []
    assert draft.checked > 100
    assert draft.drafted > 50
    # Prompts longer than the window begin where it does.
    assert (max(draft.begins) > 1) == (window == 6)
    assert {one.accepted for each in said for one in each.rounds if one.drafted} >= {0, 1, 2}


@pytest.mark.parametrize("kind", ["1", "3"])
async def test_of_a_random_head_of_a_random_target(kind: str) -> None:
    model = own_model("llama")
    words, rows = (it.weight for it in (model.get_input_embeddings(), model.get_output_embeddings()))  # type: ignore[no-untyped-call]
    draft = CheckedEagle(eagle_engine(kind, ends=(words.detach(), rows.detach())), model, loaded(kind)[0], 12)
    async with system(served_tiny_engine("llama"), draft) as running:
        await running.generate_all(requests(4, 12))
    assert draft.wrong == []
    assert draft.checked > 60


async def test_after_the_draft_lost_its_sessions() -> None:
    draft = walking(10)
    async with system(walking_target(SCALE), draft) as running:
        (request,) = requests(1, 60)
        said, dropped = Generation(), False
        async for response in running.orchestrator.stub.Generate(request, timeout=60):
            said.add(response)
            if len(said.rounds) >= 6 and not dropped:
                dropped = True
                forget_sessions(running)
    assert draft.wrong == []
    assert len(draft.begins) == 2
    assert len(said.tokens) == 60


async def test_where_pages_are_few_and_sessions_displace_each_other() -> None:
    """A text that lost its entries in the middle of a block has them made again."""
    draft = walking(128, pages=16)
    async with system(walking_target(SCALE), draft) as running:
        # Who displaces whom, and when, differs from run to run.
        for _ in range(20):
            said = await running.generate_all(requests(5, 30))
            assert all(len(each.tokens) == 30 for each in said)
            if draft.remade:
                break
    assert draft.wrong == []
    assert draft.checked > 60
    assert draft.remade > 0
