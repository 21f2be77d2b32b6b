"""Where a worker in use holds less than the others or the settings ask for: never wrong, but slower or shorter."""

import logging

from orchestrator.links.base import Link
from orchestrator.links.draft import DraftLink
from orchestrator.links.target import TargetLink
from orchestrator.pool import DraftPool, TargetPool
from outrider.v1.orchestrator_pb2 import WorkerStatus

log = logging.getLogger(__name__)


class Shortfalls:
    """Compares the effective settings of all workers; each difference is logged when it appears.

    Args:
        max_lookahead: longest block that a request may ask for.
    """

    def __init__(self, targets: TargetPool, drafts: DraftPool, max_lookahead: int) -> None:
        self._targets, self._drafts, self._max_lookahead = targets, drafts, max_lookahead
        self._logged: set[str] = set()

    def changed(self) -> None:
        """To be called whenever a link may have become usable: logs what is new."""
        lines = {
            f"{link.kind} {link.address}: {line}"
            for link in (*self._targets.links, *self._drafts.links)
            for line in self.of(link)
        }
        for line in sorted(lines - self._logged):
            log.warning("%s", line)
        self._logged = lines

    def of(self, link: Link) -> list[str]:
        """One line for people about each shortfall of a worker; none of one that is not in use."""
        if not link.usable or link.model is None:
            return []
        models = [other.model for other in self._targets.usable if other.model is not None]
        contexts = [model.context_length for model in models]
        own, lines = link.model.context_length, []
        if isinstance(link, DraftLink) and contexts and own < min(contexts):
            lines.append(
                f"context of {own} tokens, the target has {min(contexts)}: longer sequences run without drafts"
            )
        if isinstance(link, TargetLink) and own < max(contexts):
            lines.append(f"context of {own} tokens, another target has {max(contexts)}: the shortest holds for all")
        if link.max_lookahead < self._max_lookahead:
            lines.append(f"blocks of at most {link.max_lookahead} tokens, max_lookahead is {self._max_lookahead}")
        return lines

    def statuses(self) -> list[WorkerStatus]:
        """All workers as GetInfo shows them, targets first."""
        found = []
        for kind, pool in (("target", self._targets), ("draft", self._drafts)):
            found += [self._status(link) for link in pool.links]
            found += [
                WorkerStatus(kind=kind, address=source, reason=problem) for source, problem in pool.problems.items()
            ]
        return found

    def _status(self, link: Link) -> WorkerStatus:
        failing = link.usable and not link.breaker.closed
        return WorkerStatus(
            kind=link.kind,
            address=link.address,
            usable=link.usable and not failing,
            reason="its last calls failed: it is tried now and then" if failing else link.reason,
            model_id=link.model.model_id if link.model else "",
            model=link.model,
            max_lookahead=link.max_lookahead,
            shortfalls=self.of(link),
            instance_id=link.instance_id,
            sessions=link.sessions,
            load=link.reported,
            translated=link.translated if isinstance(link, DraftLink) else None,
        )
