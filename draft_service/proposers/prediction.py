"""Blocks copied from the text that the client expects, from where the output has got to in it."""

import numpy as np

from draft_service.job import Job
from outrider.law.sparse import Int32Array

# One equal token is hardly better than chance; beyond these a longer match says nothing new.
MIN_MATCH, MAX_MATCH = 2, 32


def proposal(job: Job) -> Int32Array:
    """The job's block."""
    return expected(job.session.tokens[job.law.params.prompt_length :], job.law.prediction, job.limit)


def expected(output: Int32Array, prediction: Int32Array, count: int) -> Int32Array:
    """What follows the longest match of the last tokens in the prediction; among equals where the output would be if it
    had kept to the prediction, or nearest to there.

    Args:
        output: [n] what was generated.
        prediction: [m] what the client expects to be generated.
        count: how many tokens to copy.

    Returns at most `count` int32: the beginning of the prediction when nothing was generated yet, nothing when fewer
    than MIN_MATCH last tokens (or all, when there are fewer) stand anywhere in it, or at its end.
    """
    if not len(output):
        return prediction[:count]
    ends = np.flatnonzero(prediction == output[-1])
    matched = 1
    while len(ends) and matched < min(MAX_MATCH, len(output)):
        longer = ends[ends >= matched]
        longer = longer[prediction[longer - matched] == output[-1 - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if not len(ends) or matched < min(MIN_MATCH, len(output)):
        return np.empty(0, np.int32)
    nearest = ends[np.argmin(np.abs(ends - (len(output) - 1)))]
    return prediction[nearest + 1 : nearest + 1 + count]
