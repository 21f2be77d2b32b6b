"""What can happen to the system: kinds of faults, each with a name for the table."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

from bench.chaos.fleet import DRAFTS, GRACE, ORCHESTRATOR, PAIRS, STORE, TARGETS, Fleet
from bench.chaos.part import Overran, Part

# gRPC notices a silent peer after 15 s; a few faults are longer than that.
SHORT, LONG = (0.3, 2.5), (16.0, 20.0)
# What a process takes to end beyond its grace: flushing streams, ending sessions in the store and at the workers.
ENDING = 11.0
_SLACK = 30.0


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: "target killed".
        roles: kinds of parts of which all must be whole when it begins.
        inject: does it, and returns when the fault itself is over, though its consequences may not be. Gets how long
            faults that last are to last, in seconds.
        share: how often it comes, beside the others.
    """

    name: str
    roles: tuple[str, ...]
    inject: Callable[[Fleet, Random, float], Awaitable[None]]
    share: int = 4


def duration(rng: Random, *, long: float = 0.0) -> float:
    """Seconds that a fault lasts; the longer kind with probability `long`."""
    return rng.uniform(*(LONG if rng.random() < long else SHORT))


def _killed(role: str) -> Fault:
    async def inject(fleet: Fleet, rng: Random, seconds: float) -> None:
        part = _victim(fleet, role, rng)
        await part.kill()
        fleet.restart(part)

    return Fault(f"{role} killed", (role,), inject)


def _store_killed() -> Fault:
    async def inject(fleet: Fleet, rng: Random, seconds: float) -> None:
        (store,) = fleet.of(STORE)
        await store.kill()
        await asyncio.sleep(seconds / 4)
        await fleet.start(store)

    return Fault(f"{STORE} killed", (STORE,), inject)


def _frozen(role: str) -> Fault:
    async def inject(fleet: Fleet, rng: Random, seconds: float) -> None:
        part = _victim(fleet, role, rng)
        part.freeze()
        try:
            await asyncio.sleep(seconds)
        finally:
            part.thaw()

    return Fault(f"{role} frozen", (role,), inject)


def _drained(role: str) -> Fault:
    """One step of a rolling restart."""

    async def inject(fleet: Fleet, rng: Random, seconds: float) -> None:
        part = _victim(fleet, role, rng)
        try:
            await part.drain(GRACE + ENDING + _SLACK)
        except Overran as overran:
            fleet.trouble.append(str(overran))
        fleet.restart(part)

    return Fault(f"{role} drained", (role,), inject)


def _all_killed(role: str) -> Fault:
    """Nobody is left, until they are back."""

    async def inject(fleet: Fleet, rng: Random, seconds: float) -> None:
        await asyncio.gather(*(part.kill() for part in fleet.of(role)))
        await asyncio.gather(*(fleet.start(part) for part in fleet.of(role)))

    return Fault(f"every {role} killed", (role,), inject, share=1)


def _two_at_once(faults: Sequence[Fault]) -> Fault:
    """Two faults of different kinds of parts."""

    async def inject(fleet: Fleet, rng: Random, seconds: float) -> None:
        first = rng.choice(faults)
        second = rng.choice([fault for fault in faults if not set(fault.roles) & set(first.roles)])
        await asyncio.gather(*(fault.inject(fleet, rng, seconds) for fault in (first, second)))

    return Fault("two at once", tuple(dict.fromkeys(role for fault in faults for role in fault.roles)), inject)


def _reset(user: str, used: str) -> Fault:
    async def inject(fleet: Fleet, rng: Random, seconds: float) -> None:
        rng.choice(await fleet.between(user, used)).reset()

    return Fault(f"{user}-{used} reset", (), inject)


def _silent(user: str, used: str) -> Fault:
    async def inject(fleet: Fleet, rng: Random, seconds: float) -> None:
        proxy = rng.choice(await fleet.between(user, used))
        proxy.cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            proxy.mend()

    return Fault(f"{user}-{used} silent", (), inject)


def _victim(fleet: Fleet, role: str, rng: Random) -> Part:
    return rng.choice(fleet.of(role))


_SINGLE: tuple[Fault, ...] = (
    *(make(role) for role in (DRAFTS, TARGETS, ORCHESTRATOR) for make in (_killed, _frozen, _drained)),
    _store_killed(),
    _frozen(STORE),
    *(make(*pair) for pair in PAIRS for make in (_reset, _silent)),
)
# A new kind is a line here: the soak injects it, and the table's test has a row of it. A store that fails over to a
# replica would be one more.
FAULTS: tuple[Fault, ...] = (
    *_SINGLE,
    *(_all_killed(role) for role in (DRAFTS, TARGETS, ORCHESTRATOR)),
    _two_at_once(_SINGLE),
)
