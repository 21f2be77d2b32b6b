"""Weighted fairness: whoever was served least goes first (start-time fair queueing)."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

# Tenants that are ahead of the others are remembered; beyond this many names the rest is forgotten.
_REMEMBERED = 1024


class Shares:
    """What each tenant was served, divided by its weight.

    A tenant without work falls behind by nothing: when it has some again it begins where the one that was served last
    stood, not with what it left to others.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._now = 0.0

    def least(self, tenants: Iterable[str]) -> str:
        """The tenant that is to be served next; the first among equals."""
        return min(tenants, key=self._at)

    def charge(self, tenant: str, amount: float) -> None:
        """The tenant was served so much per weight."""
        self._now = self._at(tenant)
        self._served[tenant] = self._now + amount
        if len(self._served) > _REMEMBERED:
            self._served = {name: served for name, served in self._served.items() if served > self._now}

    def correct(self, tenant: str, amount: float) -> None:
        """What the tenant was charged for came to so much more per weight, or less where it is negative."""
        self._served[tenant] = self._served.get(tenant, self._now) + amount

    def _at(self, tenant: str) -> float:
        return max(self._served.get(tenant, 0.0), self._now)


class Claim(Protocol):
    """Something that a tenant waits for."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def price(self) -> float:
        """What it costs, divided by the tenant's weight."""


SomeClaim = TypeVar("SomeClaim", bound=Claim)


def in_turn(claims: Iterable[SomeClaim], shares: Shares) -> Iterator[SomeClaim]:
    """The claims, each tenant's in order, the least served tenant's first.

    A claim is charged when the next one is asked for: the last one that was given is not.
    """
    queues: dict[str, deque[SomeClaim]] = {}
    for claim in claims:
        queues.setdefault(claim.tenant, deque()).append(claim)
    while queues:
        tenant = shares.least(queues)
        claim = queues[tenant].popleft()
        if not queues[tenant]:
            del queues[tenant]
        yield claim
        shares.charge(tenant, claim.price)
