"""Blocks copied from what stood after the last tokens before: in the request, or in earlier outputs of its tenant."""

import numpy as np

from draft_service.commands import Key
from draft_service.job import Job
from draft_service.proposers.copying import CopyingProposer
from draft_service.suffix.continuing import Copied, Place, continued
from draft_service.suffix.history import Histories, History
from draft_service.suffix.index import MAX_MATCH, SuffixIndex
from draft_service.suffix.indexes import SessionIndexes
from outrider.law.sparse import Int32Array
from outrider.lm.session_cache import SessionCache
from outrider.observe.metrics import DraftMetrics

NOTHING = Copied([], 0.0)


class SuffixProposer(CopyingProposer):
    """Copies with the help of an index: what a token costs does not grow with the text.

    Args:
        histories: earlier outputs.
        most_tokens: of sessions that are indexed at once.
    """

    def __init__(
        self,
        cache: SessionCache[Key],
        context_length: int,
        histories: Histories,
        most_tokens: int,
        metrics: DraftMetrics,
    ) -> None:
        super().__init__(cache, context_length, self.proposal)
        self._histories, self._metrics = histories, metrics
        self.indexes = SessionIndexes(most_tokens)

    def forget(self, key: Key) -> None:
        """Frees the session's index."""
        self.indexes.forget(key)

    def proposal(self, job: Job) -> Int32Array:
        """The job's block; without a token wanted, the index is made."""
        return np.array(self.copied(job).tokens, np.int32)

    def copied(self, job: Job, least: float = 0.0) -> Copied:
        """The same, with what is expected of it; nothing where that is less than `least`."""
        index = self.indexes.of(job.session)
        if not job.limit:
            return NOTHING
        own = [Place(index.tokens, at + 1, matched) for matched, at in _found(index, index, len(index) - 1)]
        history = self._histories.of(job.law.tenant)
        earlier = _earlier(job, index, history) if history is not None else []
        block = continued([*own, *earlier], index.tokens, job.limit)
        block = block if block.expected >= least else NOTHING
        if not job.guess:
            self._metrics.matched(_source(own, earlier) if block.tokens else "none")
        return block


def _earlier(job: Job, index: SuffixIndex, history: History) -> list[Place]:
    """Places in earlier outputs.

    Not in those of the same seed, where the draft's law matters: they tell of the noise that this round will be judged
    by, and a proposal must not know that. Where the target's own tokens decide, it is of no use to know.
    """
    found = _found(index, history.index, len(history.index))
    if not job.law.by_token:
        found = [(matched, at) for matched, at in found if history.seed_at(at) != job.law.seed]
    return [Place(history.index.tokens, at + 1, matched) for matched, at in found]


def _found(text: SuffixIndex, index: SuffixIndex, end: int) -> list[tuple[int, int]]:
    return index.find(text.tokens[-MAX_MATCH:], end)


def _source(own: list[Place], earlier: list[Place]) -> str:
    """What the longest match was found in."""
    longest = max((place.matched for place in own), default=0)
    return "history" if any(place.matched > longest for place in earlier) else "request"
