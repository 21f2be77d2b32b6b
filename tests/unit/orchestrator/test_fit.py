"""The recursive fit finds coefficients, follows changes, keeps what is not measured, and ignores outliers."""

import random
from collections.abc import Sequence

import pytest

from orchestrator.fit import LinearFit

TRUE = (0.04, 0.001, 0.0002)


def feed(fit: LinearFit, true: tuple[float, ...], rounds: int, *, spread: float = 0.0, fixed: bool = False) -> None:
    dice = random.Random(3)
    for _ in range(rounds):
        items = 8 if fixed else dice.randint(1, 64)
        positions = 8 if fixed else items * dice.randint(1, 9)
        value = true[0] + true[1] * items + true[2] * positions
        fit.observe((1.0, items, positions), value * (1.0 + dice.uniform(-spread, spread)))


def at(coefficients: Sequence[float], place: tuple[float, ...]) -> float:
    return sum(value * each for value, each in zip(coefficients, place, strict=True))


def fresh() -> LinearFit:
    return LinearFit((1.0, 8.0, 32.0))


def test_it_finds_the_coefficients() -> None:
    fit = fresh()
    feed(fit, TRUE, 300, spread=0.02)
    assert fit.coefficients == pytest.approx(TRUE, rel=0.15)


def test_it_follows_a_change() -> None:
    fit = fresh()
    feed(fit, TRUE, 300, spread=0.02)
    slower = tuple(2.0 * each for each in TRUE)
    feed(fit, slower, 100, spread=0.02)
    for place in ((1, 8, 8), (1, 8, 40), (1, 64, 64), (1, 64, 320)):
        assert at(fit.coefficients, place) == pytest.approx(at(slower, place), rel=0.1)


def test_what_is_not_measured_any_more_is_kept() -> None:
    fit = fresh()
    feed(fit, TRUE, 300)
    feed(fit, TRUE, 2_000, fixed=True)
    assert fit.coefficients == pytest.approx(TRUE, rel=0.02)


def test_an_outlier_moves_little() -> None:
    fit = fresh()
    feed(fit, TRUE, 300, spread=0.02)
    before = at(fit.coefficients, (1, 8, 40))
    fit.observe((1.0, 8, 40), 5.0)
    assert at(fit.coefficients, (1, 8, 40)) == pytest.approx(before, rel=0.1)
