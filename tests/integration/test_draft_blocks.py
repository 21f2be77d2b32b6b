"""Blocks: drawn from exactly the law that is shipped, whatever the cache holds and whoever else is in the pass."""

import asyncio

import numpy as np
import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outrider.law.audit import audit
from outrider.law.draft import propose, truncate
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.transforms import RowContext, law_probs
from outrider.lm.engine import Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.observe.metrics import DraftMetrics
from outrider.v1 import draft_pb2
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.workers import (
    advance_command,
    block_of,
    close_command,
    counted,
    draft_error,
    eventually,
    int32,
    open_command,
    reason,
    start_draft,
)

SPEC = SyntheticSpec(vocab_size=13, padded_vocab_size=16, order=3, context_length=256)
RICH = LawParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, prompt_length=2)


def reference(tokens: list[int], lookahead: int, law: LawParams, seed: int, top: int) -> list[int]:
    """The chain that a fresh engine draws."""
    drawn: list[int] = []
    for _ in range(lookahead):
        prefix = int32(tokens + drawn)
        engine = SyntheticEngine(SPEC)
        (logits,) = engine.forward([Segment(engine.open(prefix), prefix, 1)])
        ((ids, probs),) = truncate(law_probs(logits, [RowContext(law, prefix)], SPEC.vocab_size), top)
        drawn.append(propose(ids, probs, RoundNoise(seed, len(tokens)), len(prefix)))
    return drawn


@pytest.mark.parametrize("law", [LawParams(), LawParams(temperature=0.0), RICH])
@pytest.mark.parametrize("top", [1, 3, 13])
async def test_a_block_is_the_draw_from_the_law_it_ships(law: LawParams, top: int) -> None:
    async with start_draft(SyntheticEngine(SPEC)) as draft:
        tokens = [1, 2, 3]
        event = await draft.stream().ask(open_command("s", tokens, 5, law=law, seed=99, top=top))
        drawn, shipped = block_of(event)
        assert (event.session_id, event.epoch, event.base_length) == ("s", 1, 3)
        assert drawn == reference(tokens, 5, law, 99, top)
        assert shipped.sizes.max() <= top
        assert audit(int32(drawn), shipped, RoundNoise(99, 3), 13) is None
        assert event.block.timing.passes == 5


async def test_c1_c2_after_any_acceptance_the_next_block_is_that_of_a_fresh_draft() -> None:
    async with start_draft(SyntheticEngine(SPEC)) as draft:
        stream = draft.stream()
        committed = [1, 2, 3]
        drawn, _ = block_of(await stream.ask(open_command("s", committed, 4, law=RICH)))
        for accepted in (4, 0, 2, 4, 1, 3, 4):
            committed = [*committed, *drawn[:accepted], 5]
            event = await stream.ask(advance_command("s", committed, 4))
            drawn, _ = block_of(event)
            assert drawn == reference(committed, 4, RICH, 7, 32)


async def test_c1_catching_up_costs_no_extra_pass() -> None:
    model = ScriptedEngine(next_token_script(16))
    async with start_draft(model, ahead_blocks=0) as draft:
        stream = draft.stream()
        drawn, _ = block_of(await stream.ask(open_command("s", [1, 2, 3], 4, law=LawParams(temperature=0.0))))
        assert drawn == [4, 5, 6, 7]
        before = len(model.passes)
        # All accepted, own guess as bonus: token 7 was drawn but never fed, so two tokens are new to the cache.
        drawn, _ = block_of(await stream.ask(advance_command("s", [1, 2, 3, 4, 5, 6, 7, 8], 3)))
        assert drawn == [9, 10, 11]
        assert [(seen.start, seen.tokens, seen.rows) for (seen,) in model.passes[before:]] == [
            (6, 2, 1),
            (8, 1, 1),
            (9, 1, 1),
        ]


async def test_a_repeated_advance_gives_the_same_block() -> None:
    async with start_draft(SyntheticEngine(SPEC)) as draft:
        stream = draft.stream()
        await stream.ask(open_command("s", [1, 2, 3], 4))
        first = await stream.ask(advance_command("s", [1, 2, 3, 4], 4))
        second = await stream.ask(advance_command("s", [1, 2, 3, 4], 4))
        assert first.block.tokens == second.block.tokens
        assert first.block.law == second.block.law


