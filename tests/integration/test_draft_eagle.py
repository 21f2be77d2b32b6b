"""A draft worker with an EAGLE head: its blocks are what the formulas say, whatever was lost, drafted or taken back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.law.audit import audit
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.net.arrays import features_message
from outrider.v1 import draft_pb2
from tests.harness.eagle import KEPT, KINDS, SIZE, eagle_engine, loaded, said_by_formula, target_ends
from tests.harness.models import VOCAB
from tests.harness.workers import (
    RunningDraft,
    advance_command,
    block_of,
    draft_error,
    int32,
    open_command,
    reason,
    start_draft,
)

GREEDY = LawParams(temperature=0.0)
SETTINGS: dict[str, Any] = {"proposers": "eagle", "eagle": "head"}
TEXT = [int(it) for it in np.random.default_rng(4).integers(0, VOCAB, 60)]

every_kind = pytest.mark.parametrize("kind", KINDS)


def states(kind: str) -> torch.Tensor:
    """[60, width] of the target after each token of TEXT."""
    width = SIZE if kind == "1" else 3 * SIZE
    return torch.randn(len(TEXT), width, generator=torch.Generator().manual_seed(1)).bfloat16()


def fed(command: draft_pb2.DraftCommand, kind: str, start: int, end: int) -> draft_pb2.DraftCommand:
    action = command.open if command.WhichOneof("action") == "open" else command.advance
    action.features.CopyFrom(features_message(states(kind)[start:end], start))
    return command


def law(kind: str, text: Sequence[int], since: int, end: int) -> torch.Tensor:
    """[VOCAB] logits of what follows a text, where the target's states in [since, end) are known."""
    words, rows = target_ends()
    known = {at: states(kind)[at].float() for at in range(since, end)}
    normed = kind == "3 normed"
    return said_by_formula(loaded(kind)[0], words, rows, text, known, since + 1, normed=normed)[-1]


def greedy(kind: str, length: int, since: int, count: int) -> list[int]:
    """The block after the first `length` tokens."""
    text = TEXT[:length]
    for _ in range(count):
        text = [*text, int(law(kind, text, since, length - 1).argmax())]
    return text[length:]


def pages(draft: RunningDraft) -> int:
    return draft.service.load().kv_pages_used


async def test_it_says_what_it_wants() -> None:
    async with start_draft(eagle_engine("3"), **SETTINGS) as draft:
        info = await draft.info()
        assert list(info.proposers) == [draft_pb2.PROPOSER_EAGLE]
        wants = draft_pb2.Feeding(proposer=draft_pb2.PROPOSER_EAGLE, layers=[2, 1, 0], hidden_size=SIZE, window=32)
        assert list(info.feedings) == [wants]


@every_kind
async def test_blocks_round_by_round(kind: str) -> None:
    async with start_draft(eagle_engine(kind), ahead_blocks=2, **SETTINGS) as draft:
        stream = draft.stream()
        event = await stream.ask(fed(open_command("s", TEXT[:9], 4, law=GREEDY), kind, 0, 8))
        assert block_of(event)[0] == greedy(kind, 9, 0, 4)
        event = await stream.ask(fed(advance_command("s", TEXT[:12], 5, new=3), kind, 8, 11))
        assert block_of(event)[0] == greedy(kind, 12, 0, 5)
        # Back to a text that shares less: what was made of other tokens does not stay.
        event = await stream.ask(fed(open_command("s", TEXT[:10], 3, law=GREEDY), kind, 0, 9))
        assert block_of(event)[0] == greedy(kind, 10, 0, 3)


@every_kind
async def test_accepted_tokens_are_computed_again_with_the_targets_states(kind: str) -> None:
    """The block's own tokens come back as committed: their entries were made of outputs."""
    async with start_draft(eagle_engine(kind), **SETTINGS) as draft:
        stream, text = draft.stream(), TEXT[:7]
        event = await stream.ask(fed(open_command("s", text, 4, law=GREEDY), kind, 0, 6))
        accepted = block_of(event)[0]
        text += [*accepted, 50]
        event = await stream.ask(fed(advance_command("s", text, 3, new=5), kind, 6, 11))
        said = block_of(event)[0]
        for token in said:
            assert token == int(law(kind, text, 0, 11).argmax())
            text.append(token)


