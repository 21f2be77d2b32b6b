"""Which worker a session is bound to: the usable one with the fewest sessions, kept until it fails."""

import asyncio
from collections.abc import Sequence

from orchestrator.links.draft import DraftLink
from orchestrator.links.target import TargetLink
from outrider.net.errors import OutriderError
from outrider.v1 import draft_pb2, orchestrator_pb2, types_pb2
from outrider.v1.draft_pb2 import Proposer
from outrider.v1.orchestrator_pb2 import PlainReason

# When a caller who found no target worker may try again.
_RETRY_SECONDS = 1.0


class TargetPool:
    """The target workers."""

    def __init__(self) -> None:
        self.links: Sequence[TargetLink] = ()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """To be called whenever a link may have become usable or unusable."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def usable(self) -> list[TargetLink]:
        """Links that take work."""
        return [link for link in self.links if link.usable]

    def nobody(self) -> OutriderError:
        """The error of a request that finds no usable link; says what is the matter with each."""
        states = "; ".join(f"{link.address}: {link.reason or 'usable'}" for link in self.links) or "none configured"
        message = f"no target worker is ready: {states}"
        return OutriderError(types_pb2.ERROR_REASON_NO_WORKER, message, retry_after=_RETRY_SECONDS)

    async def wait_changed(self, seconds: float) -> None:
        """Returns at the next change, or after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def acquire(self, seconds: float, avoid: TargetLink | None = None) -> TargetLink:
        """The usable worker with the fewest sessions, another than `avoid` where there is one; waits for one.

        Raises OutriderError(NO_WORKER) after `seconds`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self.usable:
            left = deadline - loop.time()
            if left <= 0:
                raise self.nobody()
            await self.wait_changed(left)
        return min(self.usable, key=lambda link: (link is avoid, link.sessions))


class DraftPool:
    """The draft workers."""

    def __init__(self) -> None:
        self.links: Sequence[DraftLink] = ()

    def pick(
        self, proposer: "Proposer.ValueType", present: DraftLink | None = None
    ) -> "DraftLink | PlainReason.ValueType":
        """The usable worker with the fewest sessions that offers the proposer, or why there is none.

        Workers whose breaker is open come last; among equals the present one stays.
        """
        offering = [link for link in self.links if link.usable and _offers(link, proposer)]
        willing = [link for link in offering if link.breaker.closed] or offering
        if willing:
            return min(willing, key=lambda link: (link is not present, link.sessions))
        if any("vocabulary" in link.reason for link in self.links):
            return orchestrator_pb2.PLAIN_REASON_VOCAB_MISMATCH
        return orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE


def _offers(link: DraftLink, proposer: "Proposer.ValueType") -> bool:
    return proposer == draft_pb2.PROPOSER_UNSPECIFIED or proposer in link.proposers
