"""The measurement: every way, in alternating order, over prompt sets and concurrencies."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from outrider.bench.prompts import PromptSet
from outrider.bench.sample import Sample, Way

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        sets: what is asked.
        concurrencies: how many requests are under way at once, one level after the other.
        repeats: runs of each cell.
        requests: of each run; 0 asks every prompt of the set once, and at least one for each place.
        max_tokens: of each answer.
    """

    sets: Sequence[PromptSet]
    concurrencies: Sequence[int]
    repeats: int
    requests: int
    max_tokens: int

    def requests_of(self, prompts: PromptSet, concurrency: int) -> int:
        """How many requests one run makes."""
        return self.requests or max(len(prompts.prompts), concurrency)


@dataclass(frozen=True)
class Run:
    """One repetition of a cell.

    Attributes:
        seconds: from the first request to the end of the last answer.
        samples: the answers, in no order.
    """

    seconds: float
    samples: tuple[Sample, ...]

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def tokens_per_second(self) -> float:
        """Of all answers together."""
        return self.tokens / self.seconds


@dataclass
class Cell:
    """One way of answering one prompt set at one concurrency: its runs, in order."""

    prompts: PromptSet
    concurrency: int
    way: Way
    runs: list[Run] = field(default_factory=list)


Declined = tuple[PromptSet, int, Way, str]
# Called before each run, with the cell and the number of the repetition; 0 is the warm-up.
OnRun = Callable[[Cell, int], None]


def cells_of(ways: Sequence[Way], plan: Plan) -> tuple[list[list[Cell]], list[Declined]]:
    """The cells that stand beside each other, and what is not measured with the reason."""
    groups, declined = [], []
    for prompts in plan.sets:
        for concurrency in plan.concurrencies:
            reasons = [(way, way.declines(prompts, concurrency)) for way in ways]
            groups.append([Cell(prompts, concurrency, way) for way, reason in reasons if not reason])
            declined += [(prompts, concurrency, way, reason) for way, reason in reasons if reason]
    return groups, declined


async def measure(groups: Sequence[Sequence[Cell]], plan: Plan, on_run: OnRun) -> None:
    """Runs all cells. Within a group the ways take turns, and another one goes first in each repetition.

    Every cell first has a run of a few tokens that does not count: caches, allocators and kernels are warm.
    """
    for cells in groups:
        for cell in cells:
            on_run(cell, 0)
            await _run(cell, plan, min(_WARM_UP_TOKENS, plan.max_tokens))
        for turn in range(plan.repeats):
            first = turn % len(cells)
            for cell in (*cells[first:], *cells[:first]):
                on_run(cell, turn + 1)
                cell.runs.append(await _run(cell, plan, plan.max_tokens))


async def _run(cell: Cell, plan: Plan, max_tokens: int) -> Run:
    """A closed loop: each place asks its next prompt as soon as it has the answer to the one before."""
    count = plan.requests_of(cell.prompts, cell.concurrency)
    indices = islice(cycle(range(len(cell.prompts.prompts))), count)
    samples: list[Sample] = []

    async def place() -> None:
        for index in indices:
            samples.append(await cell.way.answer(cell.prompts, index, max_tokens))

    began = time.perf_counter()
    await _together([place() for _ in range(min(cell.concurrency, count))])
    return Run(time.perf_counter() - began, tuple(samples))


async def _together(works: Sequence[Awaitable[None]]) -> None:
    """Waits for all. The first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
