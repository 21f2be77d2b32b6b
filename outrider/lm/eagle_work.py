"""What an EAGLE head has to compute of a segment: which tokens have entries, what these are made of, in which order."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.law.sparse import Int32Array
from outrider.lm.branches import Branches, Int64Array, grown
from outrider.lm.eagle_sequence import EagleSequence, eagle_sequence
from outrider.lm.engine import EngineInfo, Segment
from outrider.lm.features import FeatureWindow


@dataclass(frozen=True)
class Part:
    """Entries that one pass computes: none of them is made of another's output.

    Attributes:
        sequence: whose.
        tokens: [n] int32.
        start: place of the first, counted from the sequence's first entry.
        branches: the tree that the entries hold with them; None for a chain.
        features: [m, width] of the target, of which the first m of them are made.
        follow: the places in the text whose outputs the others are made of.
    """

    sequence: EagleSequence
    tokens: Int32Array
    start: int
    branches: Branches | None
    features: torch.Tensor
    follow: list[int]

    def pages(self, page_size: int) -> Int64Array:
        """The sequence's pages up to the last of them."""
        return np.array(self.sequence.entries.pages[: -(-(self.start + len(self.tokens)) // page_size)], np.int64)


@dataclass(frozen=True)
class Work:
    """A checked segment.

    Attributes:
        sequence: whose.
        skipped: leading tokens that have no entry.
        tokens: [n] int32, the others.
        rows: how many of the last of them are wanted.
        parts: of them, in order.
        followed: the first place whose output drafted entries may be made of.
    """

    sequence: EagleSequence
    skipped: int
    tokens: Int32Array
    rows: int
    parts: list[Part]
    followed: int

    @staticmethod
    def of(segment: Segment, info: EngineInfo) -> "Work":
        """Raises ValueError."""
        sequence, tokens, fed = eagle_sequence(segment.sequence), segment.tokens, segment.fed or FeatureWindow(1)
        if not 0 <= segment.rows <= len(tokens) or not len(tokens):
            raise ValueError(f"{segment.rows} rows wanted of {len(tokens)} tokens")
        if int(tokens.min()) < 0 or int(tokens.max()) >= info.vocab_size:
            raise ValueError(f"a token is outside the vocabulary of {info.vocab_size}")
        skipped = _skipped(sequence, len(tokens), fed)
        if len(tokens) - skipped < segment.rows:
            raise ValueError("the segment is not fed")
        parts = list(_parts(segment, skipped, fed, info.context_length))
        return Work(sequence, skipped, tokens[skipped:], segment.rows, parts, fed.end)


def _skipped(sequence: EagleSequence, count: int, fed: FeatureWindow) -> int:
    """How many of the next tokens have no entry, since nothing is known of the states before them.

    Raises ValueError when there are entries before them: a gap.
    """
    missing = fed.start + 1 - sequence.length if len(fed.states) else count
    if not sequence.entries.length:
        return min(max(0, missing), count)
    if len(fed.states) and missing > 0:
        raise ValueError(f"features begin at {fed.start}, entries end before {sequence.length}")
    return 0


def _parts(segment: Segment, skipped: int, fed: FeatureWindow, context: int) -> Iterator[Part]:
    """Raises ValueError when a token follows none before it, or lies beyond the context."""
    sequence, tokens = eagle_sequence(segment.sequence), segment.tokens[skipped:]
    begin, first = sequence.begin + skipped, sequence.entries.length
    if not len(tokens):
        return
    places = np.arange(first, first + len(tokens))
    parents = places - 1 if segment.parents is None else np.asarray(segment.parents)[skipped:] - begin
    if len(parents) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens with {len(parents)} parents")
    branches = grown(sequence.entries.branches, first, parents)
    positions = begin + (places if branches is None else branches.positions_of(places))
    if positions.max() >= context:
        raise ValueError(f"{1 + positions.max()} tokens exceed the context of {context}")
    known = (positions > fed.start) & (positions <= fed.end) & bool(len(fed.states))
    for start, stop in _cuts(parents - first, known):
        given = start + int(known[start:stop].sum())
        yield Part(
            sequence,
            tokens[start:stop],
            first + start,
            None if branches is None else branches.cut(first + stop),
            fed.states[torch.from_numpy(positions[start:given] - 1 - fed.start)],
            (begin + parents[given:stop]).tolist(),
        )


def _cuts(parents: Int64Array, known: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Where parts start and stop: within one nothing is made of the output of another, and what is made of the target's
    states comes first.

    Args:
        parents: [n] what each entry follows, counted from the first of them.
        known: [n] whether the state before it is.
    """
    start = 0
    for index in range(1, len(known)):
        follows = not known[index] and parents[index] >= start
        if follows or (known[index] and not known[index - 1]):
            yield start, index
            start = index
    yield start, len(known)
