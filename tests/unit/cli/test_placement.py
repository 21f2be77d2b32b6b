"""Which split of the cores is taken, from times that are given."""

from outrider.cli.placement import Split, Times, best, splits, words
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
