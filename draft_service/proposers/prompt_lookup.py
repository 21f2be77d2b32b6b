"""Blocks copied from the sequence itself: what followed the last tokens where they stood before.

The n-gram draft of "Prompt Lookup Decoding" (Saxena 2023).
"""

import numpy as np

from draft_service.job import Job
from outrider.law.sparse import Int32Array

# One equal token is hardly better than chance; beyond eight the longer match says nothing new.
MIN_MATCH, MAX_MATCH = 2, 8


def proposal(job: Job) -> Int32Array:
    """The job's block."""
    return lookup(job.session.tokens, job.limit)


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
