import numpy as np
import pytest

from outrider.law.batch import Refused, Segments, each_or_why, refuse


def test_a_rows_sum_does_not_depend_on_its_company_to_the_last_bit():
    """Not on where the row stands either, nor on how it is aligned: pairwise summation begins anew in each row."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, 400, 30) * (rng.random(30) < 0.8)
        values = rng.random(sizes.sum()) * 10.0 ** rng.integers(-9, 9, sizes.sum())
        rows = Segments.of(sizes)
        for ufunc, empty in ((np.add, 0.0), (np.minimum, np.inf), (np.maximum, -1.0)):
            together = rows.reduce(ufunc, values, empty).tolist()
            parts = np.split(values, np.cumsum(sizes)[:-1])
            assert together == [Segments.of([len(it)]).reduce(ufunc, it.copy(), empty)[0] for it in parts]


def test_rows_are_taken_apart_and_put_together():
    rows = Segments.of([2, 0, 3, 1, 0])
    assert rows.owners.tolist() == [0, 0, 2, 2, 2, 3]
    assert rows.offsets.tolist() == [0, 1, 0, 1, 2, 0]
    taken, where = rows.take(np.array([3, 1, 2, 3]))
    assert taken.sizes.tolist() == [1, 0, 3, 1]
    assert where.tolist() == [5, 2, 3, 4, 5]
    found, first = rows.first(np.array([False, True, False, True, True, False]))
    assert (found.tolist(), first.tolist()) == ([0, 2], [1, 3])
    assert len(Segments.of([]).reduce(np.add, np.empty(0), 0.0)) == 0
    assert Segments.of([0]).reduce(np.add, np.empty(0), 7.0).tolist() == [7.0]


def test_the_first_fault_of_each_block_is_told():
    with pytest.raises(Refused) as raised:
        refuse(np.array([False, True, True, False, True]), np.array([0, 0, 0, 1, 2]), lambda thing: f"thing {thing}")
    assert raised.value.blocks == {0: "thing 1", 2: "thing 4"}


def test_items_that_are_refused_are_left_out_and_the_first_failing_check_counts():
    asked = []

    def do(items):
        asked.append(list(items))
        for limit in (10, 5):
            large = np.array([item > limit for item in items])
            refuse(large, np.arange(len(items)), lambda at, limit=limit: f"{items[at]} is above {limit}")
        return [2 * item for item in items]

    assert each_or_why([1, 20, 7, 3, 11], do) == [2, "20 is above 10", "7 is above 5", 6, "11 is above 10"]
    assert asked == [[1, 20, 7, 3, 11], [1, 7, 3], [1, 3]]
    assert each_or_why([20], do) == ["20 is above 10"]
    assert each_or_why([], do) == []
