"""Runs cases of a target: those that were kept, and new ones that hypothesis draws and makes small when they fail."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from hashlib import sha256
from random import Random

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.case import CORPUS, Harness, LoopThread, Target, watched

# Cases between two looks at what honest callers get.
_GOLDEN_EVERY = 50


class Fuzzed:
    """A running target.

    Attributes:
        seen: how cases ended.
        last: the case that ran last.
    """

    def __init__(self, name: str, target: Target, loop: LoopThread, harness: Harness) -> None:
        self._name, self._target, self._loop, self._harness = name, target, loop, harness
        self.seen: Counter[str] = Counter()
        self.last = b""

    def run(self, case: bytes) -> None:
        """Raises AssertionError, or whatever the case made fail."""
        self.last = case
        self.seen[self._loop(self._run(case))] += 1
        if self.seen.total() % _GOLDEN_EVERY == 0:
            self.golden()

    def golden(self) -> None:
        """Raises AssertionError when honest callers suffer."""
        self._loop(self._harness.golden())

    def replay(self) -> None:
        """Runs the seeds and what was kept."""
        for case in (*self._target.seeds(), *kept(self._name)):
            self.run(case)

    def explore(self, examples: int, number: int | None = None) -> None:
        """Runs new cases: always the same ones without a number."""

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=number is None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(st.randoms(use_true_random=False))
        def one(dice: Random) -> None:
            self.run(self._target.draw(dice))

        (one if number is None else seed(number)(one))()

    async def _run(self, case: bytes) -> str:
        async with watched(self._harness) as run:
            return await run(case)


@contextmanager
def fuzzed(name: str, target: Target) -> Iterator[Fuzzed]:
    """Starts a target's system."""
    loop = LoopThread()
    system: AbstractAsyncContextManager[Harness] = target.start()
    try:
        harness = loop(_entered(system))
        try:
            yield Fuzzed(name, target, loop, harness)
        finally:
            loop(_left(system))
    finally:
        loop.close()


def kept(name: str) -> list[bytes]:
    """The cases in the corpus."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def keep(name: str, case: bytes) -> str:
    """Puts a case into the corpus; returns its place there."""
    path = CORPUS / name / sha256(case).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(case)
    return str(path.relative_to(CORPUS))


def until(deadline: float, work: Callable[[], None]) -> None:
    """Repeats work until the time.monotonic() value has come."""
    while time.monotonic() < deadline:
        work()


async def _entered(system: AbstractAsyncContextManager[Harness]) -> Harness:
    return await system.__aenter__()


async def _left(system: AbstractAsyncContextManager[Harness]) -> None:
    await system.__aexit__(None, None, None)
