"""Places of requests: what each takes, and what waits and runs of each tenant."""

import asyncio
from dataclasses import dataclass, field

from orchestrator.tenants import TenantLimits, TokenBucket
from orchestrator.throughput import Throughput
from outrider.net.errors import OutriderError


@dataclass(frozen=True)
class Demand:
    """What a request takes.

    Attributes:
        sessions: generations.
        prompt: tokens of the prompt; its bytes while it is text.
        output: most tokens that are generated, in all sessions together.
    """

    sessions: int
    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        """In all."""
        return self.prompt + self.output


@dataclass(eq=False)
class Place:
    """A request's place, in the queue and then among those that run.

    Attributes:
        deadline: when it waits no longer, in the event loop's time.
        called: done when it runs or was refused.
        runs: whether it was let in.
        refusal: why it was not.
        generated: tokens of the output so far.
    """

    tenant: "Tenant"
    demand: Demand
    deadline: float
    called: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    runs: bool = False
    refusal: OutriderError | None = None
    generated: int = 0


class Tenant:
    """What one tenant has waiting and running, and what it may.

    Attributes:
        waiting: its requests that wait, oldest first.
        prompts: tokens of the prompts of these.
        tokens: of these in all.
        sessions: generations that run.
        throughput: of its own requests.
    """

    def __init__(self, name: str, limits: TenantLimits, now: float) -> None:
        self.name, self.limits = name, limits
        self.waiting: dict[Place, None] = {}
        self.prompts = self.tokens = self.sessions = 0
        self.throughput = Throughput()
        rate = limits.tokens_per_second
        self._bucket = TokenBucket(rate, limits.bucket_size, now) if rate else None

    @property
    def oldest(self) -> Place:
        """The request that goes first of those that wait."""
        return next(iter(self.waiting))

    @property
    def newest(self) -> Place:
        """The request that came last of those that wait."""
        return next(reversed(self.waiting))

    def add(self, place: Place) -> None:
        """The request waits."""
        self.waiting[place] = None
        self.prompts += place.demand.prompt
        self.tokens += place.demand.tokens

    def remove(self, place: Place) -> None:
        """The request waits no longer."""
        del self.waiting[place]
        self.prompts -= place.demand.prompt
        self.tokens -= place.demand.tokens

    def allows(self, place: Place, now: float) -> bool:
        """Whether its own limits let the request in now."""
        return self._has_room(place) and self.blocked_for(now) <= 0.0

    def blocked_for(self, now: float) -> float:
        """Seconds until its rate lets the next request in."""
        return self._bucket.empty_for(now) if self._bucket else 0.0

    def charge(self, tokens: float, now: float) -> None:
        """It took so many tokens, or gives so many back where the number is negative."""
        if self._bucket:
            self._bucket.add(-tokens, now)

    def own_wait(self, now: float) -> float:
        """Seconds until its own limits let its newest waiting request in, as far as they are known."""
        wait = self.blocked_for(now)
        if self.limits.tokens_per_second:
            wait += (self.tokens - self.newest.demand.tokens) / self.limits.tokens_per_second
        if not self._has_room(self.oldest):
            wait = max(wait, self.throughput.seconds_for(len(self.waiting), now))
        return wait

    def forgettable(self, now: float) -> bool:
        """Whether a new one would be the same."""
        return not self.waiting and not self.sessions and (self._bucket is None or self._bucket.full(now))

    def _has_room(self, place: Place) -> bool:
        most = self.limits.max_sessions
        return most is None or self.sessions + place.demand.sessions <= most
