"""Blocks copied where there is much to copy, and drawn from the model otherwise."""

from collections.abc import Sequence

import numpy as np

from draft_service.commands import Key
from draft_service.job import Job
from draft_service.proposers.base import BlockProposer
from draft_service.proposers.suffix import SuffixProposer
from outrider.law.draft import point_mass
from outrider.lm.session_cache import SessionCache
from outrider.v1 import draft_pb2

# A copy is taken instead of the model's block when so many of its tokens are expected to be right, or half of those
# wanted where these are fewer: small models seldom get further.
ENOUGH = 2.0


class SuffixOrModel:
    """A model's proposer whose sessions are looked up in an index first. What was copied, the model reads when it is asked
    again.

    Args:
        suffix: what copies; its own sessions are not touched.
        model: whose cache holds the sessions.
    """

    def __init__(self, suffix: SuffixProposer, model: BlockProposer) -> None:
        self._suffix, self._model = suffix, model

    @property
    def cache(self) -> SessionCache[Key]:
        """The model's."""
        return self._model.cache

    @property
    def context_length(self) -> int:
        """The model's."""
        return self._model.context_length

    def pages(self) -> tuple[int, int]:
        """(0, 0): the model's own proposer tells of them."""
        return 0, 0

    def shared_pages(self) -> int:
        """0: as `pages`."""
        return 0

    def forget(self, key: Key) -> None:
        """Frees the session's index."""
        self._suffix.forget(key)

    def step(self, jobs: Sequence[Job]) -> None:
        """Finishes the jobs that there is enough to copy for; one step of the model for the others."""
        for job in jobs:
            if job.source is None:
                self._look(job)
        left = [job for job in jobs if not job.done]
        if left:
            self._model.step(left)

    def _look(self, job: Job) -> None:
        job.source = draft_pb2.PROPOSER_MODEL
        tokens = job.allowed(
            np.array(self._suffix.copied(job, min(ENOUGH, job.limit / 2)).tokens, np.int32)
        )
        if not len(tokens):
            return
        job.source = draft_pb2.PROPOSER_SUFFIX
        for token in tokens.tolist():
            if not job.done:
                job.add(token, point_mass(token))
        job.session.extend(np.array(job.tokens, np.int32))
        job.done = True
