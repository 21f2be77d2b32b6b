"""Who runs when, how many at once, and that a failure ends the run."""

import pytest

from outrider.bench.prompts import Prompt, PromptSet
from outrider.bench.runner import Cell, Plan, cells_of, measure
from outrider.cli.run import Failure
from tests.harness.counting_way import Counting

PROMPTS = PromptSet("set", (Prompt(prompt="a"), Prompt(prompt="b"), Prompt(prompt="c")))


def plan(*levels: int, requests: int = 0, repeats: int = 3) -> Plan:
    return Plan([PROMPTS], levels, repeats, requests, max_tokens=20)


async def test_ways_take_turns_after_a_warm_up() -> None:
    ways = [Counting("a"), Counting("b")]
    order: list[tuple[str, int]] = []
    groups, declined = cells_of(ways, plan(2))
    await measure(groups, plan(2), lambda cell, turn: order.append((cell.way.name, turn)))
    assert not declined
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    for way in ways:
        assert way.most == 2
        assert [tokens for _, tokens in way.asked] == [8] * 3 + [20] * 9
        assert sorted(index for index, _ in way.asked) == sorted([0, 1, 2] * 4)
    assert all(run.tokens == 60 for cell in groups[0] for run in cell.runs)


@pytest.mark.parametrize(("level", "requests", "expected"), [(1, 0, 3), (5, 0, 5), (2, 7, 7), (4, 1, 1)])
async def test_number_of_requests(level: int, requests: int, expected: int) -> None:
    way = Counting("a")
    ((cell,),), _ = cells_of([way], plan(level, requests=requests))
    await measure([[cell]], plan(level, requests=requests, repeats=1), lambda cell, turn: None)
    assert len(cell.runs[0].samples) == expected
    assert way.most == min(level, expected)
    assert [index for index, _ in way.asked[:expected]] == [index % 3 for index in range(expected)]


def test_what_is_declined_is_told_and_the_rest_is_measured() -> None:
    ways = [Counting("a"), Counting("b", reason="one at a time")]
    groups, declined = cells_of(ways, plan(1, 4))
    assert [[cell.way.name for cell in group] for group in groups] == [["a", "b"], ["a"]]
    assert declined == [(PROMPTS, 4, ways[1], "one at a time")]


async def test_a_failure_ends_the_run_and_leaves_nothing_under_way() -> None:
    way = Counting("a", fails_at=5)
    with pytest.raises(Failure, match="no more"):
        await measure([[Cell(PROMPTS, 3, way)]], plan(3), lambda cell, turn: None)
    assert way.under_way == 0
