"""Instruments of the workers: raw counters; ratios are the query's work. The catalogue says what each one counts."""

from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry.metrics import MeterProvider

from outrider.lm.engine_load import EngineLoad
from outrider.observe.catalogue import ENGINE_STATE, Service
from outrider.observe.instruments import Instruments, Values


class WorkerMetrics:
    """What both workers count, under `outrider.target.*` or `outrider.draft.*`.

    Args:
        worker: "target" or "draft".
        provider: where the numbers go; None: nowhere.

    Attributes:
        instruments: to be exported.
    """

    def __init__(self, worker: Service, provider: MeterProvider | None = None) -> None:
        self.instruments = Instruments(worker, provider)
        self._prefix = f"outrider.{worker}."
        counter, histogram = self.instruments.counter, self.instruments.histogram
        self._answers = counter(self._prefix + "answers")
        self._non_finite = counter(self._prefix + "non_finite_logits")
        self._passes = counter(self._prefix + "passes")
        self._positions = counter(self._prefix + "positions")
        self._prefix_tokens = counter(self._prefix + "prefix_tokens")
        self._prefix_hits = counter(self._prefix + "prefix_hit_tokens")
        self._evictions = counter(self._prefix + "evictions")
        self._pass_time = histogram(self._prefix + "pass_time")
        self._pass_items = histogram(self._prefix + "pass_items")
        self._pass_fullness = histogram(self._prefix + "pass_fullness")
        self._queue_time = histogram(self._prefix + "queue_time")

    def watch(
        self,
        *,
        state: Callable[[], str],
        turn_age: Callable[[], float],
        load: Callable[[], EngineLoad],
        queue: Callable[[], float],
        token_budget: int,
    ) -> None:
        """Gauges of a worker, read from any thread. `turn_age` in seconds."""

        def states() -> dict[Values, float]:
            present = state()
            return {(each,): float(each == present) for each in ENGINE_STATE.values}

        self.instruments.gauges(self._prefix + "state", states)
        for name, read in (
            ("turn_age", turn_age),
            ("queue", queue),
            ("token_budget", lambda: token_budget),
            ("sessions", lambda: load().open_sessions),
            ("kv_pages_used", lambda: load().kv_pages_used),
            ("kv_pages_shared", lambda: load().kv_pages_shared),
            ("kv_pages_total", lambda: load().kv_pages_total),
        ):
            self.instruments.gauge(self._prefix + name, read)

    def answered(self, reasons: Iterable[str]) -> None:
        """Items with their reasons."""
        for reason, items in Counter(reasons).items():
            self._answers.add(items, reason)

    def waited(self, seconds: float) -> None:
        """An item's wait for its first pass."""
        self._queue_time.record(seconds)

    def non_finite(self) -> None:
        """An item whose logits held NaN, +inf or nothing finite."""
        self._non_finite.add(1)

    def passed(self, items: int, positions: int, seconds: float, budget: int) -> None:
        """A pass."""
        self._passes.add(1)
        self._positions.add(positions)
        self._pass_time.record(seconds)
        self._pass_items.record(items)
        self._pass_fullness.record(positions / budget)

    def opened(self, tokens: int, held: int) -> None:
        """State was opened for a sequence of so many tokens, of which so many were held already."""
        self._prefix_tokens.add(tokens)
        self._prefix_hits.add(held)

    def evicted(self) -> None:
        """A session that was freed without having been asked for."""
        self._evictions.add(1)


class DraftMetrics(WorkerMetrics):
    """What the draft worker counts besides."""

    def __init__(self, provider: MeterProvider | None = None) -> None:
        super().__init__("draft", provider)
        counter = self.instruments.counter
        self._blocks = counter("outrider.draft.shipped_blocks")
        self._tokens = counter("outrider.draft.shipped_tokens")
        self._ahead = counter("outrider.draft.ahead_tokens")
        self._wasted = counter("outrider.draft.ahead_wasted_tokens")
        self._reached = counter("outrider.draft.ahead_outcomes")
        self._superseded = counter("outrider.draft.superseded")
        self._matches = counter("outrider.draft.suffix_blocks")

    def shipped(self, tokens: int, proposer: str) -> None:
        """The tokens of one block."""
        self._blocks.add(1, proposer)
        self._tokens.add(tokens, proposer)

    def ahead(self, tokens: int) -> None:
        """Tokens drawn before a command asked for them."""
        self._ahead.add(tokens)

    def wasted(self, tokens: int) -> None:
        """Tokens drawn ahead that no command will ask for."""
        self._wasted.add(tokens)

    def reached(self, outcome: str) -> None:
        """A command that found its block ready, begun or, after other work ahead, missed."""
        self._reached.add(1, outcome)

    def matched(self, source: str) -> None:
        """The suffix proposer was asked for a block: what it found one in, request or history, or none."""
        self._matches.add(1, source)

    def watch_suffixes(self, *, indexed: Callable[[], float], kept: Callable[[], float]) -> None:
        """Gauges of the suffix proposer, read from any thread: tokens of sessions, and of earlier outputs."""
        self.instruments.gauge("outrider.draft.indexed_tokens", indexed)
        self.instruments.gauge("outrider.draft.history_tokens", kept)

    def superseded(self) -> None:
        """A command that a newer one, a Close or the end of its stream made void."""
        self._superseded.add(1)
