"""Engines for tests: logits from a function of the prefix, passes that wait, pages that run out, failures on demand."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.law.sparse import Int32Array
from outrider.lm.engine import EngineInfo, OutOfPages, Segment
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.token_sequence import TokenSequence
from outrider.lm.tokenizer import synthetic_tokenizer, vocabulary_of

DEADLINE = 20.0

Script = Callable[[tuple[int, ...]], Sequence[float]]


def next_token_script(vocab_size: int) -> Script:
    """After token t comes t + 1, with a margin of 5."""

    def script(prefix: tuple[int, ...]) -> list[float]:
        logits = [0.0] * vocab_size
        logits[(prefix[-1] + 1) % vocab_size] = 5.0
        return logits

    return script


@dataclass(frozen=True)
class SegmentSeen:
    """One segment of a pass: where it started, how many tokens, how many rows."""

    start: int
    tokens: int
    rows: int


class ScriptedEngine:
    """An Engine under the test's control.

    Attributes:
        passes: the segments of every pass so far.
        failure: raised by the next pass when set.
        in_pass: set while a pass runs.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int = 16,
        context_length: int = 4096,
        pages: int = 0,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        vocabulary = vocabulary_of(synthetic_tokenizer(SyntheticSpec(vocab_size=vocab_size)))
        self._script, self._pages, self._page_size, self._dtype = script, pages, page_size, dtype
        self._info = EngineInfo(
            model_id="scripted",
            vocab_size=vocab_size,
            padded_vocab_size=vocab_size,
            context_length=context_length,
            dtype=str(dtype).removeprefix("torch."),
            eos_token_ids=(),
            vocab_fingerprint=vocabulary.fingerprint,
            token_hashes=vocabulary.token_hashes,
        )
        self._sequences: list[TokenSequence] = []
        self._may_run = threading.Event()
        self._may_run.set()
        self.in_pass = threading.Event()
        self.passes: list[list[SegmentSeen]] = []
        self.failure: BaseException | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    def open(self, tokens: Int32Array) -> TokenSequence:
        sequence = TokenSequence()
        self._sequences.append(sequence)
        return sequence

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        self._reserve(segments)
        self.in_pass.set()
        assert self._may_run.wait(DEADLINE), "the test never let the pass go on"
        self.in_pass.clear()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.passes.append([SegmentSeen(item.sequence.length, len(item.tokens), item.rows) for item in segments])
        return [self._score(segment) for segment in segments]

    def pages(self) -> tuple[int, int]:
        return self._used(), self._pages

    def shared_pages(self) -> int:
        return 0

    def hold(self) -> None:
        """The next pass (and the one that runs) waits until `let_go`."""
        self._may_run.clear()

    def let_go(self) -> None:
        """Passes run again."""
        self._may_run.set()

    async def until_in_pass(self) -> None:
        """Returns when a held pass has begun."""
        assert await asyncio.to_thread(self.in_pass.wait, DEADLINE), "no pass began"

    @property
    def open_tokens(self) -> list[int]:
        """Lengths of the sequences that hold something."""
        return [sequence.length for sequence in self._sequences if sequence.length]

    def _score(self, segment: Segment) -> torch.Tensor:
        sequence = segment.sequence
        assert isinstance(sequence, TokenSequence)
        sequence.append(segment.tokens, segment.parents)
        places = range(sequence.length - segment.rows, sequence.length)
        rows = [self._script(tuple(sequence.text_before(place, sequence.length))) for place in places]
        return torch.tensor(np.array(rows, np.float32).reshape(segment.rows, self._info.vocab_size)).to(self._dtype)

    def _used(self) -> int:
        return sum(-(-sequence.length // self._page_size) for sequence in self._sequences)

    def _reserve(self, segments: Sequence[Segment]) -> None:
        if not self._pages:
            return
        grown = {id(item.sequence): item.sequence.length + len(item.tokens) for item in segments}
        wanted = sum(-(-grown.get(id(item), item.length) // self._page_size) for item in self._sequences)
        if wanted > self._pages:
            raise OutOfPages(f"{wanted} pages wanted of {self._pages}")
