"""What a draft will be worth: how its greedy blocks fare on texts that the target wrote greedily.

No pass of the target is needed: a block's next token counts only when the ones before it were right, so the student may
read the target's text, and it was right where its likeliest token is the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.distill.batches import Batch, Batcher
from outrider.distill.shard import ScoredText
from outrider.distill.student import Learner

_TEXTS_AT_ONCE = 16


@dataclass(frozen=True)
class Acceptance:
    """Counts; the ratios are properties.

    Attributes:
        passes: of the target.
        tokens: that these passes gave.
        drafted: by position in the block, how often it was reached: all before it had been accepted.
        accepted: by position in the block.
        overlap: mean of sum(min(target law, draft law)) at temperature 1: the acceptance rate of the first position
            when sampling.
    """

    passes: int
    tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    overlap: float

    @property
    def tokens_per_pass(self) -> float:
        """Between 1 and lookahead + 1."""
        return self.tokens / self.passes

    @property
    def by_position(self) -> tuple[float, ...]:
        """Acceptance rate of each position that was reached."""
        return tuple(hits / max(1, tries) for hits, tries in zip(self.accepted, self.drafted, strict=True))


@torch.inference_mode()
def measure(student: Learner, batcher: Batcher, texts: Sequence[ScoredText], limit: int, lookahead: int) -> Acceptance:
    """Drafts through the last run of laws of each text (its answer), at most `limit` of its tokens."""
    drafted, accepted = np.zeros(lookahead, np.int64), np.zeros(lookahead, np.int64)
    passes = tokens = 0
    overlaps: list[float] = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        some = texts[start : start + _TEXTS_AT_ONCE]
        batch = batcher.batch(some)
        laws = [rows.float().softmax(1) for rows in student.said(batch)]
        right = np.stack([_right(law, batch) for law in laws])
        common = torch.minimum(laws[0].gather(1, batch.columns), batch.probs).sum(1).cpu().numpy()
        ends = np.cumsum([int(text.scored.sum()) for text in some])
        for text, end in zip(some, ends, strict=True):
            first = end - _answer_length(text)
            span = slice(first, min(end, first + limit))
            overlaps += common[span].tolist()
            for length in rounds_of(right[:, span], lookahead):
                passes, tokens = passes + 1, tokens + length + 1
                drafted[: min(length + 1, lookahead)] += 1
                accepted[:length] += 1
    return Acceptance(passes, tokens, tuple(drafted.tolist()), tuple(accepted.tolist()), float(np.mean(overlaps)))


def _answer_length(text: ScoredText) -> int:
    """Laws after the last gap: those of the answer, since what stands between turn and answer has none."""
    gaps = np.flatnonzero(~text.scored[:-1])
    return len(text.tokens) - 1 - (int(gaps[-1]) + 1 if len(gaps) else 0)


def _right(law: torch.Tensor, batch: Batch) -> npt.NDArray[np.bool_]:
    """[laws] whether what it says first is what the target says first."""
    same: npt.NDArray[np.bool_] = ((law.argmax(1) == batch.columns[:, 0]) & (batch.probs[:, 0] > 0)).cpu().numpy()
    return same


def rounds_of(right: npt.NDArray[np.bool_], lookahead: int) -> list[int]:
    """Accepted tokens of each round through a text; a last round that the text's end cuts short is left out.

    Args:
        right: [places, n] whether what is said of token i is right, at each place of a block, the last for all beyond.
    """
    rounds, at = [], 0
    places = np.minimum(np.arange(lookahead), len(right) - 1)
    while at + lookahead < right.shape[1]:
        wrong = np.flatnonzero(~right[places, at + np.arange(lookahead)])
        rounds.append(int(wrong[0]) if len(wrong) else lookahead)
        at += rounds[-1] + 1
    return rounds
