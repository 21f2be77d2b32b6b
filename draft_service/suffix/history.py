"""Earlier outputs, each tenant's by itself: what one tenant was told is never drafted for another."""

import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from draft_service.commands import Tenant
from draft_service.suffix.index import SuffixIndex
from outrider.law.sparse import Int32Array

_PARTING = np.array([-1], np.int32)
# What is left of an index that had grown too large: forgetting a little at a time would cost as much each time.
_LEFT = 0.75


class History:
    """Outputs of one tenant, the newest up to a limit.

    Args:
        limit: tokens kept at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begins: list[int] = []
        self._seeds: list[int] = []
        self.index = SuffixIndex()
        self.used_at = 0.0

    def add(self, output: Int32Array, seed: int) -> None:
        """Keeps an output, the end of one that is too long; of those before it the oldest go where there is no room."""
        output = output[-(self._limit - 1) :]
        if len(self.index) + len(output) >= self._limit:
            self._forget(max(0, int(self._limit * _LEFT) - len(output)))
        self._begins.append(len(self.index))
        self._seeds.append(seed)
        self.index.extend(np.concatenate([output, _PARTING]))

    def seed_at(self, place: int) -> int:
        """Of the session whose output it is."""
        return self._seeds[bisect_right(self._begins, place) - 1]

    def _forget(self, left: int) -> None:
        """Keeps whole outputs alone, as many of the newest as have no more than so many tokens."""
        first = next((i for i, begin in enumerate(self._begins) if len(self.index) - begin <= left), len(self._begins))
        start = self._begins[first] if first < len(self._begins) else len(self.index)
        kept, self.index = array("i", self.index.tokens[start:]), SuffixIndex()
        self.index.extend(np.array(kept, np.int32))
        self._begins = [begin - start for begin in self._begins[first:]]
        del self._seeds[:first]


class Histories:
    """Those of all tenants; the least recently used goes where there are too many, and whoever was away for too long.

    Attributes:
        tokens: kept, of all.

    Args:
        limit: tokens kept of each; 0: nothing is kept.
        tenants: kept at most.
        ttl: seconds without use after which a tenant's outputs are forgotten.
        now: monotonic seconds.
    """

    def __init__(self, limit: int, tenants: int, ttl: float, now: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._tenants, self._ttl, self._now = limit, tenants, ttl, now
        self._histories: OrderedDict[Tenant, History] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._histories)

    def add(self, tenant: Tenant, output: Int32Array, seed: int) -> None:
        """Keeps an output for later sessions of its tenant, where anything is kept."""
        if not self._limit or not len(output):
            return
        if tenant not in self._histories and len(self._histories) >= self._tenants:
            self._forget_oldest()
        history = self._histories.setdefault(tenant, History(self._limit))
        before = len(history.index)
        history.add(output, seed)
        self.tokens += len(history.index) - before
        self._used(tenant, history)

    def of(self, tenant: Tenant) -> History | None:
        """The tenant's own; None where nothing is kept."""
        history = self._histories.get(tenant)
        if history is not None:
            self._used(tenant, history)
        return history

    def sweep(self) -> None:
        """Forgets tenants past their time-to-live."""
        deadline = self._now() - self._ttl
        while self._histories and next(iter(self._histories.values())).used_at < deadline:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, history = self._histories.popitem(last=False)
        self.tokens -= len(history.index)

    def _used(self, tenant: Tenant, history: History) -> None:
        history.used_at = self._now()
        self._histories.move_to_end(tenant)
