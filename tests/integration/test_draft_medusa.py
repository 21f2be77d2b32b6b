"""A draft worker with Medusa heads: fed by the target's features, and told when they are missing."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outrider.law.audit import audit
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.lm.engine import EngineInfo
from outrider.lm.medusa import MedusaEngine, MedusaHeads, MedusaWeights
from outrider.net.arrays import features_message
from outrider.v1 import draft_pb2
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.medusa import HEADS, SIZE, random_heads, said_by_formula
from tests.harness.models import VOCAB
from tests.harness.workers import advance_command, block_of, draft_error, int32, open_command, reason, start_draft

GREEDY = LawParams(temperature=0.0)
TENSORS = random_heads()
SETTINGS: dict[str, Any] = {"proposers": "medusa", "medusa": "heads"}


def engine() -> MedusaEngine:
    info = EngineInfo("m", VOCAB, VOCAB, 64, "float32", (), "")
    torch.manual_seed(0)
    return MedusaEngine(MedusaHeads(MedusaWeights(HEADS, 1, TENSORS), nn.Linear(SIZE, VOCAB, bias=False)), info, 7)


def states(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed)).bfloat16()


def feed(command: draft_pb2.DraftCommand, start: int, given: torch.Tensor) -> draft_pb2.DraftCommand:
    action = command.open if command.WhichOneof("action") == "open" else command.advance
    action.features.CopyFrom(features_message(given, start))
    return command


def greedy(state: torch.Tensor, count: int) -> list[int]:
    rows = (said_by_formula(TENSORS, head, 1, state[None].float(), torch.zeros(1)) for head in range(count))
    return [int(row.argmax()) for row in rows]


async def test_it_says_what_it_wants() -> None:
    async with start_draft(engine(), **SETTINGS) as draft:
        info = await draft.info()
        assert list(info.proposers) == [draft_pb2.PROPOSER_MEDUSA]
        (feeding,) = info.feedings
        expected = draft_pb2.Feeding(proposer=draft_pb2.PROPOSER_MEDUSA, layers=[7], hidden_size=SIZE, window=1)
        assert feeding == expected


async def test_blocks_are_those_of_the_last_features_and_no_longer_than_there_are_heads() -> None:
    async with start_draft(engine(), ahead_blocks=2, **SETTINGS) as draft:
        stream = draft.stream()
        first = states(3)
        event = await stream.ask(feed(open_command("s", [1, 2, 3, 4], 8, law=GREEDY), 0, first))
        assert block_of(event)[0] == greedy(first[-1], HEADS)
        then = states(2, 1)
        event = await stream.ask(feed(advance_command("s", [1, 2, 3, 4, 9, 8], 2, new=2), 3, then))
        assert block_of(event)[0] == greedy(then[-1], 2)
        # Over a gap: what lies before it is forgotten, and nothing of it is needed.
        event = await stream.ask(feed(advance_command("s", [1, 2, 3, 4, 9, 8, 5, 6, 7], 2, new=3), 7, states(1, 2)))
        assert block_of(event)[0] == greedy(states(1, 2)[0], 2)


async def test_the_law_that_is_shipped_is_the_law_that_was_drawn_from() -> None:
    async with start_draft(engine(), **SETTINGS) as draft:
        command = feed(open_command("s", [1, 60, 3], 3, seed=9, top=VOCAB, law=LawParams()), 1, states(1))
        tokens, law = block_of(await draft.stream().ask(command))
    assert audit(int32(tokens), law, RoundNoise(9, 3), VOCAB) is None
    rows = np.split(law.probs, np.cumsum(law.sizes)[:-1])
    ids = np.split(law.token_ids, np.cumsum(law.sizes)[:-1])
    for head, (row, of_row) in enumerate(zip(rows, ids, strict=True)):
        said = said_by_formula(TENSORS, head, 1, states(1).float(), torch.zeros(1))[0]
        np.testing.assert_allclose(row, said.softmax(0).numpy()[of_row], rtol=1e-4)


async def test_missing_features_are_asked_for_and_the_session_goes_on_after_them() -> None:
    async with start_draft(engine(), **SETTINGS) as draft:
        stream = draft.stream()
        event = await stream.ask(open_command("s", [1, 2, 3], 2, law=GREEDY))
        assert draft_error(event).reason == reason("SESSION_NOT_FOUND")
        assert "features end before position 0, not 2" in draft_error(event).message
        assert block_of(await stream.ask(open_command("s", [1, 2, 3], 0, law=GREEDY)))[0] == []
        event = await stream.ask(feed(advance_command("s", [1, 2, 3, 4], 2), 0, states(3)))
        assert block_of(event)[0] == greedy(states(3)[-1], 2)
        event = await stream.ask(advance_command("s", [1, 2, 3, 4, 5], 2))
        assert "features end before position 3, not 4" in draft_error(event).message
        event = await stream.ask(feed(open_command("s", [1, 2, 3, 4, 5], 2, law=GREEDY), 3, states(1)))
        assert block_of(event)[0] == greedy(states(1)[0], 2)


@pytest.mark.parametrize(
    ("start", "count", "width", "message"),
    [
        (0, 3, SIZE, "features end with position 2, must be before base_length 3 - 1"),
        (5, 1, SIZE, "features end with position 5, must be before base_length 3 - 1"),
        (0, 1, SIZE - 1, "features.states has 62 bytes, 32 elements a token"),
    ],
)
async def test_features_that_cannot_be_are_refused(start: int, count: int, width: int, message: str) -> None:
    async with start_draft(engine(), **SETTINGS) as draft:
        stream = draft.stream()
        event = await stream.ask(feed(open_command("s", [1, 2, 3], 2), start, states(count)[:, :width].contiguous()))
        assert draft_error(event).reason == reason("INVALID_FIELD")
        assert message in draft_error(event).message
        bad = states(2)
        bad[1, 3] = float("nan")
        event = await stream.ask(feed(open_command("s", [1, 2, 3], 2), 0, bad))
        assert "not finite" in draft_error(event).message


async def test_a_worker_that_is_fed_with_nothing_refuses_them() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16))) as draft:
        event = await draft.stream().ask(feed(open_command("s", [1, 2, 3], 2), 0, states(2)))
        assert "no proposer of this worker is fed with any" in draft_error(event).message
