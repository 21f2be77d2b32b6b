"""Engines around engines: what they say is changed, what they are given is written down."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outrider.law.sparse import Int32Array
from outrider.lm.engine import Engine, EngineInfo, Segment, SequenceState
from outrider.lm.token_sequence import TokenSequence
from outrider.lm.tokenizer import Vocabulary

Rows = Callable[[torch.Tensor], torch.Tensor]


def served_as(info: EngineInfo, vocabulary: Vocabulary) -> EngineInfo:
    """The same with another vocabulary."""
    return replace(
        info,
        vocab_size=vocabulary.size,
        padded_vocab_size=vocabulary.size,
        vocab_fingerprint=vocabulary.fingerprint,
        token_hashes=vocabulary.token_hashes,
    )


class ChangedEngine:
    """An engine whose rows go through a function, and whose info may be another one."""

    def __init__(self, inner: Engine, rows: Rows = lambda rows: rows, info: EngineInfo | None = None) -> None:
        self._inner, self._rows = inner, rows
        self._info = info or inner.info

    @property
    def info(self) -> EngineInfo:
        return self._info

    def open(self, tokens: Int32Array) -> SequenceState:
        return self._inner.open(tokens)

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        return [self._rows(rows) for rows in self._inner.forward(segments)]

    def pages(self) -> tuple[int, int]:
        return self._inner.pages()

    def shared_pages(self) -> int:
        return self._inner.shared_pages()


def always_wrong(inner: Engine) -> ChangedEngine:
    """Says what the inner engine thinks least of: greedily, never what that one says."""
    return ChangedEngine(inner, torch.neg)


@dataclass(frozen=True)
class Fed:
    """One segment that an engine got."""

    start: int
    tokens: tuple[int, ...]
    rows: int


@dataclass
class _Shadow:
    """What a sequence was fed, with all that was truncated taken out."""

    sequence: SequenceState
    tokens: list[int] = field(default_factory=list)


class RecordingEngine:
    """Writes down what an engine is fed.

    Attributes:
        fed: the segments of every pass, in order.
    """

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self._shadows: dict[int, _Shadow] = {}
        self.fed: list[Fed] = []

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    @property
    def sequences(self) -> list[list[int]]:
        """The tokens that each sequence was last known to hold, also of those freed since."""
        return [shadow.tokens for shadow in self._shadows.values()]

    def open(self, tokens: Int32Array) -> SequenceState:
        sequence = self._inner.open(tokens)
        # Holding the sequence keeps its id from being given to another.
        self._shadows[id(sequence)] = _Shadow(sequence, tokens[: sequence.length].tolist())
        return sequence

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        for segment in segments:
            tokens, start = segment.tokens.tolist(), segment.sequence.length
            self.fed.append(Fed(start, tuple(tokens), segment.rows))
            shadow = self._shadows[id(segment.sequence)]
            shadow.tokens[start:] = tokens
        return self._inner.forward(segments)

    def pages(self) -> tuple[int, int]:
        return self._inner.pages()

    def shared_pages(self) -> int:
        return self._inner.shared_pages()


class OneTokenEngine:
    """Says one token whatever it is fed, for nothing: with a token that nobody says, a draft that is always wrong."""

    def __init__(self, info: EngineInfo, token: int) -> None:
        self._info = info
        self._row = torch.zeros(info.vocab_size)
        self._row[token] = 100.0

    @property
    def info(self) -> EngineInfo:
        return self._info

    def open(self, tokens: Int32Array) -> TokenSequence:
        return TokenSequence()

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        for segment in segments:
            assert isinstance(segment.sequence, TokenSequence)
            segment.sequence.append(np.asarray(segment.tokens, np.int32), segment.parents)
        return [self._row.expand(segment.rows, -1) for segment in segments]

    def pages(self) -> tuple[int, int]:
        return 0, 0

    def shared_pages(self) -> int:
        return 0
