"""transformers' own generation on the same checkpoints: plain `generate`, and assisted by the same draft."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from outrider.bench.pair import Interrupted, ModelThread, Pair, prompt_ids
from outrider.bench.prompts import PromptSet
from outrider.bench.sample import Asked, Sample
from outrider.bench.services import ASSISTED, Drafted, Services
from outrider.cli.options import ProposerName
from outrider.cli.run import Failure
from outrider.lm.gguf_once import gguf_read_once
from outrider.lm.load import EngineOptions, load_model
from outrider.lm.quiet import quiet
from outrider.lm.refuse import refusing
from outrider.lm.source import SourceKind, parse_source

PLAIN = "transformers plain"


class _Arrivals(BaseStreamer):
    """Notes when tokens come: first the prompt, then those of each round."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.arrivals: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Tokens came."""
        if not self._prompt and value.numel():
            self.arrivals.append(time.perf_counter() - self.began)
        self._prompt = False

    def end(self) -> None:
        """No more will."""


class _Cancelled(StoppingCriteria):
    """Ends a generation that nobody waits for."""

    def __init__(self, thread: ModelThread) -> None:
        self._thread = thread

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._thread.cancelled.is_set(), dtype=torch.bool)


@dataclass(frozen=True)
class Generate:
    """`model.generate` as a Way.

    Attributes:
        name: of the way.
        thread: that runs the models.
        target: as transformers loads it.
        draft: the assistant; None where no set needs one.
        ours: the way that it stands beside: blocks are made alike.
        assisted: whether blocks are made at all.
    """

    name: str
    thread: ModelThread
    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    pair: Pair
    ours: Services
    assisted: bool

    @staticmethod
    async def load(pair: Pair, thread: ModelThread, ours: Services, sets: Sequence[PromptSet]) -> "list[Generate]":
        """Both ways, on one copy of the weights. Raises Failure where transformers has no such model."""
        wanted = any(ours.blocks_for(each).proposer is ProposerName.model for each in sets)

        def load() -> list[Generate]:
            target = _load(pair, pair.target, ours.asked)
            loads = wanted and parse_source(pair.draft).kind is not SourceKind.SYNTHETIC
            draft = _load(pair, pair.draft, ours.asked) if loads else None
            tokenizer = pair.tokenizer()
            return [
                Generate(name, thread, target, draft, tokenizer, pair, ours, assisted)
                for name, assisted in ((ASSISTED, True), (PLAIN, False))
            ]

        return await thread.run(load)

    def declines(self, prompts: PromptSet, concurrency: int) -> str:
        """Assisted generation takes one sequence at a time, and plain stands beside it."""
        if concurrency > 1:
            return "transformers' assisted generation takes one sequence"
        if self.assisted and not self._assistance(self.ours.blocks_for(prompts)):
            return "transformers has no such draft"
        return ""

    async def answer(self, prompts: PromptSet, index: int, max_tokens: int) -> Sample:
        """One generation."""
        prompt = prompt_ids(self.tokenizer, prompts.prompts[index])
        assistance = self._assistance(self.ours.blocks_for(prompts)) if self.assisted else {}
        return await self.thread.run(lambda: self._generate(index, prompt, assistance, max_tokens))

    @torch.inference_mode()
    def _generate(self, index: int, prompt: list[int], assistance: dict[str, Any], max_tokens: int) -> Sample:
        asked, ids, streamer = self.ours.asked, torch.tensor([prompt], device=self.target.device), _Arrivals()
        if asked.seed is not None:
            torch.manual_seed(asked.seed)  # transformers draws from the global generator
        with quiet(lambda _part, _what: None):
            said = self.target.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([_Cancelled(self.thread)]),
                **_sampling(asked),
                **assistance,
            )
        seconds = time.perf_counter() - streamer.began
        if self.thread.cancelled.is_set():
            raise Interrupted
        sample = Sample(index, streamer.arrivals, seconds, ids=tuple(said[0, len(prompt) :].tolist()))
        assert sample.ids is not None
        sample.tokens = sample.stats.tokens = len(sample.ids)
        sample.stats.seconds = seconds
        # Each round brings its tokens at once, after one pass of the target.
        sample.stats.target_passes = sample.stats.rounds = len(streamer.arrivals)
        return sample

    def _assistance(self, drafted: Drafted) -> dict[str, Any]:
        """How transformers makes such blocks; empty when it cannot."""
        if drafted.proposer is ProposerName.prompt_lookup:
            return {"prompt_lookup_num_tokens": drafted.length}
        if drafted.proposer is ProposerName.early_exit and self.pair.early_exit_layers:
            return {"assistant_early_exit": self.pair.early_exit_layers, "num_assistant_tokens": drafted.length}
        if drafted.proposer is ProposerName.model and self.draft is not None:
            # Kept at the assistant, not given to generate.
            self.draft.generation_config.num_assistant_tokens = drafted.length
            return {"assistant_model": self.draft}
        return {}


def _sampling(asked: Asked) -> dict[str, Any]:
    if asked.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}


def _load(pair: Pair, model: str, asked: Asked) -> PreTrainedModel:
    source = parse_source(model)
    if source.kind is SourceKind.SYNTHETIC:
        raise Failure(f"transformers cannot load {model}: it is no checkpoint")
    torch.set_num_threads(pair.threads)
    device = pair.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with refusing(source.name), gguf_read_once(), quiet(lambda _part, _what: None):
        options = EngineOptions(dtype=pair.dtype or "auto", target=pair.target)
        loaded, _ = load_model(source, options, torch.device(device))
    if loaded._supports_sdpa:
        loaded.set_attn_implementation("sdpa")  # as transformers chooses by itself
    ends = None if asked.ignore_eos else getattr(loaded.generation_config, "eos_token_id", None)
    # Checkpoints bring sampling settings of their own, top_k and a repetition penalty among them: another law.
    loaded.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)  # type: ignore[no-untyped-call]
    return loaded
