"""The engine thread: one hand-over per pass, loud deaths, an event loop that never waits."""

import asyncio
import threading

import pytest

from outrider.lm.engine_thread import EngineThread
from tests.harness.engines import DEADLINE
from tests.harness.workers import eventually


class Doubler:
    """Answers each number with its double, all that wait in one pass."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.may_run = threading.Event()
        self.may_run.set()
        self.sweeps = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def handle(self, commands: list[int]) -> list[int]:
        self.waiting += [number for number in commands if number >= 0]
        return [number for number in commands if number < 0]

    def step(self) -> list[int]:
        assert self.may_run.wait(DEADLINE)
        if 13 in self.waiting:
            raise RuntimeError("unlucky")
        done, self.waiting = [2 * number for number in self.waiting], []
        return done

    def sweep(self) -> None:
        self.sweeps += 1


class Harness:
    def __init__(self) -> None:
        self.doubler = Doubler()
        self.deliveries: list[list[int]] = []
        self.failures: list[BaseException] = []
        self.thread: EngineThread[int, int] = EngineThread(
            "test", lambda: self.doubler, self.deliveries.append, self.failures.append
        )


async def test_results_come_in_one_delivery_per_pass_and_those_without_a_pass_before_it() -> None:
    one = Harness()
    await one.thread.start()
    one.doubler.may_run.clear()
    one.thread.post(1)
    await eventually(lambda: one.thread.stuck_seconds() > 0)
    for number in (2, 3, -4):
        one.thread.post(number)
    one.doubler.may_run.set()
    await eventually(lambda: len(one.deliveries) == 3)
    assert one.deliveries == [[2], [-4], [4, 6]]
    assert await one.thread.stop(DEADLINE)


async def test_a_death_is_told_once_with_its_cause() -> None:
    one = Harness()
    await one.thread.start()
    one.thread.post(13)
    await eventually(lambda: one.failures)
    assert str(one.failures[0]) == "unlucky"
    assert one.thread.stuck_seconds() == 0
    assert await one.thread.stop(DEADLINE)


async def test_a_failed_build_is_raised_by_start() -> None:
    def build() -> Doubler:
        raise ValueError("no such model")

    thread: EngineThread[int, int] = EngineThread("test", build, print, print)
    with pytest.raises(ValueError, match="no such model"):
        await thread.start()
    assert await thread.stop(DEADLINE)


async def test_stop_gives_up_on_a_pass_that_hangs() -> None:
    one = Harness()
    await one.thread.start()
    one.doubler.may_run.clear()
    one.thread.post(1)
    await eventually(lambda: one.thread.stuck_seconds() > 0)
    assert not await one.thread.stop(0.05)
    one.doubler.may_run.set()
    assert await one.thread.stop(DEADLINE)


async def test_an_idle_thread_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.lm.engine_thread.SWEEP_SECONDS", 0.01)
    one = Harness()
    await one.thread.start()
    await eventually(lambda: one.doubler.sweeps >= 3)
    assert one.thread.stuck_seconds() < DEADLINE
    assert await one.thread.stop(DEADLINE)


async def test_a_closed_loop_does_not_break_the_thread() -> None:
    one = Harness()

    async def start_and_leave() -> None:
        await one.thread.start()
        one.doubler.may_run.clear()
        one.thread.post(1)
        await eventually(lambda: one.thread.stuck_seconds() > 0)

    await asyncio.to_thread(lambda: asyncio.run(start_and_leave()))
    one.doubler.may_run.set()
    await asyncio.sleep(0)
    one.thread.post(2)
    assert await one.thread.stop(DEADLINE)
    assert one.failures == []
