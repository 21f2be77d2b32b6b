"""Coupled acceptance: the output is a function of (seed, prompt, target) and of nothing else."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from outrider.law.noise import Purpose, RoundNoise
from outrider.law.params import LawParams
from outrider.law.race import race
from outrider.law.transforms import RowContext, law_probs
from outrider.lm.engine import Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.v1.draft_pb2 import PROPOSER_AUTO, PROPOSER_MODEL, PROPOSER_PROMPT_LOOKUP, PROPOSER_SUFFIX
from outrider.v1.orchestrator_pb2 import ACCEPTANCE_COUPLED
from tests.harness.engines import DEADLINE
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import block_of, eventually, int32, open_command, start_draft, start_target

VOCAB = 20
TOKENIZER = f"synthetic:vocab_size={VOCAB}"
TARGET = SyntheticSpec(vocab_size=VOCAB, seed=3, order=2)
LIKE = SyntheticSpec(vocab_size=VOCAB, seed=3, order=2, noise=0.5)
UNLIKE = SyntheticSpec(vocab_size=VOCAB, seed=99, order=1)
PROMPT = (1, 2, 3)
LENGTH = 40
SEED = 2**64 - 77


def reference(seed: int = SEED, length: int = LENGTH, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """Token after token from the target's law and the race over all of it, with no service anywhere."""
    engine, tokens = SyntheticEngine(TARGET), list(prompt)
    ids = np.arange(VOCAB, dtype=np.int32)
    for _ in range(length):
        whole = int32(tokens)
        (logits,) = engine.forward([Segment(engine.open(whole), whole, 1)])
        probs = law_probs(logits, [RowContext(LawParams(prompt_length=len(prompt)), whole)], VOCAB)[0].numpy()
        tokens.append(race(probs, RoundNoise(seed, 0).exponentials(Purpose.COUPLE, len(tokens), ids)))
    return tokens[len(prompt) :]


def request(**fields: Any) -> Any:
    return ask(PROMPT, **{"seed": SEED, "max_tokens": LENGTH, "acceptance": ACCEPTANCE_COUPLED, **fields})


async def test_speculation_off_is_the_reference() -> None:
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_orchestrator([target.address], tokenizer=TOKENIZER) as orchestrator,
    ):
        generation = await orchestrator.generate(request(lookahead=0))
        assert generation.ids == reference()
        assert generation.started.acceptance == ACCEPTANCE_COUPLED
        assert (await orchestrator.generate(request(lookahead=0, seed=5))).ids != generation.ids


@pytest.mark.parametrize("spec", [TARGET, LIKE, UNLIKE], ids=["equal", "like", "unlike"])
async def test_every_draft_and_every_lookahead_gives_the_same_tokens(spec: SyntheticSpec) -> None:
    expected = reference()
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_draft(SyntheticEngine(spec), proposers="model,prompt_lookup,suffix", suffix_history=4096) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER) as orchestrator,
    ):
        for lookahead, law_top in ((1, 0), (2, 1), (3, 0), (4, 3), (7, 0), (16, 0)):
            wanted = request(lookahead=lookahead, proposer=PROPOSER_MODEL)
            wanted.speculation.law_top = law_top
            generation = await orchestrator.generate(wanted)
            assert generation.ids == expected
            assert generation.drafted > 0
            if spec is TARGET and law_top == 0:
                # Draft = target: everything is kept, at every lookahead.
                assert generation.accepted == generation.drafted
        for proposer in (PROPOSER_MODEL, PROPOSER_PROMPT_LOOKUP, PROPOSER_SUFFIX, PROPOSER_AUTO):
            assert (await orchestrator.generate(request(proposer=proposer))).ids == expected


