"""What is asked of the target and told to the worker, round by round, for a draft that looks far back."""

import numpy as np
import torch

from orchestrator.acceptance.outcome import Outcome
from orchestrator.feeding import FeatureFeed, Wanted, committed
from outrider.lm.features import Feeding
from outrider.net.arrays import features_from_message
from outrider.v1.orchestrator_pb2 import TOKEN_ORIGIN_BONUS
from outrider.v1.types_pb2 import Features

FEEDING = Feeding((1, 3), 1, window=4)


def states(start: int, end: int) -> tuple[int, torch.Tensor]:
    """Of each token its position, twice."""
    return start, torch.arange(start, end).repeat_interleave(2).view(-1, 2).bfloat16()


def said(message: Features | None) -> tuple[int, list[int]]:
    assert message is not None
    return message.start, [int(row) for row in features_from_message(message, 2)[:, 0]]


def opened(it: FeatureFeed) -> tuple[int, list[int]]:
    it.untold()
    return advanced(it)


def advanced(it: FeatureFeed) -> tuple[int, list[int]]:
    message = it.message()
    it.told()
    return said(message)


def feed() -> FeatureFeed:
    made = FeatureFeed()
    made.bind(FEEDING)
    return made


def test_a_prompt_then_round_by_round_only_what_is_new() -> None:
    it = feed()
    assert it.wanted(10) == Wanted(FEEDING, 6)
    it.take(states(6, 10))
    assert it.complete(11)
    assert opened(it) == (6, [6, 7, 8, 9])
    assert it.wanted(11) == Wanted(FEEDING, 10)
    it.take(states(10, 13))
    assert advanced(it) == (10, [10, 11, 12])
    # A worker that lost the session gets as much as it looks at.
    assert opened(it) == (9, [9, 10, 11, 12])
    it.take(states(13, 14))
    assert advanced(it) == (13, [13])


def test_a_short_prompt_is_wanted_whole() -> None:
    it = feed()
    assert it.wanted(1) == Wanted(FEEDING, 0)
    it.take(states(0, 1))
    assert opened(it) == (0, [0])


def test_nothing_is_wanted_while_it_rests_and_what_was_missed_is_computed_again() -> None:
    it = feed()
    it.take(states(6, 10))
    it.asleep()
    assert it.wanted(11) is None
    it.take(None)
    assert not it.starved
    assert not it.complete(15)
    assert it.wanted(15) == Wanted(FEEDING, 11)
    it.take(states(11, 15))
    assert it.complete(16)
    assert advanced(it) == (11, [11, 12, 13, 14])


def test_what_is_known_already_is_not_wanted_again() -> None:
    it = feed()
    it.take(states(6, 10))
    assert it.wanted(13) == Wanted(FEEDING, 10)
    it.take(states(10, 14))
    assert opened(it) == (10, [10, 11, 12, 13])
    # A session that goes back behind it.
    assert it.wanted(12) == Wanted(FEEDING, 8)


def test_what_a_worker_did_not_take_comes_again() -> None:
    it = feed()
    it.take(states(6, 10))
    assert said(it.message()) == (6, [6, 7, 8, 9])
    it.take(states(10, 12))
    assert advanced(it) == (8, [8, 9, 10, 11])
    it.take(states(12, 13))
    assert advanced(it) == (12, [12])
    # Opened without any.
    it.untold()
    it.take(states(13, 14))
    assert advanced(it) == (10, [10, 11, 12, 13])


def test_a_target_that_brings_none_starves_it() -> None:
    it = feed()
    assert it.wanted(5) is not None
    it.take(None)
    assert it.starved
    assert not it.complete(6)
    it.wanted(6)
    it.take(states(2, 6))
    assert not it.starved


def test_another_kind_of_worker_begins_anew_and_one_of_the_same_kind_does_not() -> None:
    it = feed()
    it.take(states(6, 10))
    it.bind(FEEDING)
    assert it.complete(11)
    it.bind(Feeding((2,), 1, window=1))
    assert not it.complete(11)
    assert it.wanted(11) == Wanted(Feeding((2,), 1, window=1), 10)
    it.bind(None)
    assert it.complete(11)
    assert it.wanted(11) is None
    assert it.message() is None


def test_committed_are_the_tokens_before_the_block_and_those_kept_of_it() -> None:
    start, rows = committed(states(6, 13), 10, Outcome(2, 5, TOKEN_ORIGIN_BONUS)) or (0, torch.empty(0, 2))
    assert (start, rows[:, 0].tolist()) == (6, [6, 7, 8, 9, 10, 11])
    path = Outcome(2, 5, TOKEN_ORIGIN_BONUS, (0, 2))
    start, rows = committed(states(9, 13), 10, path) or (0, torch.empty(0, 2))
    assert (start, rows[:, 0].tolist()) == (9, [9, 10, 12])
    assert committed(states(9, 11), 10, path) is None
    assert committed(None, 10, path) is None
    assert np.array_equal(path.rows, [0, 1, 3])
