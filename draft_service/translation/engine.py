"""A draft model of another vocabulary as an engine of its target's: the laws of both on the tokens that they share.

Token-level intersection (Timor et al. 2025): a token of the target that the draft model does not have scores LEFT_OUT.
Everything after the logits is as for any engine: penalties, biases, masks and grammars in the target's tokens, softmax,
which renormalises over what is left, truncation, and only then the draw. What is shipped is what was drawn from.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from draft_service.config import TranslationWay
from draft_service.translation.reading import Reading
from draft_service.translation.vocabularies import Vocabularies
from outrider.law.sparse import Int32Array
from outrider.lm.engine import Engine, EngineInfo, OutOfPages, Segment, SequenceState
from outrider.lm.reduced_head import LEFT_OUT
from outrider.v1 import draft_pb2


class ReadSequence:
    """A sequence of the target's tokens, and the draft model's state of what they read as.

    Attributes:
        reading: the tokens.
        state: of a prefix of what the reading's ids were when they were last asked for.
    """

    def __init__(self, reading: Reading, state: SequenceState) -> None:
        self.reading, self.state = reading, state

    @property
    def length(self) -> int:
        """In the target's tokens."""
        return len(self.reading.tokens)

    def truncate(self, length: int) -> None:
        """As SequenceState. The draft model's state follows with the next pass."""
        if length > self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.reading.truncate(length)

    def keep(self, path: Sequence[int]) -> None:
        """Raises ValueError: what is translated are chains."""
        raise ValueError("a translated sequence holds no tree")

    def free(self) -> None:
        """As SequenceState."""
        self.state.free()


class TranslatedEngine:
    """An Engine in the target's tokens around one in the draft model's own.

    Attributes:
        inner: the draft model.
        vocabularies: its and the target's.
    """

    def __init__(self, engine: Engine, vocabularies: Vocabularies) -> None:
        self.inner, self.vocabularies = engine, vocabularies

    @property
    def info(self) -> EngineInfo:
        """The draft model, in the target's tokens."""
        return self.vocabularies.info

    def open(self, tokens: Int32Array) -> ReadSequence:
        """As Engine. What is shared with other sequences is found in own tokens."""
        reading = self.vocabularies.reading()
        reading.extend(tokens.tolist())
        state = self.inner.open(np.array(self._own(reading), np.int32))
        reading.truncate(reading.read_by(state.length))
        reading.unchanged()
        state.truncate(min(state.length, len(reading.ids)))
        return ReadSequence(reading, state)

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """As Engine, float32 rows. One pass of the draft model, and one more for every further row of a segment."""
        before = [segment.sequence.length for segment in segments]
        rows: list[list[torch.Tensor]] = [[] for _ in segments]
        try:
            for turn in range(max(max(1, segment.rows) for segment in segments)):
                taking = [index for index, segment in enumerate(segments) if turn < max(1, segment.rows)]
                outputs = self.inner.forward([self._read(segments[index], turn) for index in taking])
                for index, output in zip(taking, outputs, strict=True):
                    rows[index].append(output)
        except OutOfPages:
            for segment, length in zip(segments, before, strict=True):
                segment.sequence.truncate(min(length, segment.sequence.length))
            raise
        return [self._spread(torch.cat(parts)) for parts in rows]

    def told(self, way: TranslationWay) -> draft_pb2.TranslatedVocabulary:
        """What GetInfo says of it."""
        ways = [draft_pb2.TRANSLATION_INTERSECTION]
        ways += [] if way is TranslationWay.INTERSECTION else [draft_pb2.TRANSLATION_STRING]
        shared = self.vocabularies.shared
        return draft_pb2.TranslatedVocabulary(own_size=shared.own_size, shared_tokens=shared.spelled, ways=ways)

    def pages(self) -> tuple[int, int]:
        """The draft model's."""
        return self.inner.pages()

    def shared_pages(self) -> int:
        """The draft model's."""
        return self.inner.shared_pages()

    def _read(self, segment: Segment, turn: int) -> Segment:
        """The draft model's part of a segment: up to the first position that has a row, then one position a turn."""
        sequence = segment.sequence
        assert isinstance(sequence, ReadSequence)
        tokens, first = segment.tokens.tolist(), len(segment.tokens) - max(1, segment.rows) + 1
        sequence.reading.extend(tokens[:first] if turn == 0 else tokens[first + turn - 1 : first + turn])
        own = self._own(sequence.reading)
        # The row of the last position is wanted, whether or not the target's token has changed what is read.
        kept = min(sequence.reading.unchanged(), sequence.state.length, len(own) - 1)
        sequence.state.truncate(kept)
        return Segment(sequence.state, np.array(own[kept:], np.int32), rows=min(1, segment.rows))

    def _own(self, reading: Reading) -> list[int]:
        return reading.ids or [self.vocabularies.lonely]

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, own vocabulary] to [rows, target's vocabulary]."""
        targets, own = self._columns(rows.device)
        spread = torch.full((len(rows), self.info.vocab_size), LEFT_OUT, device=rows.device)
        return spread.index_copy_(1, targets, rows.index_select(1, own).float())

    @cache  # noqa: B019  # as long as the worker
    def _columns(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        shared = self.vocabularies.shared
        return torch.from_numpy(shared.targets).to(device), torch.from_numpy(shared.own).to(device)
