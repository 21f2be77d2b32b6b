import asyncio
from collections.abc import Callable, Sequence

import pytest

from orchestrator.turn import Turn
from outrider.net.errors import OutriderError


def doubling(calls: list[list[int]], largest: int = 100) -> Turn[int, int]:
    """Doubles numbers, except that 13 is refused and 666 breaks it; a number's size is itself."""

    def do(works: Sequence[int]) -> list[int | Exception]:
        calls.append(list(works))
        if 666 in works:
            raise ZeroDivisionError
        return [ValueError("unlucky") if work == 13 else 2 * work for work in works]

    return Turn(do, lambda work: work, largest)


async def test_what_is_asked_for_in_one_turn_is_done_in_one_call() -> None:
    calls: list[list[int]] = []
    turn = doubling(calls)
    assert await asyncio.gather(*(turn.result(work) for work in (1, 2, 3))) == [2, 4, 6]
    assert await turn.result(4) == 8
    assert calls == [[1, 2, 3], [4]]


async def test_a_refused_one_and_a_cancelled_one_harm_no_neighbour() -> None:
    calls: list[list[int]] = []
    turn = doubling(calls)
    tasks = [asyncio.create_task(turn.result(work)) for work in (1, 13, 2, 3)]
    # The tasks run before the call does.
    asyncio.get_running_loop().call_soon(tasks[2].cancel)
    one, refused, cancelled, other = await asyncio.gather(*tasks, return_exceptions=True)
    assert (one, other) == (2, 6)
    assert isinstance(refused, ValueError)
    assert isinstance(cancelled, asyncio.CancelledError)


async def test_a_call_that_fails_fails_for_all_who_wait_for_it_and_for_nobody_else() -> None:
    calls: list[list[int]] = []
    turn = doubling(calls, largest=700)
    results = await asyncio.gather(*(turn.result(work) for work in (1, 666, 100)), return_exceptions=True)
    assert [type(result) for result in results] == [ZeroDivisionError, ZeroDivisionError, int]
    assert await turn.result(5) == 10


async def test_a_call_gets_no_more_than_its_size_and_the_rest_goes_next() -> None:
    calls: list[list[int]] = []
    turn = doubling(calls, largest=10)
    assert await asyncio.gather(*(turn.result(work) for work in (4, 5, 2, 50, 1))) == [8, 10, 4, 100, 2]
    assert calls == [[4, 5], [2], [50], [1]]


async def test_close_ends_what_waits() -> None:
    calls: list[list[int]] = []
    turn = doubling(calls)
    task = asyncio.create_task(turn.result(1))
    closing: Callable[[], None] = turn.close
    asyncio.get_running_loop().call_soon(closing)
    with pytest.raises(OutriderError, match="stopped"):
        await task
    await asyncio.sleep(0)
    assert calls == []
