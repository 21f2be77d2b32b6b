"""Instruments of the workers: raw counters; ratios are the query's work.

An exporter is whatever MeterProvider the process sets; without one the instruments do nothing.
"""

from collections import Counter
from collections.abc import Iterable

from opentelemetry import metrics


class WorkerMetrics:
    """What both workers count, under `outrider.target.*` or `outrider.draft.*`.

    Args:
        worker: "target" or "draft".
        provider: where the numbers go; the process's own by default.
    """

    def __init__(self, worker: str, provider: metrics.MeterProvider | None = None) -> None:
        self._meter = metrics.get_meter(f"outrider.{worker}", meter_provider=provider)
        self._name = f"outrider.{worker}"
        self._answers = self._counter("answers", "{item}", "Items answered, by reason: OK or the error's")
        self._non_finite = self._counter("non_finite_logits", "{item}", "Items that NaN or infinite logits ended")
        self._passes = self._counter("passes", "{pass}", "Forward passes")
        self._positions = self._counter("positions", "{position}", "Positions computed in passes")
        self._evictions = self._counter("evictions", "{session}", "Sessions freed for age or for want of KV pages")

    def answered(self, reasons: Iterable[str]) -> None:
        """Items with their reasons."""
        for reason, items in Counter(reasons).items():
            self._answers.add(items, {"reason": reason})

    def non_finite(self) -> None:
        """An item whose logits held NaN, +inf or nothing finite."""
        self._non_finite.add(1)

    def passed(self, passes: int, positions: int) -> None:
        """Passes that were run, and what they computed."""
        if passes:
            self._passes.add(passes)
            self._positions.add(positions)

    def evicted(self) -> None:
        """A session that was freed without having been asked for."""
        self._evictions.add(1)

    def _counter(self, name: str, unit: str, description: str) -> metrics.Counter:
        return self._meter.create_counter(f"{self._name}.{name}", unit, description)


class DraftMetrics(WorkerMetrics):
    """What the draft worker counts besides."""

    def __init__(self, provider: metrics.MeterProvider | None = None) -> None:
        super().__init__("draft", provider)
        self._tokens = self._counter("tokens", "{token}", "Draft tokens shipped, by proposer")
        self._ahead = self._counter("ahead_tokens", "{token}", "Draft tokens drawn before a command asked for them")
        self._wasted = self._counter("ahead_wasted_tokens", "{token}", "Those of them that no command asked for")
        self._reached = self._counter(
            "ahead_outcomes", "{command}", "Commands after work ahead, by what it was for them: ready, begun or missed"
        )
        self._superseded = self._counter(
            "superseded", "{command}", "Commands given up for a newer one, a Close or a lost stream"
        )

    def shipped(self, tokens: int, proposer: str) -> None:
        """The tokens of one block."""
        self._tokens.add(tokens, {"proposer": proposer})

    def ahead(self, tokens: int) -> None:
        """Tokens drawn before a command asked for them."""
        self._ahead.add(tokens)

    def wasted(self, tokens: int) -> None:
        """Tokens drawn ahead that no command will ask for."""
        self._wasted.add(tokens)

    def reached(self, outcome: str) -> None:
        """A command that found its block ready, begun or, after other work ahead, missed."""
        self._reached.add(1, {"outcome": outcome})

    def superseded(self) -> None:
        """A command that a newer one, a Close or the end of its stream made void."""
        self._superseded.add(1)
