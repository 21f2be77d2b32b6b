"""The bare loop: speculative decoding of one session in one process, without services. What ours adds is overhead.

Greedy, on the engines that the workers use: the same weights, kernels, dtype and threads. Draft, verify, accept, cut
both caches back; nothing else.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.bench.pair import Interrupted, ModelThread, Pair, prompt_ids
from outrider.bench.prompts import PromptSet
from outrider.bench.sample import Asked, Sample
from outrider.bench.services import LOOP, Services
from outrider.cli.options import ProposerName
from outrider.law.params import LawParams
from outrider.law.transforms import RowContext, greedy_tokens
from outrider.lm.engine import Engine, Segment
from outrider.lm.load import EngineOptions, load_engine
from outrider.v1.orchestrator_pb2 import Round

# Nothing is adjusted, so the tokens before do not matter.
_GREEDY = RowContext(LawParams(temperature=0.0), np.empty(0, np.int32))
MODEL_PROPOSERS = (ProposerName.model, ProposerName.early_exit)


class _Cached:
    """A model with its cache of one sequence."""

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self._engine = engine
        self._state = engine.open(np.array(prompt, np.int32))

    def likeliest(self, sequence: list[int], rows: int = 1) -> list[int]:
        """The likeliest token after each of the last `rows` tokens of a sequence that begins as the cache does."""
        new = np.array(sequence[self._state.length :], np.int32)
        (logits,) = self._engine.forward([Segment(self._state, new, rows)])
        found: list[int] = greedy_tokens(logits, [_GREEDY] * rows, self._engine.info.vocab_size).tolist()
        return found

    def cut(self, length: int) -> None:
        """Forgets everything after the first `length` tokens."""
        self._state.truncate(min(self._state.length, length))

    def free(self) -> None:
        """Gives the cache back."""
        self._state.free()


@dataclass(frozen=True)
class Loop:
    """The loop as a Way.

    Attributes:
        thread: that runs the models.
        target, drafts: engines; the drafts by proposer.
        ours: the way that it is a yardstick for: blocks are made alike.
        asked: what is asked for; greedy.
    """

    thread: ModelThread
    target: Engine
    drafts: Mapping[ProposerName, Engine]
    tokenizer: PreTrainedTokenizerBase
    ours: Services
    asked: Asked
    name: str = LOOP

    @staticmethod
    async def load(pair: Pair, thread: ModelThread, ours: Services, sets: Sequence[PromptSet]) -> "Loop":
        """Loads the models that the sets need. Raises Failure where one is refused."""
        wanted = {ours.blocks_for(each).proposer for each in sets}

        def load() -> Loop:
            engines = {it: _engine(pair, it) for it in MODEL_PROPOSERS if it in wanted}
            return Loop(thread, _engine(pair, None), engines, pair.tokenizer(), ours, ours.asked)

        return await thread.run(load)

    def declines(self, prompts: PromptSet, concurrency: int) -> str:
        """It runs one session, drafted by a model."""
        if concurrency > 1:
            return "the bare loop runs one session"
        proposer = self.ours.blocks_for(prompts).proposer
        return "" if proposer in self.drafts else "the bare loop drafts with a model"

    async def answer(self, prompts: PromptSet, index: int, max_tokens: int) -> Sample:
        """One generation."""
        drafted = self.ours.blocks_for(prompts)
        assert drafted.proposer is not None
        draft = self.drafts[drafted.proposer]
        prompt = prompt_ids(self.tokenizer, prompts.prompts[index])
        return await self.thread.run(lambda: self._generate(index, prompt, draft, drafted.length, max_tokens))

    def _generate(self, index: int, prompt: list[int], draft: Engine, lookahead: int, max_tokens: int) -> Sample:
        """The whole algorithm."""
        sample, began = Sample(index), time.perf_counter()
        stops = () if self.asked.ignore_eos else self.target.info.eos_token_ids
        sequence, drafting, verifying = list(prompt), _Cached(draft, prompt), _Cached(self.target, prompt)
        ended = False
        while not ended:
            start, base = time.perf_counter(), len(sequence)
            left = max_tokens - (base - len(prompt))
            # As ours: the prompt's round has no block.
            block = _block(drafting, sequence, min(lookahead, left - 1) if base > len(prompt) else 0, stops)
            drafted_at = time.perf_counter()
            said = verifying.likeliest(sequence + block, len(block) + 1)
            verified_at = time.perf_counter()
            accepted = _agreeing(block, said)
            tokens = _until_stop(said[: accepted + 1], stops)
            sequence += tokens
            drafting.cut(base + accepted)
            verifying.cut(base + accepted)
            ended = len(sequence) - len(prompt) >= max_tokens or tokens[-1] in stops
            sample.arrivals.append(time.perf_counter() - began)
            sample.stats.add_round(_round(len(block), accepted, drafted_at - start, verified_at - drafted_at))
            if self.thread.cancelled.is_set():
                raise Interrupted
        drafting.free()
        verifying.free()
        sample.seconds = sample.stats.seconds = time.perf_counter() - began
        sample.ids = tuple(sequence[len(prompt) :])
        sample.tokens = sample.stats.tokens = len(sample.ids)
        return sample


def _engine(pair: Pair, proposer: ProposerName | None) -> Engine:
    """The engine behind a proposer; the target's without one."""
    model, layers = (pair.target, 0) if proposer is None else pair.runs(proposer)
    options = EngineOptions(
        dtype=pair.dtype or "auto",
        device=pair.device or "auto",
        threads=pair.threads,
        context_length=pair.context_length,
        layers=layers,
        target=pair.target,
    )
    return load_engine(model, options)


def _block(drafting: _Cached, sequence: list[int], lookahead: int, stops: Sequence[int]) -> list[int]:
    """So many draft tokens; fewer when one is a stop token."""
    block: list[int] = []
    while len(block) < lookahead and (not block or block[-1] not in stops):
        block += drafting.likeliest(sequence + block)
    return block


def _agreeing(block: list[int], said: list[int]) -> int:
    """How many tokens of the block are what the target said."""
    return next((index for index, token in enumerate(block) if token != said[index]), len(block))


def _until_stop(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """Up to the first stop token, with it."""
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))]


def _round(drafted: int, accepted: int, draft_seconds: float, verify_seconds: float) -> Round:
    draft, verify = int(draft_seconds * 1e6), int(verify_seconds * 1e6)
    return Round(
        drafted=drafted,
        accepted=accepted,
        target_passes=1,
        draft_wait_micros=draft,
        draft_forward_micros=draft,
        verify_micros=verify,
        verify_forward_micros=verify,
    )
