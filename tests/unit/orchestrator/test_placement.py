"""J1: which worker a session goes to, in virtual time and by numbers alone."""

import heapq
import random
from collections import Counter

import numpy as np
import pytest

from orchestrator.placement import (
    BOUND,
    ITEMS_PER_SESSION,
    SHORTEST_PREFIX,
    SLACK,
    Placement,
    load_of,
    prefix_keys,
    uneven,
)
from outrider.law.sparse import Int32Array

SHORT = np.arange(5, dtype=np.int32)


def prompt(dice: random.Random, shared: int, length: int) -> Int32Array:
    """Tokens of which the first `shared` are the same in all prompts."""
    own = [dice.randrange(1000) for _ in range(length - shared)]
    return np.array([*range(shared), *own], np.int32)


class Workers:
    """Sessions that come and end in virtual time."""

    def __init__(self, names: str) -> None:
        self.placement = Placement()
        self.loads: dict[str, float] = dict.fromkeys(names, 0)
        self._ends: list[tuple[float, str]] = []
        self.now = 0.0

    def arrive(self, tokens: Int32Array, seconds: float) -> str:
        while self._ends and self._ends[0][0] <= self.now:
            self.loads[heapq.heappop(self._ends)[1]] -= 1
        name = self.placement.place(tokens, self.loads)
        self.loads[name] += 1
        heapq.heappush(self._ends, (self.now + seconds, name))
        return name


def test_sessions_of_short_prompts_go_where_the_fewest_are() -> None:
    placement, loads = Placement(), {"a": 0.0, "b": 0.0, "c": 0.0}
    order = []
    for _ in range(6):
        order.append(placement.place(SHORT, loads))
        loads[order[-1]] += 1
    assert order == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("shared", [0, 256])
def test_j1_new_sessions_even_out_when_one_worker_becomes_three(shared: int) -> None:
    dice, workers = random.Random(4), Workers("a")
    for _ in range(4):
        workers.arrive(prompt(dice, shared, 300), seconds=1e9)
    workers.loads |= {"b": 0, "c": 0}
    placed: Counter[str] = Counter()
    for _ in range(300):
        workers.now += 0.1
        placed[workers.arrive(prompt(dice, shared, 300), seconds=dice.uniform(1.0, 5.0))] += 1
    assert all(0.2 <= placed[name] / 300 <= 0.45 for name in "abc"), placed
    # Those that ran before stay: nothing here moves them.
    assert workers.loads["a"] >= 4


def test_a_prompt_goes_where_its_beginning_was_read() -> None:
    dice, placement = random.Random(1), Placement()
    loads = {"a": 3.0, "b": 0.0, "c": 1.0}
    turn = prompt(dice, 0, 500)
    assert placement.place(turn, loads) == "b"
    loads["b"] += 2
    # The conversation's next turn begins with the one before; another conversation shares nothing with it.
    assert placement.place(np.concatenate([turn, turn]), loads) == "b"
    assert placement.place(prompt(dice, 0, 500), loads) == "c"


def test_the_longest_known_beginning_decides() -> None:
    placement, dice = Placement(), random.Random(2)
    system = prompt(dice, 128, 128)
    first, second = (np.concatenate([system, prompt(dice, 0, 500)]) for _ in range(2))
    assert placement.place(first, {"a": 0.0, "b": 9.0}) == "a"
    assert placement.place(second, {"a": 9.0, "b": 0.0}) == "b"
    even = {"a": 1.0, "b": 1.0}
    assert placement.place(first, even) == "a"
    assert placement.place(second, even) == "b"


def test_a_hot_prefix_does_not_overload_a_worker() -> None:
    dice, workers = random.Random(3), Workers("abc")
    for count in range(1, 121):
        workers.arrive(prompt(dice, 256, 300), seconds=1e9)
        assert max(workers.loads.values()) <= BOUND * count / 3 + SLACK + 1
    assert min(workers.loads.values()) >= 20


def test_a_worker_that_cannot_be_chosen_is_not() -> None:
    placement = Placement()
    tokens = np.arange(200, dtype=np.int32)
    first = placement.place(tokens, {"a": 0.0, "b": 0.0})
    (other,) = {"a", "b"} - {first}
    assert placement.place(tokens, {other: 0.0}) == other
    # Now it is there that the prefix was read last.
    assert placement.place(tokens, {"a": 0.0, "b": 0.0}) == other


def test_orchestrators_that_know_nothing_yet_agree_and_few_prefixes_move_when_a_worker_comes() -> None:
    dice = random.Random(5)
    prompts = [prompt(dice, 0, 100) for _ in range(300)]
    three, four = dict.fromkeys("abc", 0.0), dict.fromkeys("abcd", 0.0)
    before = [Placement().place(tokens, three) for tokens in prompts]
    assert before == [Placement().place(tokens, dict.fromkeys("cab", 0.0)) for tokens in prompts]
    after = [Placement().place(tokens, four) for tokens in prompts]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"d"}
    assert len(moved) < 120


def test_what_is_remembered_is_bounded() -> None:
    placement, dice = Placement(remembered=10), random.Random(6)
    for _ in range(50):
        placement.place(prompt(dice, 0, 600), {"a": 0.0, "b": 0.0})
    assert len(placement._holders) == 10


def test_keys_are_of_doubling_lengths_and_of_what_stands_there() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    assert [len(prefix_keys(tokens[:length])) for length in (0, 63, 64, 127, 128, 511, 512, 1000)] == [
        *(0, 0, 1, 1, 2, 3, 4, 4)
    ]
    changed = tokens.copy()
    changed[2 * SHORTEST_PREFIX] = 0
    assert [one == other for one, other in zip(prefix_keys(tokens), prefix_keys(changed), strict=True)] == [
        *(True, True, False, False)
    ]


def test_a_load_counts_others_sessions_and_a_long_queue() -> None:
    assert load_of(3, 2, 0) == 5
    assert load_of(3, 0, ITEMS_PER_SESSION - 1) == 3
    assert load_of(3, 0, 5 * ITEMS_PER_SESSION) == 8


def test_moving_sessions_ends_before_it_turns_back() -> None:
    counts = [30, 0, 0]
    moves = 0
    while uneven(max(counts), min(counts)):
        source, target = counts.index(max(counts)), counts.index(min(counts))
        counts[source] -= 1
        counts[target] += 1
        moves += 1
        assert not uneven(counts[target], counts[source])
    assert moves < 30
    assert max(counts) < 2 * min(counts) + 4
    assert not uneven(3, 0)