async def test_lookahead_0_caches_the_prefix() -> None:
    model = ScriptedEngine(next_token_script(16))
    async with start_draft(model, ahead_blocks=0) as draft:
        stream = draft.stream()
        drawn, _ = block_of(await stream.ask(open_command("s", [1] * 100, 0)))
        assert drawn == []
        assert model.open_tokens == [100]
        before = len(model.passes)
        await stream.ask(advance_command("s", [1] * 101, 1))
        assert [(seen.start, seen.tokens) for (seen,) in model.passes[before:]] == [(100, 1)]


async def test_all_sessions_step_in_one_pass() -> None:
    model = ScriptedEngine(next_token_script(16))
    async with start_draft(model, ahead_blocks=0) as draft:
        streams = [draft.stream() for _ in range(3)]
        model.hold()
        await streams[0].send(open_command("first", [1], 1))
        await model.until_in_pass()
        before = len(model.passes) + 1
        for number, stream in enumerate(streams):
            await stream.send(*(open_command(str(index), [number, index], 3) for index in range(4)))
        await eventually(lambda: draft.service.pending == 13)
        model.let_go()
        await streams[0].event()
        for stream in streams:
            assert sorted([(await stream.event()).session_id for _ in range(4)]) == ["0", "1", "2", "3"]
        assert [len(one) for one in model.passes[before:]] == [12, 12, 12]


async def test_a_long_prompt_goes_in_chunks_beside_the_chains() -> None:
    model = ScriptedEngine(next_token_script(16))
    async with start_draft(model, token_budget=80) as draft:
        stream = draft.stream()
        await stream.ask(open_command("chain", [1], 1))
        model.hold()
        await stream.send(open_command("prompt", [2] * 500, 1))
        await model.until_in_pass()
        await stream.send(advance_command("chain", [1, 2], 4))
        await eventually(lambda: draft.service.pending == 2)
        model.let_go()
        assert (await stream.event()).session_id == "chain"
        event = await stream.event()
        assert event.session_id == "prompt"
        assert event.block.timing.passes >= 500 // 80
        assert max(sum(seen.tokens for seen in one) for one in model.passes) <= 80


