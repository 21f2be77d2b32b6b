"""The orchestrator's gauges: read from what lives at the moment, in the scraper's thread. What the event loop changes
meanwhile is read from copies."""

from collections import Counter

from orchestrator.admission import Admission
from orchestrator.links.base import Link
from orchestrator.pool import DraftPool, TargetPool
from orchestrator.store.metered import MeteredStore
from outrider.observe.catalogue import POOL, WORKER_STATE
from outrider.observe.instruments import Instruments, Values

_READY, _FAILING, _UNAVAILABLE = WORKER_STATE.values


def watch(
    instruments: Instruments, admission: Admission, targets: TargetPool, drafts: DraftPool, store: MeteredStore
) -> None:
    """Adds the gauges."""

    def fullness() -> dict[Values, float]:
        return {} if store.known_fullness is None else {(): store.known_fullness}

    def workers() -> dict[Values, float]:
        known: Counter[Values] = Counter()
        for kind, links in zip(POOL.values, (targets.links, drafts.links), strict=True):
            known.update({(kind, state): 0 for state in WORKER_STATE.values})
            known.update((kind, _state(link)) for link in links)
        return dict(known)

    gauge = instruments.gauge
    gauge("outrider.running_sessions", lambda: admission.sessions)
    gauge("outrider.running_tokens", lambda: admission.tokens)
    gauge("outrider.waiting_requests", lambda: admission.waiting)
    gauge("outrider.awaited_blocks", lambda: sum(link.awaited for link in drafts.links))
    gauge("outrider.verify_queue", lambda: sum(link.queued[0] for link in targets.links))
    gauge("outrider.verify_in_flight", lambda: sum(link.queued[1] for link in targets.links))
    instruments.gauges("outrider.workers", workers)
    instruments.gauges("outrider.store.fullness", fullness)


def _state(link: Link) -> str:
    if not link.usable:
        return _UNAVAILABLE
    return _READY if link.breaker.closed else _FAILING
