"""Injects faults one after the other, and notes what clients saw of each."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from bench.chaos.clients import Crowd
from bench.chaos.faults import Fault, duration
from bench.chaos.fleet import Fleet

# What a client must have got after a fault for it to be over.
_TOKENS_AFTER = 5
_STALLED_SECONDS = 120.0
_BETWEEN = (0.1, 0.6)
_LONG_SHARE = 0.03


@dataclass
class Record:
    """What clients saw of one kind of fault.

    Attributes:
        pauses: the longest pause of any client around each fault, in seconds.
        lasted: how long each fault itself lasted, in seconds.
    """

    pauses: list[float] = field(default_factory=list)
    lasted: list[float] = field(default_factory=list)

    @property
    def beyond(self) -> list[float]:
        """What of each pause was longer than the fault itself: the recovery."""
        return [max(0.0, pause - lasted) for pause, lasted in zip(self.pauses, self.lasted, strict=True)]


class Injector:
    """One fault at a time; what was killed comes back in the background, while others follow.

    Attributes:
        records: by name of the fault.
        injected: how many.
    """

    def __init__(self, fleet: Fleet, crowd: Crowd, rng: Random) -> None:
        self.records: dict[str, Record] = defaultdict(Record)
        self.injected = 0
        self._fleet, self._crowd, self._rng = fleet, crowd, rng

    async def inject(self, fault: Fault, *, long: float = 0.0) -> None:
        """One fault, at a random moment; returns when every client goes on. Raises Stalled when one does not."""
        await asyncio.sleep(self._rng.uniform(*_BETWEEN))
        self._crowd.watch()
        began = time.monotonic()
        await fault.inject(self._fleet, self._rng, duration(self._rng, long=long))
        lasted = time.monotonic() - began
        went_on = await self._crowd.until_all_went_on(_TOKENS_AFTER, _STALLED_SECONDS)
        record = self.records[fault.name]
        record.pauses.append(self._crowd.longest_pause)
        record.lasted.append(lasted)
        self.injected += 1
        if not went_on:
            raise Stalled(f"{fault.name}: a client got no token for {_STALLED_SECONDS:g} s")

    async def run(self, faults: Sequence[Fault], *, seconds: float, most: int, tell: Callable[[str], None]) -> None:
        """Faults of all kinds in random order, until the time is over or there were so many."""
        ends = time.monotonic() + seconds
        deck = _deck(faults, self._rng)
        waiting: list[Fault] = []
        while time.monotonic() < ends and self.injected < most:
            fault = next((each for each in waiting if self._possible(each)), None)
            if fault is not None:
                waiting.remove(fault)
            elif len(waiting) >= len(faults) // 2:  # let the machine come up with restarting
                await asyncio.sleep(0.1)
                continue
            else:
                fault = next(deck)
                if not self._possible(fault):
                    waiting.append(fault)
                    continue
            tell(fault.name)
            await self.inject(fault, long=_LONG_SHARE)

    def _possible(self, fault: Fault) -> bool:
        """Whether all that it may hit is there: the others must be able to go on."""
        return all(part.whole for role in fault.roles for part in self._fleet.of(role))


class Stalled(Exception):
    """A client did not go on; the message is one line."""


def _deck(faults: Sequence[Fault], rng: Random) -> Iterator[Fault]:
    """First every fault once, then as often as their shares say."""
    yield from rng.sample(faults, len(faults))
    shares = [fault.share for fault in faults]
    while True:
        yield from rng.sample(faults, sum(shares), counts=shares)
