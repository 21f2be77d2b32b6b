"""I7: what waits for a collector. For a dead one nothing is made, and it is asked ever more rarely."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from outrider.observe import backlog
from outrider.observe.backlog import Backlog
from outrider.observe.tracing import Make

SECONDS = 30.0


class Collector(SpanExporter):
    """Takes spans, unless it is told not to.

    Attributes:
        taken: names of the spans of each export.
        refused: as `taken`, of exports that failed.
        open: an export waits for it.
    """

    def __init__(self, *, works: bool = True) -> None:
        self.works = works
        self.taken: list[list[str]] = []
        self.refused: list[list[str]] = []
        self.open = threading.Event()
        self.open.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.open.wait(SECONDS)
        (self.taken if self.works else self.refused).append([span.name for span in spans])
        return SpanExportResult.SUCCESS if self.works else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.open.set()


@contextmanager
def filled(collector: Collector, *, most: int = 100, delay: float = 0.01, batch: int = 10) -> Iterator[Backlog]:
    one = Backlog(collector, most=most, delay=delay, batch=batch)
    yield one
    one.close(SECONDS)


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def spans(*names: str) -> Make:
    return lambda: [ReadableSpan(name) for name in names]


def test_what_comes_is_sent_in_its_order_and_in_batches() -> None:
    collector = Collector()
    with filled(collector, delay=3600, batch=4) as one:
        for number in range(4):
            one.later(spans(f"{number}a", f"{number}b", f"{number}c"))
        one.later(spans())
    assert collector.taken == [[f"{n}{c}" for n in pair for c in "abc"] for pair in ((0, 1), (2, 3))]


def test_much_does_not_wait_for_its_time() -> None:
    collector = Collector()
    with filled(collector, delay=3600) as one:
        for number in range(64):
            one.later(spans(str(number)))
        until(lambda: sum(map(len, collector.taken)) == 64)


def test_a_collector_that_fails_is_asked_with_one_entry_at_growing_intervals_and_gets_what_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "_FIRST_PAUSE", 0.05)
    collector, made = Collector(works=False), []

    def counted(name: str) -> Make:
        def make() -> list[ReadableSpan]:
            made.append(name)
            return [ReadableSpan(name), ReadableSpan(name)]

        return make

    with filled(collector) as one:
        began = time.monotonic()
        one.later(counted("first"))
        until(lambda: len(collector.refused) == 1)
        for number in range(80):
            one.later(counted(str(number)))
        until(lambda: len(collector.refused) == 5)
        # 0.05 + 0.1 + 0.2 + 0.4 seconds.
        assert time.monotonic() - began > 0.6
        assert made == ["first", "0", "1", "2", "3"]
        assert [len(each) for each in collector.refused] == [2] * 5
        collector.works = True
        until(lambda: sum(map(len, collector.taken)) == 2 * 76)
        assert collector.taken[0] == ["4", "4"]
        assert max(map(len, collector.taken)) == 10


def test_what_there_is_no_room_for_is_dropped_the_oldest_first_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Collector()
    collector.open.clear()
    with caplog.at_level(logging.WARNING), filled(collector, most=5, batch=1) as one:
        one.later(spans("under way"))
        until(lambda: not one._waiting)
        for number in range(20):
            one.later(spans(str(number)))
        assert len(one._waiting) == 5
        collector.open.set()
        until(lambda: "15 calls, rounds and answers are in no trace" in caplog.text)
    assert collector.taken == [["under way"], *([str(number)] for number in range(15, 20))]


def test_an_entry_that_cannot_be_made_harms_no_other_one(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    with filled(collector) as one:
        one.later(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        one.later(spans("other"))
    assert collector.taken == [["other"]]
    assert "ZeroDivisionError" in caplog.text


def test_the_end_waits_for_no_collector_that_does_not_answer() -> None:
    failing, hanging = Collector(works=False), Collector()
    hanging.open.clear()
    for collector, within in ((failing, 1.0), (hanging, 5.0)):
        one = Backlog(collector, most=10, delay=0.01, batch=10)
        one.later(spans("a"))
        until(lambda one=one: bool(one._pause or one._began))  # type: ignore[misc]
        began = time.monotonic()
        one.close(SECONDS)
        assert time.monotonic() - began < within
