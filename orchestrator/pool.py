"""The workers of one kind: who they are, and which of them a session is bound to until it fails."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

from orchestrator.choosing import CHOOSABLE, Served, Trials
from orchestrator.discovery import Discovery, Resolve, Sources
from orchestrator.hedging import HedgeBudget
from orchestrator.links.base import Link
from orchestrator.links.draft import DraftLink
from orchestrator.links.target import TargetLink
from orchestrator.placement import Placement, uneven
from orchestrator.prefix import TokenBuffer
from outrider.net.errors import OutriderError
from outrider.v1 import draft_pb2, orchestrator_pb2, types_pb2
from outrider.v1.draft_pb2 import Proposer
from outrider.v1.orchestrator_pb2 import Acceptance, PlainReason

# When a caller who found no target worker may try again.
_RETRY_SECONDS = 1.0
# A running session changes draft workers at most so often, of all sessions together.
_MOVE_SECONDS = 0.1

L = TypeVar("L", bound=Link)


class Pool(Generic[L]):
    """Links to workers that come and go.

    Attributes:
        links: one to each member.
    """

    def __init__(self) -> None:
        self.links: Sequence[L] = ()
        self._placement = Placement()
        self._discovery: Discovery | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    def follow(self, sources: Sources, make: Callable[[str], L], resolve: Resolve) -> None:
        """Begins to keep a link to each worker of the sources.

        Args:
            make: a link to an address.
            resolve: looks names up.
        """
        self._make = make
        self._discovery = Discovery(sources, self._members, resolve)
        self._discovery.start()

    async def close(self) -> None:
        """Disconnects."""
        if self._discovery is not None:
            await self._discovery.close()
        await asyncio.gather(*(link.close() for link in self.links), return_exceptions=True)
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    @property
    def usable(self) -> list[L]:
        """Links that take work."""
        return [link for link in self.links if link.usable]

    @property
    def problems(self) -> dict[str, str]:
        """What is the matter with names that are looked up, by dns:NAME:PORT."""
        return self._discovery.problems if self._discovery is not None else {}

    def _members(self, addresses: Sequence[str]) -> None:
        known = {link.address: link for link in self.links}
        self.links = [known.pop(address, None) or self._join(address) for address in addresses]
        for link in known.values():
            task = asyncio.create_task(_retired(link))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def _join(self, address: str) -> L:
        link = self._make(address)
        link.siblings = lambda: self.links
        link.start()
        return link

    def _place(self, tokens: TokenBuffer, links: Iterable[L]) -> L:
        """Which of the links, at least one, a session with these tokens goes to."""
        by_address = {link.address: link for link in links}
        loads = {address: link.load for address, link in by_address.items()}
        return by_address[self._placement.place(tokens.view(), loads)]


class TargetPool(Pool[TargetLink]):
    """The target workers."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """To be called whenever a link may have become usable or unusable."""
        self._changed.set()
        self._changed = asyncio.Event()

    def nobody(self) -> OutriderError:
        """The error of a request that finds no usable link; says what is the matter with each."""
        states = [f"{link.address}: {link.reason or 'usable'}" for link in self.links]
        states += [f"{source}: {problem}" for source, problem in self.problems.items()]
        message = f"no target worker is ready: {'; '.join(states) or 'none is known'}"
        return OutriderError(types_pb2.ERROR_REASON_NO_WORKER, message, retry_after=_RETRY_SECONDS)

    async def wait_changed(self, seconds: float) -> None:
        """Returns at the next change, or after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def acquire(self, seconds: float, tokens: TokenBuffer, tried: Collection[TargetLink] = ()) -> TargetLink:
        """The worker for a session with these tokens; waits for one.

        One that was tried already only where there is no other, and one whose breaker is open after those.

        Raises OutriderError(NO_WORKER) after `seconds`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not self.usable:
            left = deadline - loop.time()
            if left <= 0:
                raise self.nobody()
            await self.wait_changed(left)
        ranks = [((link in tried, not link.breaker.closed), link) for link in self.usable]
        best = min(rank for rank, _ in ranks)
        return self._place(tokens, [link for rank, link in ranks if rank == best])

    def others(self, tried: Collection[TargetLink]) -> bool:
        """Whether there is a worker that is well and was not tried."""
        return any(link not in tried and link.breaker.closed for link in self.usable)


class DraftPool(Pool[DraftLink]):
    """The draft workers.

    Attributes:
        hedges: how many late blocks a second worker may be asked for.
        trials: of proposers, by sessions whose requests name none.
    """

    def __init__(self, hedge_share: float = 0.0) -> None:
        super().__init__()
        self.hedges = HedgeBudget(hedge_share)
        self.trials = Trials()
        self._next_move = 0.0

    def pick(
        self, proposer: "Proposer.ValueType", tokens: TokenBuffer, present: DraftLink | None = None
    ) -> "DraftLink | PlainReason.ValueType":
        """The worker for a session with these tokens among those that offer the proposer, or why there is none.

        Workers whose breaker is open come last; the present one stays as long as it is among the best.
        """
        offering = self._offering(proposer)
        willing = [link for link in offering if link.breaker.closed] or offering
        if present is not None and present in willing:
            return present
        if willing:
            return self._place(tokens, willing)
        if any("vocabulary" in link.reason for link in self.links):
            return orchestrator_pb2.PLAIN_REASON_VOCAB_MISMATCH
        return orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE

    def offered(
        self, rule: "Acceptance.ValueType", present: DraftLink | None = None
    ) -> "dict[Proposer.ValueType, Served]":
        """The proposers of workers that are well, each with what sessions judged by the rule saw of it: at the present
        worker where that offers it, else at the one with the fewest sessions."""
        well = sorted(
            (link for link in self.usable if link.breaker.closed), key=lambda link: (link is present, -link.sessions)
        )
        return {kind: link.history[kind, rule].served for link in well for kind in link.proposers if kind in CHOOSABLE}

    def better(self, proposer: "Proposer.ValueType", present: DraftLink) -> DraftLink | None:
        """Another worker that a running session should go to: one that has far fewer sessions, or one that failed and
        is to be tried again, by one session. Few sessions are told so at a time, the others see what has changed.
        """
        now = asyncio.get_running_loop().time()
        if now < self._next_move or len(self.links) < 2:
            return None
        self._next_move = now + _MOVE_SECONDS
        others = [link for link in self._offering(proposer) if link is not present]
        ripe = next((link for link in others if link.breaker.ripe), None)
        if ripe is not None:
            return ripe
        well = [link for link in others if link.breaker.closed]
        fewest = min(well, key=lambda link: link.sessions, default=None)
        return fewest if fewest is not None and uneven(present.sessions, fewest.sessions) else None

    def spare(self, proposer: "Proposer.ValueType", present: DraftLink) -> DraftLink | None:
        """The least loaded of the other workers that are well; None without one."""
        others = [link for link in self._offering(proposer) if link is not present and link.breaker.closed]
        return min(others, key=lambda link: link.load, default=None)

    def _offering(self, proposer: "Proposer.ValueType") -> list[DraftLink]:
        return [link for link in self.usable if _offers(link, proposer)]


async def _retired(link: Link) -> None:
    try:
        await link.retire()
    finally:
        await link.close()


def _offers(link: DraftLink, proposer: "Proposer.ValueType") -> bool:
    return proposer == draft_pb2.PROPOSER_UNSPECIFIED or proposer in link.proposers
