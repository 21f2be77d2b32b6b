"""What is printed: a line for each finding and a summary, or JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from outrider import __version__
from outrider.cli.doctor.findings import Finding, Level

_SIGNS = {
    Level.ok: ("✓", "green"),
    Level.warning: ("!", "yellow"),
    Level.broken: ("✗", "bold red"),
    Level.unseen: ("–", "dim"),
}


def show(console: Console, findings: Iterable[Finding]) -> None:
    """A line for each; what to do stands below it."""
    for each in findings:
        sign, style = _SIGNS[each.level]
        console.print(Text.assemble((sign, style), f" {each.subject}  {each.check}: {each.seen}"), soft_wrap=True)
        if each.advice:
            console.print(Text(f"    → {each.advice}"), soft_wrap=True)


def summary(findings: Sequence[Finding]) -> str:
    """One line."""
    counts = _counts(findings)
    words = f"{len(findings)} checks: {counts[Level.ok]} well, {counts[Level.warning]} warnings, "
    return words + f"{counts[Level.broken]} broken, {counts[Level.unseen]} not seen from here"


def as_json(findings: Sequence[Finding], *, healthy: bool) -> str:
    """For machines: `healthy` is what the exit code says."""
    counts = {level.value: count for level, count in _counts(findings).items()}
    checks = [asdict(each) for each in findings]
    return json.dumps({"version": __version__, "healthy": healthy, "counts": counts, "checks": checks}, indent=2)


def healthy(findings: Iterable[Finding], *, strict: bool) -> bool:
    """Whether nothing is broken, and with `strict` nothing warned of."""
    bad = {Level.broken, Level.warning} if strict else {Level.broken}
    return not any(each.level in bad for each in findings)


def _counts(findings: Iterable[Finding]) -> dict[Level, int]:
    counted = Counter(each.level for each in findings)
    return {level: counted[level] for level in Level}
