"""Prediction: the longest match of the output's last tokens decides, the nearest to the diagonal among equals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.proposers.prediction import MAX_MATCH, MIN_MATCH, expected
from tests.harness.workers import int32


@pytest.mark.parametrize(
    ("output", "prediction", "count", "copied"),
    [
        ([], [1, 2, 3], 2, [1, 2]),
        ([1], [1, 2, 3], 2, [2, 3]),
        ([1, 2], [1, 2, 3], 5, [3]),
        ([1, 2, 3], [1, 2, 3], 5, []),
        ([9], [1, 2, 3], 5, []),
        # One equal token is chance; the second brings the output back.
        ([1, 2, 9, 3], [1, 2, 3, 4, 5], 2, []),
        ([1, 2, 9, 3, 4], [1, 2, 3, 4, 5], 2, [5]),
        # A repeated phrase: the occurrence where the output stands.
        ([7, 8, 1, 7, 8], [7, 8, 1, 7, 8, 2, 7, 8, 3], 1, [2]),
        # Equally long matches: the nearer one.
        ([1, 1, 1, 0, 0], [0, 0, 2, 0, 0, 1], 1, [1]),
        ([0, 0], [0, 0, 2, 0, 0, 1], 1, [2]),
        # A longer match beats a nearer one.
        ([5, 1, 2], [0, 1, 2, 3, 5, 1, 2, 4], 1, [4]),
        ([1, 2], [], 3, []),
        ([], [1, 2], 0, []),
    ],
)
def test_examples(output: list[int], prediction: list[int], count: int, copied: list[int]) -> None:
    assert expected(int32(output), int32(prediction), count).tolist() == copied


def naive(output: list[int], prediction: list[int], count: int) -> list[int]:
    if not output:
        return prediction[:count]
    best, where = (0, 0), 0
    for stop in range(1, len(prediction) + 1):
        matched = 0
        while matched < min(MAX_MATCH, stop, len(output)) and prediction[stop - 1 - matched] == output[-1 - matched]:
            matched += 1
        if (matched, -abs(stop - len(output))) > best or not where:
            best, where = (matched, -abs(stop - len(output))), stop
    return prediction[where : where + count] if best[0] >= min(MIN_MATCH, len(output)) else []


@given(
    st.lists(st.integers(0, 2), max_size=50), st.lists(st.integers(0, 2), min_size=1, max_size=50), st.integers(0, 8)
)
def test_equals_the_definition(output: list[int], prediction: list[int], count: int) -> None:
    assert expected(int32(output), int32(prediction), count).tolist() == naive(output, prediction, count)
