"""The threads of a pair are measured once, in real processes over the shapes of tiny real models."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.cli import placement, split_times
from outrider.cli.others import Others
from outrider.cli.placement import placed
from outrider.cli.split_times import Measured, Pair, Split, Unmeasured, measured
from outrider.cli.system import SystemOptions
from outrider.cli.threads import with_threads
from tests.harness.models import save_tiny


def pair_of(directory: Path, *architectures: str) -> Pair:
    target, draft = (save_tiny(directory / name, name) for name in architectures)
    return Pair(target, draft, 0, "float32", 2)


async def test_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def on_an_idle_machine(pair: Pair, compared: Sequence[Split]) -> Measured:
        return replace(await measured(pair, compared), others=0.0)  # the machine of a test may be busy

    monkeypatch.setattr(placement, "measured", on_an_idle_machine)
    monkeypatch.setattr(split_times, "_READY_SECONDS", 240.0)
    pair = pair_of(tmp_path, "llama", "qwen3")
    split, said = await placed(pair, 2, tmp_path / "cache")
    assert split in (Split(1, 1), Split(2, 1), Split(2, 2))
    assert said.startswith(f"threads: {split.target} for the target, {split.draft} for the draft")
    monkeypatch.setattr(placement, "measured", None)  # whoever measures again fails
    assert await placed(pair, 2, tmp_path / "cache") == (split, said)
    with pytest.raises(TypeError):
        await placed(pair, 3, tmp_path / "cache")


async def test_beside_others_that_work_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours: list[float] = []

    class Counting(Others):
        """Notes how many CPU seconds were ours, but for this process'."""

        def __init__(self, *pids: int) -> None:
            super().__init__(*pids)
            self.began, self.everybody = time.monotonic(), Others()

        def cores(self) -> float | None:
            others = super().cores()
            cores = (self.everybody.cores() or 0.0) - (others or 0.0)
            ours.append(cores * (time.monotonic() - self.began))
            return others

    monkeypatch.setattr(split_times, "Others", Counting)
    monkeypatch.setattr(split_times, "_READY_SECONDS", 240.0)
    monkeypatch.setattr(split_times, "_ROUNDS", sys.maxsize)
    monkeypatch.setattr(split_times, "_SECONDS", 0.2)  # of each way and split: some hundred ticks in all
    pair = pair_of(tmp_path, "llama", "qwen3")
    loops = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(2)]
    try:
        split, said = await placed(pair, 2, tmp_path / "cache")
    finally:
        for loop in loops:
            loop.kill()
            await loop.wait()
    if ours == [0.0]:
        pytest.skip("the kernel does not count here")
    assert ours[0] > 0.1  # the two that stand in for models
    assert split in (Split(1, 1), Split(2, 1), Split(2, 2))
    assert "measured while other processes took" in said
    assert not (tmp_path / "cache").exists()


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
