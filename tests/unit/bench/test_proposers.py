"""What `bench.proposers` starts."""

from pathlib import Path

from bench.proposers import parsed, system_of


def test_heads_that_are_named_are_offered_and_measured_once(tmp_path: Path) -> None:
    options = parsed(["--smoke", "--proposers", "model", "eagle", "auto", "--eagle", "head", "--early-exit", "exit"])
    assert options.proposers == ["model", "eagle", "auto", "early_exit"]
    system = system_of(options, str(tmp_path))
    assert system.proposers == ("model", "eagle", "early_exit")
    assert (system.eagle, system.early_exit, system.medusa) == ("head", "exit", "")