async def test_after_a_gap_it_begins_anew_where_the_features_do() -> None:
    async with start_draft(eagle_engine("3"), **SETTINGS) as draft:
        stream = draft.stream()
        await stream.ask(fed(open_command("s", TEXT[:9], 2, law=GREEDY), "3", 0, 8))
        event = await stream.ask(fed(advance_command("s", TEXT[:40], 4, new=31), "3", 30, 39))
        assert block_of(event)[0] == greedy("3", 40, 30, 4)
        # A session that was opened again while it was there goes on from what it has.
        event = await stream.ask(fed(open_command("s", TEXT[:42], 3, law=GREEDY), "3", 38, 41))
        assert block_of(event)[0] == greedy("3", 42, 30, 3)


async def test_without_a_block_to_make_nothing_is_computed_before_the_features_come() -> None:
    async with start_draft(eagle_engine("1"), **SETTINGS) as draft:
        stream = draft.stream()
        assert block_of(await stream.ask(open_command("s", TEXT[:20], 0, law=GREEDY)))[0] == []
        assert pages(draft) == 0
        event = await stream.ask(open_command("s", TEXT[:20], 3, law=GREEDY))
        assert draft_error(event).reason == reason("SESSION_NOT_FOUND")
        event = await stream.ask(fed(advance_command("s", TEXT[:21], 3), "1", 0, 20))
        assert block_of(event)[0] == greedy("1", 21, 0, 3)
        event = await stream.ask(advance_command("s", TEXT[:22], 3))
        assert "features end before position 20, not 21" in draft_error(event).message
        event = await stream.ask(fed(advance_command("s", TEXT[:23], 3, new=2), "1", 20, 22))
        assert block_of(event)[0] == greedy("1", 23, 0, 3)
        # Nor where it holds another text that begins alike.
        assert block_of(await stream.ask(open_command("s", [*TEXT[:9], 1, 2, 3], 0, law=GREEDY)))[0] == []
        event = await stream.ask(fed(open_command("s", TEXT[:12], 3, law=GREEDY), "1", 0, 11))
        assert block_of(event)[0] == greedy("1", 12, 0, 3)


async def test_the_law_that_is_shipped_is_the_law_that_was_drawn_from() -> None:
    """Also where the head knows some tokens alone: no other has a place in it."""
    async with start_draft(eagle_engine("3"), **SETTINGS) as draft:
        command = open_command("s", TEXT[:5], 3, seed=9, top=VOCAB, law=LawParams(temperature=2.0))
        tokens, shipped = block_of(await draft.stream().ask(fed(command, "3", 0, 4)))
    assert audit(int32(tokens), shipped, RoundNoise(9, 5), VOCAB) is None
    bounds = np.cumsum(shipped.sizes)[:-1]
    text = TEXT[:5]
    for token, probs, ids in zip(
        tokens, np.split(shipped.probs, bounds), np.split(shipped.token_ids, bounds), strict=True
    ):
        expected = (law("3", text, 0, 4) / 2).softmax(0).numpy()
        assert sorted(ids) == KEPT.tolist()
        np.testing.assert_allclose(probs, expected[ids], rtol=1e-3)
        text.append(token)


async def test_sessions_share_passes() -> None:
    async with start_draft(eagle_engine("3"), **SETTINGS) as draft:
        stream = draft.stream()
        lengths = {f"s{length}": length for length in (3, 11, 30)}
        commands = [fed(open_command(it, TEXT[:n], 4, law=GREEDY), "3", 0, n - 1) for it, n in lengths.items()]
        await stream.send(*commands)
        for _ in commands:
            event = await stream.event()
            assert block_of(event)[0] == greedy("3", lengths[event.session_id], 0, 4)
            assert event.block.timing.passes == 4


async def test_features_that_cannot_be_are_refused() -> None:
    async with start_draft(eagle_engine("1"), **SETTINGS) as draft:
        event = await draft.stream().ask(fed(open_command("s", TEXT[:9], 2), "1", 0, 9))
        assert "features end with position 8, must be before base_length 9 - 1" in draft_error(event).message
