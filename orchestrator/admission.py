"""Which requests run, which wait a moment, and which are told when to come again.

So many generations, and so many tokens of their prompts and outputs, are let in at once. Beyond that requests wait in a
short queue for each tenant; the tenant that was served least goes first. When too much waits, the newest request of the
tenant that has most in the queue, for its weight, is refused. Nothing here is done for every token.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.config import OrchestratorConfig
from orchestrator.fairness import Shares
from orchestrator.metrics import Metrics
from orchestrator.places import Demand, Place, Tenant
from orchestrator.tenants import Caller, Tenants
from orchestrator.throughput import Throughput
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2

# A request waits only where it is expected to begin within this part of the time that it has: what is expected is a
# mean, and one that is refused at the end of its wait could have been refused at once.
_SURE = 0.75
_LEAST_RETRY, _UNKNOWN_RETRY, _LONGEST_RETRY = 0.1, 1.0, 30.0
# Tenants beyond these are forgotten when they have nothing here.
_REMEMBERED = 1024


class Admission:
    """Lives on one event loop.

    Attributes:
        sessions: generations that run.
        tokens: of the prompts and outputs of what runs.
        waiting: requests that wait.
    """

    def __init__(self, config: OrchestratorConfig, known: Tenants, metrics: Metrics) -> None:
        self._config, self._known, self._metrics = config, known, metrics
        self._tenants: dict[str, Tenant] = {}
        self._queued: dict[Tenant, None] = {}  # those that have something waiting
        self._shares = Shares()
        self._throughput = Throughput()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refilled: asyncio.TimerHandle | None = None
        self._closed: OutriderError | None = None
        self.sessions = self.tokens = self.waiting = 0
        self._prompts = 0

    @asynccontextmanager
    async def admitted(self, caller: Caller, demand: Demand) -> AsyncIterator[Place]:
        """Waits for room and holds it.

        Raises OutriderError(QUEUE_FULL) with the time after which to come again.
        """
        place = await self._enter(caller, demand)
        try:
            yield place
        finally:
            self._leave(place)

    def settle(self, place: Place, demand: Demand) -> None:
        """What a request that runs takes has become known."""
        more = demand.tokens - place.demand.tokens
        place.demand = demand
        self.tokens += more
        self._correct(place.tenant, more)
        self._dispatch()

    def close(self, reason: OutriderError) -> None:
        """Refuses what waits and what comes; what runs goes on."""
        self._closed = reason
        for tenant in list(self._queued):
            for place in list(tenant.waiting):
                self._refuse(place, reason)
        self._dispatch()

    async def wait_idle(self) -> None:
        """Returns when nothing runs."""
        await self._idle.wait()

    async def _enter(self, caller: Caller, demand: Demand) -> Place:
        if self._closed is not None:
            raise self._closed
        now = _now()
        tenant = self._tenant(caller.tenant, now)
        most = min(self._config.max_sessions, tenant.limits.max_sessions or self._config.max_sessions)
        if demand.sessions > most:
            message = f"{demand.sessions} generations were asked for at once, the limit is {most}"
            raise OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, message, retry_after=_LONGEST_RETRY)
        place = Place(tenant, demand, min(caller.deadline, now + self._config.queue_timeout))
        self._queue(place)
        self._dispatch()
        if not place.called.done():
            self._shed(place, now)
            self._dispatch()  # what was first in its queue may have been refused
            await self._wait(place)
        if place.refusal is not None:
            raise place.refusal
        return place

    async def _wait(self, place: Place) -> None:
        """Returns when the request was let in or refused."""
        try:
            await asyncio.wait({place.called}, timeout=max(0.0, place.deadline - _now()))
        except asyncio.CancelledError:
            if place.runs:
                self._leave(place)
            elif place.refusal is None:
                self._unqueue(place)
                self._dispatch()
            raise
        if not place.called.done():
            self._refuse(place, self._too_late(place.tenant))
            self._dispatch()

    def _shed(self, place: Place, now: float) -> None:
        """Refuses requests, this one or others, until what waits is no more than may."""
        tenant, patience = place.tenant, place.deadline - now
        alone = len(tenant.waiting) == 1
        if tenant.blocked_for(now) > patience or (not alone and self._expected_wait(tenant, now) > _SURE * patience):
            self._refuse(place, self._too_much(tenant, "it would have to wait too long"))
        while self.waiting > self._config.max_waiting:
            greediest = max(self._queued, key=lambda one: (len(one.waiting) / one.limits.weight, one is tenant))
            self._refuse(greediest.newest, self._too_much(greediest, f"{self.waiting - 1} requests wait"))
        while self._prompts > self._config.max_waiting_tokens:
            greediest = max(self._queued, key=lambda one: (one.prompts / one.limits.weight, one is tenant))
            self._refuse(greediest.newest, self._too_much(greediest, f"{self._prompts} tokens of prompts wait"))

    def _expected_wait(self, tenant: Tenant, now: float) -> float:
        """Seconds until the tenant's newest waiting request begins; 0 while too little is known."""
        weights = sum(one.limits.weight for one in self._queued)
        ahead = len(tenant.waiting) * weights / tenant.limits.weight
        return max(self._throughput.seconds_for(ahead, now), tenant.own_wait(now))

    def _dispatch(self) -> None:
        """Lets in what there is room for."""
        now = _now()
        while allowed := {one.name: one for one in self._queued if one.allows(one.oldest, now)}:
            place = allowed[self._shares.least(allowed)].oldest
            if not self._has_room(place.demand):
                break
            if place.deadline > now:
                self._unqueue(place)
                self._begin(place, now)
            else:
                self._refuse(place, self._too_late(place.tenant))
        self._wake_when_refilled(now)

    def _has_room(self, demand: Demand) -> bool:
        """Whether the demand fits in; any fits into an empty house."""
        if self.sessions + demand.sessions > self._config.max_sessions:
            return False
        return not self.sessions or self.tokens + demand.tokens <= self._config.max_running_tokens

    def _begin(self, place: Place, now: float) -> None:
        tenant, demand = place.tenant, place.demand
        self.sessions += demand.sessions
        tenant.sessions += demand.sessions
        self.tokens += demand.tokens
        self._shares.charge(tenant.name, demand.tokens / tenant.limits.weight)
        tenant.charge(demand.tokens, now)
        self._idle.clear()
        place.runs = True
        place.called.set_result(None)

    def _leave(self, place: Place) -> None:
        now, tenant, demand = _now(), place.tenant, place.demand
        self.sessions -= demand.sessions
        tenant.sessions -= demand.sessions
        self.tokens -= demand.tokens
        # What was not generated the tenant has not had.
        self._correct(tenant, place.generated - demand.output)
        self._metrics.served(self._known.label(tenant.name), place.generated)
        self._throughput.ended(now)
        tenant.throughput.ended(now)
        if not self.sessions:
            self._idle.set()
        self._dispatch()

    def _correct(self, tenant: Tenant, tokens: int) -> None:
        self._shares.correct(tenant.name, tokens / tenant.limits.weight)
        tenant.charge(tokens, _now())

    def _queue(self, place: Place) -> None:
        place.tenant.add(place)
        self._queued[place.tenant] = None
        self._count(place, 1)

    def _unqueue(self, place: Place) -> None:
        place.tenant.remove(place)
        if not place.tenant.waiting:
            del self._queued[place.tenant]
        self._count(place, -1)

    def _count(self, place: Place, change: int) -> None:
        now = _now()
        self.waiting += change
        self._prompts += change * place.demand.prompt
        self._throughput.waits(bool(self.waiting), now)
        place.tenant.throughput.waits(bool(place.tenant.waiting), now)

    def _refuse(self, place: Place, reason: OutriderError) -> None:
        if place.refusal is None:
            self._unqueue(place)
            place.refusal = reason
            place.called.set_result(None)

    def _too_much(self, tenant: Tenant, why: str) -> OutriderError:
        """The error of a request of the tenant."""
        self._metrics.refused(self._known.label(tenant.name))
        expected = self._expected_wait(tenant, _now()) or _UNKNOWN_RETRY
        retry_after = min(max(expected, _LEAST_RETRY), _LONGEST_RETRY)
        limits = f"the limits are {self._config.max_sessions} and {self._config.max_running_tokens}"
        message = f"{self.sessions} generations of {self.tokens} tokens run, {limits}; refused because {why}"
        return OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, message, retry_after=retry_after)

    def _too_late(self, tenant: Tenant) -> OutriderError:
        return self._too_much(tenant, "its time to wait is over")

    def _tenant(self, name: str, now: float) -> Tenant:
        if name not in self._tenants:
            if len(self._tenants) >= _REMEMBERED:
                self._tenants = {key: one for key, one in self._tenants.items() if not one.forgettable(now)}
            self._tenants[name] = Tenant(name, self._known.limits(name), now)
        return self._tenants[name]

    def _wake_when_refilled(self, now: float) -> None:
        """Comes back when a tenant that waits for nothing but its own rate may go on."""
        if self._refilled is not None:
            self._refilled.cancel()
        waits = [wait for wait in (one.blocked_for(now) for one in self._queued) if wait > 0.0]
        loop = asyncio.get_running_loop()
        self._refilled = loop.call_later(min(waits), self._dispatch) if waits else None


def _now() -> float:
    return asyncio.get_running_loop().time()
