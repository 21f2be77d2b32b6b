"""Drafts of two kinds, measured again on the texts of their reports."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import held_out
from outrider.distill.run import distill
from tests.harness.distilling import QUICK, silent
from tests.harness.models import save_tiny


def test_what_is_measured_is_what_the_reports_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    kinds = {"layers": QUICK, "head": replace(QUICK, eagle=3, kept=40), "first": replace(QUICK, eagle=1, kept=40)}
    for name, options in kinds.items():
        distill(target, tmp_path / name, tmp_path / "work", options, silent)
        (tmp_path / "work" / "checkpoint.pt").unlink()
    flags = ["--target", target, "--work", str(tmp_path / "work"), "--report-tokens", "16", "--kept", "40"]
    monkeypatch.setattr(sys, "argv", ["held_out", *(str(tmp_path / name) for name in kinds), *flags])
    held_out.main()
    lines = capsys.readouterr().out.splitlines()
    for name in kinds:
        (line,) = [line for line in lines if f" {name} " in line]
        after = json.loads((tmp_path / name / "report.json").read_text())["after"]
        # Weights were rounded to bfloat16 since.
        assert float(line.split("│")[2]) == pytest.approx(after["tokens"] / after["passes"], rel=0.1)


def test_a_directory_of_something_else_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    monkeypatch.setattr(sys, "argv", ["held_out", str(tmp_path), "--target", target, "--work", str(tmp_path)])
    with pytest.raises(SystemExit):
        held_out.main()
    assert "holds no EAGLE head" in capsys.readouterr().err
