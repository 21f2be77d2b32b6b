"""The picture of how drafts learned."""

import json
from pathlib import Path

import pytest

from bench.distill_curve import Learned, plot, table

SIDE = {"tokens": 30, "passes": 20, "by_position": [0.5]}


def written(directory: Path, curve: list[list[float]]) -> Path:
    directory.mkdir()
    report = {"before": SIDE, "after": SIDE | {"tokens": 50}, "curve": curve}
    (directory / "report.json").write_text(json.dumps(report))
    return directory


def test_reports_become_a_picture_and_a_table(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, [[10, 3.5], [20, 2.5]]) for name in ("one", "two")]
    drafts = [Learned.read(paths[0]), Learned.read(paths[1] / "report.json")]
    plot(drafts, tmp_path / "curve.svg")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    cells = [list(column.cells) for column in table(drafts).columns]
    assert cells == [["one", "two"], ["20"] * 2, ["2.500"] * 2, ["1.50"] * 2, ["2.50"] * 2]


def test_a_report_without_a_curve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no curve"):
        Learned.read(written(tmp_path / "old", []))
