"""Copied where there is much to copy, drawn from the model otherwise: decided for each block, before its first step."""

import numpy as np

from draft_service.job import Job
from draft_service.proposers.suffix import SuffixProposer
from outrider.law.draft import point_mass
from outrider.v1 import draft_pb2

# A copy takes the place of the model's block when so many of its tokens are expected to be right, or half of those
# wanted where these are fewer: a small model seldom gets further.
ENOUGH = 2.0


def decide(job: Job, suffix: SuffixProposer) -> None:
    """Finishes the job with a copy, or leaves it to the model, which reads what was copied when it is asked again."""
    job.source = draft_pb2.PROPOSER_MODEL
    copied = suffix.copied(job, min(ENOUGH, job.limit / 2))
    tokens = job.allowed(np.array(copied.tokens, np.int32))
    if not len(tokens):
        return
    job.source = draft_pb2.PROPOSER_SUFFIX
    for token in tokens.tolist():
        if not job.done:
            job.add(token, point_mass(token))
    job.session.extend(np.array(job.tokens, np.int32))
    job.done = True
