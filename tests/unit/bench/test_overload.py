"""What the figures of bench/overload.py come to."""

import argparse
from collections import Counter

import pytest

from bench.overload import POLITE, RUDE, Phase, report

LIMITS = {"goodput": 0.9, "share": 0.9, "refusal": 20.0, "recovery": 10.0, "memory": 64.0}


def said(capsys: pytest.CaptureFixture[str], tokens: Counter[str], **seen: object) -> list[str]:
    """The figures that miss their limits."""
    options = argparse.Namespace(**{f"{name}_limit": limit for name, limit in LIMITS.items()})
    calm = Phase(tokens=Counter({POLITE: 100}), seconds=1.0)
    loaded = Phase(
        tokens=tokens,
        refused_ms=seen.get("refused", [1.0]),
        strange=seen.get("strange", []),
        seconds=1.0,  # type: ignore[arg-type]
    )
    kept = report(options, calm, loaded, float(seen.get("recovered", 1.0)), float(seen.get("memory", 1.0)))  # type: ignore[arg-type]
    missed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line.endswith("MISSED")]
    assert kept == (not missed)
    return missed


def test_every_figure_that_misses_its_limit_is_told_and_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    halves = Counter({POLITE: 46, RUDE: 46})
    assert said(capsys, halves) == []
    assert said(capsys, Counter({POLITE: 44, RUDE: 44})) == ["goodput against before"]
    assert said(capsys, Counter({POLITE: 40, RUDE: 60})) == ["first tenant's tokens against its share"]
    assert said(capsys, halves, refused=[21.0] * 10) == ["median ms to a refusal"]
    assert said(capsys, halves, refused=[1.0] * 8 + [120.0] * 2) == ["p90 ms to a refusal"]
    assert said(capsys, halves, recovered=11.0) == ["s until served as before"]
    assert said(capsys, halves, memory=65.0) == ["MB gained"]
    assert said(capsys, halves, strange=["UNKNOWN: ?"]) == ["other ends of requests"]
