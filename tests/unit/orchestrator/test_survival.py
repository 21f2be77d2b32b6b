"""Survival by position: what is observed, what is believed where nothing was."""

import random
from typing import TypeVar

import pytest

from orchestrator.survival import SessionSurvival, Survival, expected_tokens

Kind = TypeVar("Kind", Survival, SessionSurvival)


def observed(survival: Kind, rates: list[float], rounds: int, asked: int, seed: int = 1) -> Kind:
    dice = random.Random(seed)
    for _ in range(rounds):
        accepted = 0
        while accepted < asked and dice.random() < rates[accepted]:
            accepted += 1
        survival.observe(asked, accepted)
    return survival


def test_rates_are_those_of_each_position_given_the_ones_before() -> None:
    rates = [0.9, 0.5, 0.8, 0.2]
    pool = observed(Survival(memory=1e6, weight=4.0), rates, 20_000, 4)
    assert pool.rates(4) == pytest.approx(rates, abs=0.02)


def test_expected_tokens_are_the_sum_of_what_survives() -> None:
    assert expected_tokens([0.5, 0.5, 0.0]) == [1.0, 1.5, 1.75, 1.75]
    alpha, longest = 0.7, 5
    closed = (1 - alpha ** (longest + 1)) / (1 - alpha)
    assert expected_tokens([alpha] * longest)[longest] == pytest.approx(closed)


def session_of(pool: Survival, rate: float, rounds: int, asked: int = 4) -> SessionSurvival:
    session = SessionSurvival(pool)
    observed(session, [rate] * 8, rounds, asked)
    return session


def test_a_young_session_is_the_pool_and_an_old_one_itself() -> None:
    pool = observed(Survival(), [0.3] * 8, 1000, 4)
    assert SessionSurvival(pool).rates(4) == pytest.approx(pool.rates(4))
    assert pool.rates(1)[0] < session_of(pool, 0.9, 3).rates(1)[0] < 0.85
    assert session_of(pool, 0.9, 300).rates(4) == pytest.approx([0.9] * 4, abs=0.1)
    assert session_of(pool, 0.02, 300).rates(2) == pytest.approx([0.02] * 2, abs=0.1)
    assert session_of(pool, 0.0, 10_000, asked=1).rates(4)[0] >= 0.0


def test_a_session_that_is_like_the_pool_is_taken_for_it() -> None:
    """Chance in so few rejections must not pass for a difference."""
    pool = observed(Survival(memory=1e6), [0.9] * 8, 10_000, 8)
    for seed in range(20):
        session = SessionSurvival(pool)
        observed(session, [0.9] * 8, 200, 8, seed)
        assert session.rates(8) == pytest.approx([0.9] * 8, abs=0.05)


def test_a_session_that_is_better_is_believed_to_be_so_beyond_what_it_tried() -> None:
    pool = observed(Survival(), [0.3] * 8, 1000, 8)
    assert session_of(pool, 0.9, 300, asked=1).rates(3)[2] > 0.8
    assert session_of(pool, 0.02, 300, asked=1).rates(3)[2] < 0.1


def test_what_was_is_forgotten() -> None:
    pool = observed(Survival(memory=50, weight=4.0), [0.9] * 4, 500, 4)
    observed(pool, [0.0] * 4, 250, 4)
    assert pool.rates(1)[0] < 0.05


def test_what_was_seen_of_positions_that_are_not_tried_any_more_is_forgotten() -> None:
    pool = observed(Survival(memory=50, weight=4), [0.9, 0.0, 0.0], 100, 3)
    assert pool.rates(3)[1] < 0.1
    observed(pool, [0.9], 500, 1)
    assert pool.rates(3) == pytest.approx([0.9] * 3, abs=0.15)


def test_a_block_that_did_not_come_counts_as_rejected() -> None:
    survival = Survival(memory=100, weight=4.0)
    for _ in range(50):
        survival.observe(4, 0)
    assert survival.rates(1)[0] < 0.05
