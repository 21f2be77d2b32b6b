"""How many pages there are when nobody says."""

from pathlib import Path

import pytest
import torch

from outrider.lm import sizing
from outrider.lm.kv_storage import LayerShape
from outrider.lm.sizing import LEAST_PAGES, available_memory, choose_pages

LAYERS = [LayerShape(2, 8, 4, torch.bfloat16, None)] * 5  # 2 * 2 * 8 * 2 * 5 = 320 bytes a token: the wider counts
CPU = torch.device("cpu")


def files(directory: Path, available_kb: int, **numbers: str) -> tuple[Path, Path]:
    (directory / "meminfo").write_text(f"MemTotal:  999 kB\nMemAvailable: {available_kb} kB\nHugePages_Total: 0\n")
    for name, number in numbers.items():
        (directory / name.replace("_", ".")).write_text(number + "\n")
    return directory, directory / "meminfo"


def test_memory_is_the_machines_without_a_container(tmp_path: Path) -> None:
    assert available_memory(*files(tmp_path, 100)) == 100 * 1024
    assert available_memory(*files(tmp_path, 100, memory_max="max", memory_current="5")) == 100 * 1024


def test_memory_is_what_the_containers_limit_leaves(tmp_path: Path) -> None:
    assert available_memory(*files(tmp_path, 100, memory_max="5000", memory_current="1200")) == 3800
    assert available_memory(*files(tmp_path, 100, memory_max="5000", memory_current="6000")) == 0
    assert available_memory(*files(tmp_path, 1, memory_max="5000", memory_current="0")) == 1024


@pytest.mark.parametrize(
    ("memory", "pages"),
    [(10**9, 64 * 32), (4 * 320 * 16 * 100, 100), (4 * 320 * 16 * 100 - 1, 99), (0, LEAST_PAGES)],
)
def test_pages_follow_context_and_memory(memory: int, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: memory)
    assert choose_pages(LAYERS, 512, 16, CPU) == pages
