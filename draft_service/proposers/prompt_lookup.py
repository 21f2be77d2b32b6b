"""Blocks copied from the sequence itself: what followed the last tokens where they stood before. Needs no model.

The n-gram draft of "Prompt Lookup Decoding" (Saxena 2023). The proposal is no draw from a law: it ships a point mass.
"""

from collections.abc import Sequence

import numpy as np

from draft_service.commands import Key
from draft_service.job import Job
from outrider.law.draft import point_mass
from outrider.law.sparse import Int32Array
from outrider.lm.session_cache import SessionCache
from outrider.net.errors import OutriderError

# One equal token is hardly better than chance; beyond eight the longer match says nothing new.
MIN_MATCH, MAX_MATCH = 2, 8


class PromptLookupProposer:
    """Copies.

    Args:
        cache: the sessions; they hold tokens and no model state.
    """

    def __init__(self, cache: SessionCache[Key], context_length: int) -> None:
        self._cache, self._context_length = cache, context_length

    @property
    def cache(self) -> SessionCache[Key]:
        """The sessions."""
        return self._cache

    @property
    def context_length(self) -> int:
        """As configured: nothing in here depends on it but memory."""
        return self._context_length

    def pages(self) -> tuple[int, int]:
        """(0, 0): no KV cache."""
        return 0, 0

    def step(self, jobs: Sequence[Job]) -> None:
        """Finishes every job: a whole block, or an empty one where nothing stood before."""
        for job in jobs:
            try:
                copied = job.allowed(lookup(job.session.tokens, job.limit))
            except OutriderError as error:
                job.failed = error
                continue
            for token in copied.tolist():
                if not job.done:
                    job.add(token, point_mass(token))
            job.done = True


def lookup(tokens: Int32Array, count: int) -> Int32Array:
    """What followed the longest match of the last tokens, the latest match among equals.

    Args:
        tokens: [n] the sequence.
        count: how many tokens to copy.

    Returns [count] int32, or [0] when fewer than MIN_MATCH last tokens stood anywhere before. A copy that reaches the
    end of the sequence goes on with what it copied: a sequence that repeats itself is continued for ever.
    """
    # Indices of the last token of each match.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    matched = 1
    while matched < MAX_MATCH:
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[-1 - matched]] if matched < len(tokens) else longer[:0]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if matched < MIN_MATCH or not len(ends):
        return np.empty(0, np.int32)
    follow = tokens[int(ends[-1]) + 1 :]
    return np.resize(follow, count)
