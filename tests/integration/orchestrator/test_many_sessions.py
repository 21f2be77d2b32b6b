"""F: many sessions at once neither mix nor starve, and speculation stays exact among them."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from outrider.v1.orchestrator_pb2 import GenerateRequest
from tests.harness.engines import ScriptedEngine, SegmentSeen
from tests.harness.faults import SPEC, Client, HookedEngine, draft_engine, greedy_output, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import eventually, start_draft, start_target

COPY_VOCAB = 64


def repeat(prefix: tuple[int, ...]) -> list[float]:
    """Says the prompt again and again; the prompt's length is its first token."""
    logits = [0.0] * COPY_VOCAB
    period = min(max(prefix[0], 1), len(prefix))
    logits[prefix[-period]] = 9.0
    return logits


def repeat_badly(prefix: tuple[int, ...]) -> list[float]:
    """As `repeat`, but wrong after a third of all prefixes."""
    logits = repeat(prefix)
    return logits if sum(prefix) % 3 else logits[1:] + logits[:1]


def own_prompt(dice: random.Random) -> list[int]:
    """A "uuid": between 8 and 24 tokens, no two prompts alike."""
    length = dice.randint(8, 24)
    return [length, *(dice.randrange(COPY_VOCAB) for _ in range(length - 1))]


def copied(prompt: Sequence[int], count: int) -> list[int]:
    return [prompt[index % len(prompt)] for index in range(count)]


async def leave_early(orchestrator: RunningOrchestrator, request: GenerateRequest, tokens: int) -> None:
    client = Client(orchestrator, request)
    await client.until_tokens(tokens)
    client.cancel()


async def test_f1_sessions_of_many_lookaheads_that_join_and_leave_never_mix() -> None:
    dice = random.Random(1)
    async with (
        start_target(ScriptedEngine(repeat, vocab_size=COPY_VOCAB)) as target,
        start_draft(ScriptedEngine(repeat_badly, vocab_size=COPY_VOCAB)) as draft,
        start_orchestrator(
            [target.address], [draft.address], tokenizer=f"synthetic:vocab_size={COPY_VOCAB}", draft_timeout=20
        ) as orchestrator,
    ):
        prompts = [own_prompt(dice) for _ in range(32)]
        counts = [dice.randint(5, 60) for _ in prompts]
        lookaheads = [dice.randint(0, 8) for _ in prompts]
        # Greedy ones must copy their prompt, sampled ones must equal what they are alone.
        sampling = [{"temperature": 0.0} if index % 2 else {"temperature": 1.5} for index in range(len(prompts))]
        requests = [
            ask(prompt, max_tokens=count, lookahead=lookahead, seed=index, **params)
            for index, (prompt, count, lookahead, params) in enumerate(
                zip(prompts, counts, lookaheads, sampling, strict=True)
            )
        ]
        alone = [await orchestrator.generate(request) for request in requests]
        leavers = [
            asyncio.create_task(leave_early(orchestrator, ask(own_prompt(dice), max_tokens=4000), dice.randint(0, 20)))
            for _ in range(16)
        ]
        together = await asyncio.gather(*(orchestrator.generate(request) for request in requests))
        await asyncio.gather(*leavers)
        assert [one.ids for one in together] == [one.ids for one in alone]
        for index in range(1, len(prompts), 2):
            assert together[index].ids == copied(prompts[index], counts[index])
        assert [one.drafted for one in together] == [one.drafted for one in alone]
        assert [one.accepted for one in together] == [one.accepted for one in alone]
        await eventually(lambda: not target.service.load().open_sessions)
        await draft.until_sessions(0)


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
async def test_f4_a_draft_equal_to_the_target_is_accepted_whole_at_every_concurrency(concurrency: int) -> None:
    async with (
        start_target(target_engine()) as target,
        start_draft(draft_engine(SPEC)) as draft,
        start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator,
    ):
        prompts = [(index % 16, index // 16) for index in range(concurrency)]
        generations = await asyncio.gather(
            *(orchestrator.generate(ask(prompt, max_tokens=26, temperature=0)) for prompt in prompts)
        )
        for generation, prompt in zip(generations, prompts, strict=True):
            assert generation.ids == greedy_output(prompt, 26)
            # One plain round for the prompt, then five tokens a round.
            assert [one.drafted for one in generation.rounds] == [0, 4, 4, 4, 4, 4]
            assert generation.accepted == generation.drafted


async def test_f6_a_long_prompt_holds_a_running_stream_back_by_two_passes_at_most() -> None:
    scripted = ScriptedEngine(repeat, vocab_size=COPY_VOCAB, context_length=1 << 16)
    model = HookedEngine(scripted)
    async with (
        start_target(model, token_budget=64) as target,
        start_orchestrator([target.address], tokenizer=f"synthetic:vocab_size={COPY_VOCAB}") as orchestrator,
    ):
        running = Client(orchestrator, ask([4, 1, 2, 3], max_tokens=50_000, temperature=0, session_id="running"))
        await running.until_tokens(3)
        model.stepping = True
        prompt = [24, *(index % COPY_VOCAB for index in range(2_999))]
        long = asyncio.create_task(orchestrator.generate(ask(prompt, max_tokens=1, temperature=0)))
        await eventually(lambda: target.service.queued == 2)
        tokens = await committed(orchestrator)
        first_pass = len(scripted.passes)
        while not long.done():
            # Both wait for the model: the pass that comes next is the one that must not leave the stream out.
            await eventually(lambda: target.service.queued == 2 or long.done())
            begun = model.passes
            model.step()
            # Once the next pass has begun, the results of this one are on their way to the event loop.
            await eventually(lambda count=begun: model.passes > count or long.done())
            await asyncio.sleep(0)
        passes = scripted.passes[first_pass:]
        assert (await long).finish.usage.completion_tokens == 1
        chunks = [segment for one in passes for segment in one if segment.tokens > 1]
        assert len(chunks) >= 3_000 // 64
        assert longest_gap(passes) <= 2
        assert await committed(orchestrator) - tokens >= len(passes) // 2
        model.stepping = False
        model.step()
        running.cancel()


def longest_gap(passes: Sequence[Sequence[SegmentSeen]]) -> int:
    """Most passes in a row that gave the stream no token, plus the one that did."""
    gaps, gap = [0], 0
    for one in passes:
        gap += 1
        if any(segment.tokens == segment.rows == 1 for segment in one):
            gaps.append(gap)
            gap = 0
    return max(gaps)


async def committed(orchestrator: RunningOrchestrator) -> int:
    record = await orchestrator.core.store.load("running")
    assert record is not None
    return len(record.tokens)
