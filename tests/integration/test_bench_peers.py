"""The ways that run in the bench's own process say what the services say, and end when nobody waits for them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.bench.generate import Generate
from outrider.bench.loop import Loop
from outrider.bench.pair import Interrupted, ModelThread, Pair
from outrider.bench.prompts import Message, Prompt, PromptSet
from outrider.bench.sample import Asked, Sample, Way
from outrider.bench.services import ASSISTED, PLAIN, SPECULATIVE, Drafted, Services
from outrider.cli.options import ProposerName
from outrider.cli.run import Failure
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import synthetic_tokenizer
from tests.harness.models import save_tiny
from tests.harness.system import start_system

# The end comes early in one output, late in another, and not at all in the third.
VOCAB, LAYERS, TOKENS, END = 26, 2, 24, 15
MESSAGE = Message(role="user", content="hello")
PROMPTS = PromptSet("set", (Prompt(prompt="abcab"), Prompt(messages=(MESSAGE,)), Prompt(prompt="zz")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny(directory, "llama", vocab_size=VOCAB, eos_token_id=END)
    synthetic_tokenizer(SyntheticSpec(vocab_size=VOCAB)).save_pretrained(directory)
    return str(directory)


@asynccontextmanager
async def services(model: str, asked: Asked) -> AsyncIterator[Services]:
    """Our speculative way, drafted by the target's first layers."""
    options = EngineOptions(dtype="float32", kv_pages=64)
    target, draft = load_engine(model, options), load_engine(model, replace(options, layers=LAYERS))
    async with start_system(target, draft, tokenizer=model) as system:
        yield Services(SPECULATIVE, system.orchestrator.channel, asked, Drafted(4))


@asynccontextmanager
async def model_thread() -> AsyncIterator[ModelThread]:
    thread = ModelThread()
    try:
        yield thread
    finally:
        thread.close()


async def answers(way: Way) -> list[Sample]:
    assert not way.declines(PROMPTS, 1)
    return [await way.answer(PROMPTS, index, TOKENS) for index in range(len(PROMPTS.prompts))]


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_every_way_says_the_same(model: str, ignore_eos: bool) -> None:
    pair = Pair(model, model, early_exit_layers=LAYERS, dtype="float32")
    async with services(model, Asked(TOKENS, ignore_eos)) as ours, model_thread() as thread:
        plain = await answers(replace(ours, name=PLAIN, drafted=Drafted(0)))
        speculative = await answers(ours)
        alike = replace(ours, drafted=Drafted(4, ProposerName.early_exit))
        loop = await Loop.load(pair, thread, alike, [PROMPTS])
        looped = await answers(loop)
        peers = await Generate.load(pair, thread, alike, [PROMPTS])
        generated = [await answers(peer) for peer in peers]
    expected = [sample.ids for sample in plain]
    assert [len(ids or ()) for ids in expected] == ([TOKENS] * 3 if ignore_eos else [3, 22, TOKENS])
    for samples in (speculative, looped, *generated):
        assert [sample.ids for sample in samples] == expected
        assert all(sample.tokens == len(sample.ids or ()) for sample in samples)
    # The same rounds, too: the loop is a yardstick only as long as it does the same work.
    for ours_, its in zip(speculative, looped, strict=True):
        for count in ("rounds", "drafted", "accepted", "rejections", "target_passes", "drafted_at", "accepted_at"):
            assert getattr(ours_.stats, count) == getattr(its.stats, count), count
    assert sum(sample.stats.accepted for sample in looped) > 0
    assert peers[0].name == ASSISTED
    rounds = [sum(sample.stats.rounds for sample in samples) for samples in generated]
    assert rounds[0] < rounds[1] == sum(map(len, map(list, filter(None, expected))))


async def test_transformers_drafts_as_ours_does(model: str) -> None:
    pair = Pair(model, model, dtype="float32")
    async with services(model, Asked(TOKENS)) as ours, model_thread() as thread:
        expected = [sample.ids for sample in await answers(replace(ours, drafted=Drafted(0)))]
        for drafted in (Drafted(3, ProposerName.model), Drafted(3, ProposerName.prompt_lookup)):
            assisted, _ = await Generate.load(pair, thread, replace(ours, drafted=drafted), [PROMPTS])
            assert [sample.ids for sample in await answers(assisted)] == expected
        assert "such draft" in replace(assisted, ours=replace(ours, drafted=Drafted(3))).declines(PROMPTS, 1)
        alike = replace(ours, drafted=Drafted(3, ProposerName.model))
        unloadable, plain = await Generate.load(replace(pair, draft="synthetic:"), thread, alike, [PROMPTS])
        assert "such draft" in unloadable.declines(PROMPTS, 1)
        assert not plain.declines(PROMPTS, 1)
        assert "one sequence" in assisted.declines(PROMPTS, 2)


async def test_seeded_sampling_of_transformers_is_repeatable(model: str) -> None:
    pair = Pair(model, model, dtype="float32")
    async with services(model, Asked(TOKENS, temperature=0.8, seed=5)) as ours, model_thread() as thread:
        peers = await Generate.load(pair, thread, replace(ours, drafted=Drafted(3, ProposerName.model)), [PROMPTS])
        first, second = [sample.ids for sample in await answers(peers[1])], [it.ids for it in await answers(peers[1])]
    assert first == second


async def test_loop_runs_one_session_with_a_model(model: str) -> None:
    async with services(model, Asked(TOKENS)) as ours, model_thread() as thread:
        copying = replace(ours, drafted=Drafted(3, ProposerName.prompt_lookup))
        loop = await Loop.load(Pair(model, model), thread, copying, [PROMPTS])
        assert "with a model" in loop.declines(PROMPTS, 1)
        assert "one session" in loop.declines(PROMPTS, 2)


async def test_a_model_that_cannot_be_loaded_is_one_sentence(model: str) -> None:
    async with services(model, Asked(TOKENS)) as ours, model_thread() as thread:
        alike = replace(ours, drafted=Drafted(3, ProposerName.model))
        with pytest.raises(Failure, match="no-such"):
            await Loop.load(Pair("./no-such", model), thread, alike, [PROMPTS])
        with pytest.raises(Failure, match="no checkpoint"):
            await Generate.load(Pair("synthetic:vocab_size=26", model), thread, alike, [PROMPTS])


class Slow(SyntheticEngine):
    """Counts its passes."""

    def __init__(self, spec: SyntheticSpec) -> None:
        super().__init__(spec)
        self.passes, self.runs = 0, threading.Event()

    def forward(self, segments: Sequence[object]) -> list[torch.Tensor]:
        self.passes += 1
        self.runs.set()
        return super().forward(segments)  # type: ignore[arg-type]


async def test_cancelled_answer_ends_its_thread(model: str) -> None:
    spec = SyntheticSpec(vocab_size=VOCAB, pass_ms=20)
    target, draft = Slow(spec), Slow(spec)
    async with services(model, Asked(2000)) as ours:
        thread = ModelThread()
        alike = replace(ours, drafted=Drafted(2, ProposerName.model))
        loop = Loop(thread, target, {ProposerName.model: draft}, synthetic_tokenizer(spec), alike, Asked(2000))
        answer = asyncio.create_task(loop.answer(PROMPTS, 0, 2000))
        await asyncio.to_thread(target.runs.wait)
        answer.cancel()
        with suppress(asyncio.CancelledError):
            await answer
        await asyncio.to_thread(thread.close)
        assert target.passes < 600
        with pytest.raises(Interrupted):
            loop._generate(0, [1], draft, 2, 2000)
