"""Which split of the cores is taken and whether it is remembered, from times that are given."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.cli import placement
from outrider.cli.placement import best, placed, splits, words
from outrider.cli.split_times import Measured, Pair, Split, Times
from outrider.cli.system import SystemOptions
from outrider.cli.threads import with_threads

HALF, TARGET, BOTH = splits(4)


def test_the_splits_of_a_machine() -> None:
    assert (Split(2, 2), Split(4, 2), Split(4, 4)) == (HALF, TARGET, BOTH)
    assert splits(2) == [Split(1, 1), Split(2, 1), Split(2, 2)]
    assert splits(1) == [Split(1, 1)]


def test_the_shortest_round_wins() -> None:
    assert best({HALF: Times(0.05, 0.06), TARGET: Times(0.04, 0.06), BOTH: Times(0.03, 0.06)}) == BOTH
    assert best({HALF: Times(0.05, 0.06), TARGET: Times(0.04, 0.06), BOTH: Times(0.06, 0.06)}) == TARGET


def test_a_split_that_loses_more_when_both_are_busy_is_not_taken() -> None:
    assert best({HALF: Times(0.05, 0.06), TARGET: Times(0.04, 0.07), BOTH: Times(0.03, 0.6)}) == TARGET
    assert best({HALF: Times(0.05, 0.06), TARGET: Times(0.04, 0.6), BOTH: Times(0.03, 0.6)}) == HALF


def test_what_is_said_names_the_choice_and_the_times() -> None:
    said = words(TARGET, {HALF: Times(0.05, 0.06), TARGET: Times(0.04, 0.062)})
    assert said.startswith("threads: 4 for the target, 2 for the draft")
    assert "2+2: 50.0 ms a round, 60.0 ms both busy" in said


async def test_given_numbers_stay_and_nothing_is_measured() -> None:
    options, said = await with_threads(SystemOptions("a", "b", target_threads=3), measure=True)
    assert (options.target_threads, said) == (3, "")
    assert options.draft_threads > 0


async def test_models_without_weights_and_no_measuring_take_the_same_for_both() -> None:
    for models, measure in ((("synthetic:", "synthetic:"), True), (("a", "b"), False)):
        options, said = await with_threads(SystemOptions(*models), measure=measure)
        assert options.target_threads == options.draft_threads > 0
        assert said == ""


PAIR = Pair("a", "b", 0, "", 4)


def measuring(others: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever measures finds these times, while others take so many cores."""

    async def measured(pair: Pair, compared: Sequence[Split]) -> Measured:
        return Measured({split: Times(0.01 * split.target, 0.06) for split in compared}, others)

    monkeypatch.setattr(placement, "measured", measured)


@pytest.mark.parametrize(("others", "cores"), [(0.0, 2), (0.19, 2), (0.45, 64), (None, 2)])
async def test_what_an_idle_machine_says_is_remembered_and_so_where_nobody_knows(
    others: float | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(others, monkeypatch)
    split, said = await placed(PAIR, cores, tmp_path)
    assert "(measured once: " in said
    monkeypatch.setattr(placement, "measured", None)  # whoever measures again fails
    assert await placed(PAIR, cores, tmp_path) == (split, said)


@pytest.mark.parametrize(("others", "cores", "told"), [(0.86, 2, "0.9 of 2 cores"), (0.94, 64, "0.9 of 64 cores")])
async def test_what_a_busy_machine_says_is_taken_but_not_remembered(
    others: float, cores: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(others, monkeypatch)
    split, said = await placed(PAIR, cores, tmp_path)
    assert split == Split(cores // 2, cores // 2)
    assert f"(measured while other processes took {told}, so not remembered: " in said
    assert os.listdir(tmp_path) == []
    measuring(0.0, monkeypatch)
    assert "measured once" in (await placed(PAIR, cores, tmp_path))[1]


async def test_what_an_earlier_version_remembered_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(0.0, monkeypatch)
    with monkeypatch.context() as earlier:
        earlier.setattr(placement, "_VERSION", 1)
        await placed(PAIR, 2, tmp_path)
    await placed(PAIR, 2, tmp_path)
    assert len(os.listdir(tmp_path)) == 2
