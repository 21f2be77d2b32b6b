"""Blocks that are copied. Needs no model: what is copied is no draw from a law, and ships a point mass."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from draft_service.commands import Key
from draft_service.job import Job
from outrider.law.draft import point_mass
from outrider.law.sparse import Int32Array
from outrider.lm.session_cache import SessionCache
from outrider.net.errors import OutriderError


class CopyingProposer:
    """Copies.

    Args:
        cache: the sessions; they hold tokens and no model state.
        context_length: as configured: nothing in here depends on it but memory.
        copied: at most `limit` tokens for a job, none where it has no proposal.
    """

    def __init__(self, cache: SessionCache[Key], context_length: int, copied: Callable[[Job], Int32Array]) -> None:
        self._cache, self._context_length, self._copied = cache, context_length, copied

    @property
    def cache(self) -> SessionCache[Key]:
        """The sessions."""
        return self._cache

    @property
    def context_length(self) -> int:
        """As configured."""
        return self._context_length

    @property
    def feeding(self) -> None:
        """Nothing."""

    def pages(self) -> tuple[int, int]:
        """(0, 0): no KV cache."""
        return 0, 0

    def shared_pages(self) -> int:
        """0: no KV cache."""
        return 0

    def step(self, jobs: Sequence[Job]) -> None:
        """Finishes every job: a whole block, or a shorter one, or an empty one."""
        for job in jobs:
            began = time.perf_counter()
            try:
                copied = job.allowed(self._copied(job))
            except OutriderError as error:
                job.failed = error
                continue
            for token in copied.tolist():
                if not job.done:
                    job.add(token, point_mass(token))
            # What of it is accepted need not be sent again.
            job.session.extend(np.array(job.tokens, np.int32))
            job.done = True
            job.forward_micros += int((time.perf_counter() - began) * 1e6)
