"""Stop strings, found whatever the pieces in which the text comes."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.text.stopping import StopMatcher


def search(text: str, strings: tuple[str, ...]) -> tuple[int, str] | None:
    """The definition: the first end of any string; of those with that end the longest."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            return end, max(found, key=len)
    return None


def begun(text: str, strings: tuple[str, ...]) -> int:
    """Characters at the end of the text that begin one of the strings."""
    return max(n for s in strings for n in range(len(s)) if text.endswith(s[:n]))


def cut_at(text: str, cuts: list[int]) -> list[str]:
    points = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(points)]


TEXTS = st.text("abc", max_size=24)
STRINGS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)


@given(text=TEXTS, strings=STRINGS, cuts=st.lists(st.integers(0, 99), max_size=8))
@settings(max_examples=1000, deadline=None)
def test_any_text_in_any_pieces(text: str, strings: tuple[str, ...], cuts: list[int]) -> None:
    matcher = StopMatcher(strings)
    fed = 0
    for piece in cut_at(text, cuts):
        match = matcher.fork().feed(piece)
        assert matcher.feed(piece) == match, "a fork sees the same"
        if match is not None:
            assert search(text, strings) == (fed + match.end, match.string)
            return
        fed += len(piece)
        assert matcher.held == begun(text[:fed], strings)
    assert search(text, strings) is None


@pytest.mark.parametrize(
    ("text", "strings", "match"),
    [
        ("aaab", ("aab",), ("aab", 4)),
        ("abcd", ("abcd", "bc"), ("bc", 3)),
        ("xabc", ("c", "abc", "bc"), ("abc", 4)),
        ("한글 끝", ("끝",), ("끝", 4)),
        ("a\U0001f600b", ("\U0001f600",), ("\U0001f600", 2)),
        ("Abc", ("abc",), None),
    ],
)
def test_examples(text: str, strings: tuple[str, ...], match: tuple[str, int] | None) -> None:
    assert StopMatcher(strings).feed(text) == match


def test_without_strings_nothing_is_held() -> None:
    matcher = StopMatcher(())
    assert matcher.feed("text") is None
    assert matcher.held == 0
