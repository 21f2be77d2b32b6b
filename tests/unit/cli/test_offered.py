"""What a draft worker offers for the proposers that a command line names."""

import pytest

from outrider.cli.options import ProposerName, offered


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model"], ("model",)),
        (["suffix", "model"], ("suffix", "model")),
        (["auto"], ("model", "suffix", "suffix_or_model")),
        (["suffix_or_model"], ("suffix_or_model", "model")),
        (["prompt_lookup", "auto", "model"], ("prompt_lookup", "model", "suffix", "suffix_or_model")),
    ],
)
def test_names_of_several_are_all_of_them(names: list[str], expected: tuple[str, ...]) -> None:
    assert offered(map(ProposerName, names)) == expected