async def test_batch_mates_change_nothing() -> None:
    expected = reference()
    async with (
        start_target(SyntheticEngine(TARGET)) as target,
        start_draft(SyntheticEngine(LIKE)) as draft,
        start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER) as orchestrator,
    ):
        mates = [ask((4, index), seed=index, max_tokens=30, temperature=0.9, top_p=0.9) for index in range(8)]
        others = [ask((4, index), max_tokens=30) for index in range(4)]
        results = await asyncio.gather(
            *(orchestrator.generate(one) for one in [*mates, request(), *others, request(lookahead=7)])
        )
        assert results[8].ids == results[-1].ids == expected
        for index, mate in enumerate(results[:8]):
            assert mate.ids == (await orchestrator.generate(mates[index])).ids


async def _rest(call: Any, generation: Generation) -> Generation:
    while (response := await call.read()) is not grpc.aio.EOF:
        generation.add(response)
    assert generation.finish.reason
    return generation


def _start(orchestrator: RunningOrchestrator) -> tuple[Any, Generation]:
    return orchestrator.stub.Generate(request(lookahead=3), timeout=60), Generation()


class HeldEngine(SyntheticEngine):
    """A target whose passes wait while the test acts in the middle of a generation."""

    def __init__(self, spec: SyntheticSpec) -> None:
        super().__init__(spec)
        self.go = threading.Event()
        self.go.set()

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        assert self.go.wait(DEADLINE), "the test never let the pass go on"
        return super().forward(segments)


async def _take_and_hold(call: Any, generation: Generation, engine: HeldEngine, tokens: int) -> None:
    """Reads until so many tokens have come, then lets no more rounds through."""
    while len(generation.ids) < tokens:
        generation.add(await call.read())
    engine.go.clear()


async def test_a_restart_of_the_target_in_the_middle_changes_nothing() -> None:
    engine = HeldEngine(TARGET)
    async with start_draft(SyntheticEngine(LIKE)) as draft, start_target(engine) as target:
        port = int(target.address.rpartition(":")[2])
        async with start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER) as orchestrator:
            call, generation = _start(orchestrator)
            await _take_and_hold(call, generation, engine, 8)
            stopping = asyncio.create_task(target.host.stop())
            await eventually(lambda: not orchestrator.core.targets.usable)
            engine.go.set()
            await stopping
            async with start_target(SyntheticEngine(TARGET), port=port):
                await _rest(call, generation)
            assert generation.ids == reference()
            assert len(generation.ids) > 8


async def test_a_draft_worker_swapped_in_the_middle_changes_nothing() -> None:
    engine = HeldEngine(TARGET)
    async with start_target(engine) as target, start_draft(SyntheticEngine(LIKE)) as draft:
        port = int(draft.address.rpartition(":")[2])
        async with start_orchestrator([target.address], [draft.address], tokenizer=TOKENIZER) as orchestrator:
            call, generation = _start(orchestrator)
            await _take_and_hold(call, generation, engine, 8)
            await draft.host.stop()
            before = len(generation.rounds)
            async with start_draft(SyntheticEngine(UNLIKE), port=port):
                await eventually(lambda: orchestrator.core.drafts.links[0].incarnation == 2)
                engine.go.set()
                await _rest(call, generation)
            assert generation.ids == reference()
            # The held round had its block already; the new worker's come after it.
            assert any(one.drafted for one in generation.rounds[before + 1 :])


async def test_the_draft_races_with_the_targets_noise() -> None:
    """A draft that is the target says what the target will say; with PROPOSE noise it would not."""
    async with start_draft(SyntheticEngine(TARGET)) as draft:
        stream = draft.stream()
        command = open_command("s", PROMPT, 10, law=LawParams(prompt_length=3), seed=SEED)
        drawn, law = block_of(await stream.ask(command))
        assert len(law.sizes) == 10
        command.session_id, command.open.coupled, command.open.omit_law = "t", True, True
        event = await stream.ask(command)
        assert not event.block.HasField("law")
        assert np.frombuffer(event.block.tokens, np.int32).tolist() == reference(length=10)
        assert drawn != reference(length=10)
