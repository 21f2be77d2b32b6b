"""The threads of a pair are measured once, in real processes over the shapes of tiny real models."""

from pathlib import Path

import pytest

from outrider.cli import placement
from outrider.cli.placement import Pair, Split, Unmeasured, placed
from outrider.cli.system import SystemOptions
from outrider.cli.threads import with_threads
from tests.harness.models import save_tiny


def pair_of(directory: Path, *architectures: str) -> Pair:
    target, draft = (save_tiny(directory / name, name) for name in architectures)
    return Pair(target, draft, 0, "float32", 2)


async def test_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(tmp_path, "llama", "qwen3")
    split, said = await placed(pair, 2, tmp_path / "cache")
    assert split in (Split(1, 1), Split(2, 1), Split(2, 2))
    assert said.startswith(f"threads: {split.target} for the target, {split.draft} for the draft")
    monkeypatch.setattr(placement, "measured", None)  # whoever measures again fails
    assert await placed(pair, 2, tmp_path / "cache") == (split, said)
    with pytest.raises(TypeError):
        await placed(pair, 3, tmp_path / "cache")


async def test_shapes_that_are_not_known_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(tmp_path, "llama", "gpt2")
    with pytest.raises(Unmeasured, match="gpt2 names its sizes in another way"):
        await placed(pair, 2, tmp_path)
    monkeypatch.setattr("outrider.cli.threads.available_cores", lambda: 2)
    options, said = await with_threads(SystemOptions(pair.target, pair.draft), measure=True)
    assert options.target_threads == options.draft_threads
    assert "not measured" in said


async def test_a_draft_that_computes_nothing_leaves_the_cores_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.threads.available_cores", lambda: 6)
    options, said = await with_threads(SystemOptions("a", "a", proposers=("prompt_lookup",)), measure=True)
    assert (options.target_threads, options.draft_threads) == (6, 1)
    assert said.startswith("threads: 6 for the target")
