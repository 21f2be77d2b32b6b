"""Prompt lookup: the longest match of the last tokens decides, the latest among equals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.proposers.prompt_lookup import MAX_MATCH, MIN_MATCH, lookup
from tests.harness.workers import int32


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]),
        ([1, 2, 3, 9, 2, 5, 1, 2], 2, [3, 9]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),
        ([0, 1, 2, 3, 5, 1, 2, 4, 0, 1, 2], 1, [3]),
        ([1, 2, 3], 3, []),
        ([1, 2, 9, 2], 3, []),
        ([7], 3, []),
        ([7, 7, 7], 4, [7, 7, 7, 7]),
        ([1, 2, 3, 4, 1, 2], 0, []),
    ],
)
def test_examples(tokens: list[int], count: int, expected: list[int]) -> None:
    assert lookup(int32(tokens), count).tolist() == expected


def naive(tokens: list[int], count: int) -> list[int]:
    best, end = 0, -1
    for stop in range(1, len(tokens)):
        matched = 0
        while matched < min(MAX_MATCH, stop) and tokens[stop - 1 - matched] == tokens[-1 - matched]:
            matched += 1
        if matched >= best:
            best, end = matched, stop
    if best < MIN_MATCH:
        return []
    extended = list(tokens)
    for index in range(count):
        extended.append(extended[end + index])
    return extended[len(tokens) :]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 8))
def test_equals_the_definition(tokens: list[int], count: int) -> None:
    assert lookup(int32(tokens), count).tolist() == naive(tokens, count)