async def test_concurrent_sessions_draw_what_they_draw_alone() -> None:
    laws = [LawParams(), LawParams(temperature=0.0), RICH, LawParams(top_k=2, temperature=1.7)]

    async def session(number: int) -> None:
        stream, law = draft.stream(), laws[number % 4]
        committed = [number % 13, number // 13]
        event = await stream.ask(open_command("same id", committed, number % 6, law=law, seed=number, top=1 + number))
        for turn in range(3):
            drawn, _ = block_of(event)
            assert drawn == reference(committed, number % 6, law, number, 1 + number)
            committed = [*committed, *drawn[:turn], turn]
            event = await stream.ask(advance_command("same id", committed, number % 6), committed)

    async with start_draft(SyntheticEngine(SPEC), token_budget=16) as draft:
        await asyncio.gather(*(session(number) for number in range(16)))


async def test_a_chain_ends_at_a_stop_token() -> None:
    model = ScriptedEngine(next_token_script(16))
    law = LawParams(temperature=0.0, stop_token_ids=(6,))
    async with start_draft(model) as draft:
        drawn, shipped = block_of(await draft.stream().ask(open_command("s", [1, 2, 3], 8, law=law)))
        assert drawn == [4, 5, 6]
        assert len(shipped.sizes) == 3


async def test_e1_blocks_shorten_at_the_end_of_the_context_and_then_stop() -> None:
    model = ScriptedEngine(next_token_script(16), context_length=64)
    async with start_draft(model) as draft:
        stream = draft.stream()
        drawn, _ = block_of(await stream.ask(open_command("s", [1] * 60, 8, law=LawParams(temperature=0.0))))
        assert drawn == [2, 3, 4, 5]
        drawn, _ = block_of(await stream.ask(advance_command("s", [1] * 60 + [2, 3, 4], 8, new=3)))
        assert drawn == [5]
        event = await stream.ask(advance_command("s", [1] * 60 + [2, 3, 4, 5], 8))
        assert draft_error(event).reason == reason("CONTEXT_EXCEEDED")
        assert event.base_length == 64
        event = await stream.ask(open_command("longer", [1] * 65, 0))
        assert draft_error(event).reason == reason("CONTEXT_EXCEEDED")
        drawn, _ = block_of(await stream.ask(open_command("short", [1], 2, law=LawParams(temperature=0.0))))
        assert drawn == [2, 3]


async def test_k3_non_finite_logits_fail_their_session_alone() -> None:
    def script(prefix: tuple[int, ...]) -> list[float]:
        return [0.0, float("nan"), 0.0, 0.0] if prefix[0] == 3 and len(prefix) == 3 else [0.0, 0.0, 9.0, 0.0]

    reader = InMemoryMetricReader()
    metrics = DraftMetrics(MeterProvider([reader]))
    async with start_draft(ScriptedEngine(script, vocab_size=4), metrics=metrics, ahead_blocks=0) as draft:
        stream = draft.stream()
        await stream.send(open_command("sick", [3, 3], 3), open_command("well", [1, 1], 3))
        events = {event.session_id: event for event in [await stream.event(), await stream.event()]}
        assert draft_error(events["sick"]).reason == reason("NON_FINITE_LOGITS")
        assert len(block_of(events["well"])[0]) == 3
        again = await stream.ask(advance_command("sick", [3, 3, 1], 3))
        assert draft_error(again).reason == reason("SESSION_NOT_FOUND")
        assert counted(reader, "outrider.draft.non_finite_logits") == 1
        assert counted(reader, "outrider.draft.shipped_tokens") == 3


async def test_no_page_for_a_sequence_fails_it_alone() -> None:
    model = ScriptedEngine(next_token_script(16), pages=4, page_size=4)
    async with start_draft(model) as draft:
        stream = draft.stream()
        await stream.send(open_command("huge", [1] * 20, 2), open_command("small", [1], 2))
        events = {event.session_id: event for event in [await stream.event(), await stream.event()]}
        assert draft_error(events["huge"]).reason == reason("QUEUE_FULL")
        assert len(block_of(events["small"])[0]) == 2


async def test_idle_sessions_make_room() -> None:
    model = ScriptedEngine(next_token_script(16), pages=4, page_size=4)
    async with start_draft(model) as draft:
        stream = draft.stream()
        for name in ("a", "b", "c"):
            await stream.ask(open_command(name, [1] * 7, 1))
        assert draft_error(await stream.ask(advance_command("a", [1] * 8, 1))).reason == reason("SESSION_NOT_FOUND")
        assert len(block_of(await stream.ask(advance_command("c", [1] * 8, 1)))[0]) == 1


PROMPT_LOOKUP = draft_pb2.PROPOSER_PROMPT_LOOKUP


async def test_prompt_lookup_copies_with_a_point_mass() -> None:
    model = ScriptedEngine(next_token_script(16))
    async with start_draft(model, proposers="prompt_lookup") as draft:
        stream = draft.stream()
        event = await stream.ask(open_command("s", [5, 1, 2, 3, 4, 9, 1, 2], 3))
        drawn, shipped = block_of(event)
        assert drawn == [3, 4, 9]
        assert shipped.sizes.tolist() == [1, 1, 1]
        assert shipped.probs.tolist() == [1.0, 1.0, 1.0]
        assert audit(int32(drawn), shipped, RoundNoise(7, 8), 16) is None
        assert block_of(await stream.ask(advance_command("s", [5, 1, 2, 3, 4, 9, 1, 2, 7], 3)))[0] == []
        stop = LawParams(stop_token_ids=(4,))
        assert block_of(await stream.ask(open_command("t", [1, 2, 3, 4, 5, 1, 2], 3, law=stop)))[0] == [3, 4]
        assert event.block.timing.passes == 0
        assert list((await draft.info()).proposers) == [PROMPT_LOOKUP]
    # Never loaded a pass: there is no model behind it.
    assert model.passes == []


async def test_a_worker_offers_several_proposers() -> None:
    settings = {"proposers": "model,prompt_lookup,early_exit", "early_exit_layers": 2}
    async with start_draft(ScriptedEngine(next_token_script(16)), **settings) as draft:
        stream = draft.stream()
        greedy = LawParams(temperature=0.0)
        tokens = [1, 2, 9, 1, 2]
        assert block_of(await stream.ask(open_command("s", tokens, 2, law=greedy)))[0] == [3, 4]
        copied = open_command("s", tokens, 2, law=greedy, proposer=PROMPT_LOOKUP)
        assert block_of(await stream.ask(copied))[0] == [9, 1]
        exited = open_command("t", tokens, 2, law=greedy, proposer=draft_pb2.PROPOSER_EARLY_EXIT)
        assert block_of(await stream.ask(exited))[0] == [3, 4]
        await stream.send(close_command("t"))
        await draft.until_sessions(1)


async def test_a_proposer_not_on_offer_is_refused() -> None:
    async with start_draft(ScriptedEngine(next_token_script(16))) as draft:
        event = await draft.stream().ask(open_command("s", [1], 1, proposer=PROMPT_LOOKUP))
        assert draft_error(event).reason == reason("INVALID_FIELD")
        assert "prompt_lookup, this worker offers model" in draft_error(event).message


def _broken(open_: bool = True, **fields: object) -> draft_pb2.DraftCommand:
    command = open_command("s", [1, 2], 2) if open_ else advance_command("s", [1, 2, 3], 2)
    for name, value in fields.items():
        setattr(command.open if open_ else command.advance, name, value)
    return command


def _odd_stop_tokens() -> draft_pb2.DraftCommand:
    command = open_command("s", [1, 2], 2)
    command.open.law.stop_token_ids = b"abc"
    return command


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (_odd_stop_tokens(), "law.stop_token_ids has 3 bytes"),
        (_broken(tokens=b""), "open.tokens holds 0 tokens"),
        (_broken(tokens=b"\0\0\0"), "open.tokens has 3 bytes"),
        (_broken(tokens=int32([1, 16]).tobytes()), "open.tokens holds token 16, outside [0, 16)"),
        (_broken(lookahead=65), "open.lookahead is 65, limit 64"),
        (_broken(law_top=1025), "open.law_top is 1025, limit 1024"),
        (_broken(False, lookahead=65), "advance.lookahead is 65, limit 64"),
        (_broken(False, tokens=b""), "advance.tokens holds 0 tokens"),
        (_broken(False, base_length=0), "advance.tokens holds 1 tokens, must be 1 to base_length 0"),
        (_broken(False, tokens=int32([-1]).tobytes()), "advance.tokens holds token -1"),
        (open_command("s", [1], 1, law=LawParams(top_p=1.5)), "sampling.top_p is 1.5"),
        (open_command("s", [1], 1, law=LawParams(temperature=float("nan"))), "sampling.temperature is nan"),
        (open_command("x" * 129, [1], 1), "session_id has 129 characters"),
        (draft_pb2.DraftCommand(session_id="s"), "action is not set"),
    ],
)
async def test_invalid_commands_name_field_and_limit(command: draft_pb2.DraftCommand, message: str) -> None:
    async with start_draft(ScriptedEngine(next_token_script(16))) as draft:
        stream = draft.stream()
        event = await stream.ask(command)
        assert draft_error(event).reason == reason("INVALID_FIELD")
        assert message in draft_error(event).message
        assert len(block_of(await stream.ask(open_command("good", [1], 2)))[0]) == 2


async def test_truncation_keeps_the_likeliest() -> None:
    async with start_draft(ScriptedEngine(lambda prefix: [0.0, 3.0, 2.0, 1.0], vocab_size=4)) as draft:
        _, shipped = block_of(await draft.stream().ask(open_command("s", [0], 1, top=2)))
        assert shipped.token_ids.tolist() == [1, 2]
        kept = torch.tensor([3.0, 2.0]).softmax(0).numpy()
        assert np.allclose(shipped.probs, kept, atol=1e-6)
