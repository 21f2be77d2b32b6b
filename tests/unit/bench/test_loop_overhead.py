"""What the script prints last, and when it fails: medians of pairs, each against its goal."""

import pytest

from bench.loop_overhead import judged
from outrider.bench.report import CellReport, Report
from outrider.bench.runner import Cell, Run
from outrider.bench.services import LOOP, PLAIN, SPECULATIVE
from outrider.bench.summary import summarised
from tests.harness.counting_way import Counting
from tests.unit.bench.test_page import a_report
from tests.unit.bench.test_summary import PROMPTS, sample


def cells(concurrency: int, **speeds: list[float]) -> list[CellReport]:
    """Runs of three tokens at such speeds."""

    def cell(name: str, values: list[float]) -> Cell:
        return Cell(PROMPTS, concurrency, Counting(name), [Run(3 / it, (sample((1, 2, 3)),)) for it in values])

    return summarised([cell(name, values) for name, values in speeds.items()], {}, repeatable=True)


def report() -> Report:
    one = cells(1, **{SPECULATIVE: [9.0, 18.0, 20.0], LOOP: [10.0, 10.0, 40.0], PLAIN: [5.0, 5.0, 5.0]})
    many = cells(16, **{SPECULATIVE: [90.0, 90.0, 90.0], PLAIN: [5.0, 5.0, 5.0]})
    return a_report().model_copy(update={"cells": one + many})


@pytest.mark.parametrize(
    ("loop_goal", "many_goal", "missed"),
    [(0.9, 5.0, []), (0.91, 5.0, ["services / bare loop"]), (0.91, 5.1, ["services / bare loop", "16 sessions"])],
)
def test_goals(loop_goal: float, many_goal: float, missed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(report(), 16, loop_goal, many_goal) == (not missed)
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "services / bare loop: 0.900" in first
    assert "16 sessions / 1 session: 5.000" in second
    found = [line.removeprefix("MISSED: ") for line in (first, second) if line.startswith("MISSED: ")]
    assert len(found) == len(missed)
    assert all(line.startswith(name) for line, name in zip(found, missed, strict=True))
