"""The interface of what makes blocks."""

from collections.abc import Sequence
from typing import Protocol

from draft_service.commands import Key
from draft_service.job import Job
from outrider.lm.session_cache import SessionCache


class BlockProposer(Protocol):
    """Makes blocks for the sessions in its cache. Used by the engine thread alone."""

    @property
    def cache(self) -> SessionCache[Key]:
        """The proposer's sessions."""

    @property
    def context_length(self) -> int:
        """Longest sequence in tokens, draft tokens included."""

    def step(self, jobs: Sequence[Job]) -> None:
        """Moves the jobs on by at most one forward pass; those that are through are `done` or have `failed` set."""

    def pages(self) -> tuple[int, int]:
        """(used, total) KV pages."""

    def shared_pages(self) -> int:
        """KV pages that more than one session holds."""
