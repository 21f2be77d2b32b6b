"""What waits for a collector: how to make spans, rather than spans.

One thread makes them and sends them. While the collector does not answer it tries a little at growing intervals, and
the rest waits; what there is no room for is dropped, the oldest first.
"""

import logging
import threading
import time
from collections import deque

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from outrider.observe.tracing import Make

log = logging.getLogger(__name__)

# So much is sent before its time has come.
_ENOUGH = 64
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# An export that takes longer, at the end of a process, is not waited for.
_SLOW_SECONDS = 2.0
_LOOK_SECONDS = 0.05
# How often the log says what was dropped.
_SAY_SECONDS = 60.0


class Backlog(SpanProcessor):
    """Any thread adds to it, each call of `later` being one entry whatever it makes.

    Args:
        exporter: sends; one call at a time, from a thread of its own.
        most: entries that may wait.
        delay: seconds that they do, at most, while the collector answers.
        batch: spans of one export, more or less: an entry is not divided.
    """

    def __init__(self, exporter: SpanExporter, *, most: int, delay: float, batch: int) -> None:
        self._exporter, self._most, self._delay, self._batch = exporter, most, delay, batch
        self._waiting: deque[Make] = deque(maxlen=most)
        self._dropped = 0
        self._said_at = -_SAY_SECONDS
        # Until the next attempt, after one that failed.
        self._pause = 0.0
        self._began: float | None = None
        self._closing = False
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def later(self, make: Make) -> None:
        """Takes an entry. Never waits."""
        if len(self._waiting) == self._most:
            self._dropped += 1
        self._waiting.append(make)
        if len(self._waiting) >= _ENOUGH and not self._pause and not self._awake.is_set():
            self._awake.set()

    def on_end(self, span: ReadableSpan) -> None:
        """A span of the SDK's has ended."""
        if span.context is not None and span.context.trace_flags.sampled:
            self.later(lambda: (span,))

    def shutdown(self) -> None:
        """Nothing: `close` takes its time, and says how much."""

    def close(self, seconds: float) -> None:
        """Sends what is left, for so long and only while the collector answers; blocks."""
        ends = time.monotonic() + seconds
        self._closing = True
        self._awake.set()
        while self._thread.is_alive() and self._answers and time.monotonic() < ends:
            self._thread.join(_LOOK_SECONDS)
        self._exporter.shutdown()

    @property
    def _answers(self) -> bool:
        began = self._began
        return not self._pause and (began is None or time.monotonic() - began < _SLOW_SECONDS)

    def _run(self) -> None:
        while not self._closing:
            self._awake.wait(self._pause or self._delay)
            self._awake.clear()
            self._send_all()

    def _send_all(self) -> None:
        """Sends what waits until there is nothing or the collector fails, of which it is asked first with a little."""
        while self._waiting:
            spans = self._made(1 if self._pause else self._batch)
            if not spans:
                continue
            if not self._send(spans):
                self._pause = min(2 * self._pause or _FIRST_PAUSE, _LONGEST_PAUSE)
                break
            self._pause = 0.0
        self._say()

    def _made(self, most: int) -> list[ReadableSpan]:
        spans: list[ReadableSpan] = []
        while self._waiting and len(spans) < most:
            try:
                spans += self._waiting.popleft()()
            except Exception:
                log.exception("spans were lost")
        return spans

    def _send(self, spans: list[ReadableSpan]) -> bool:
        self._began = time.monotonic()
        try:
            return self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:
            log.exception("spans were not sent")
            return False
        finally:
            self._began = None

    def _say(self) -> None:
        now = time.monotonic()
        if self._dropped and now - self._said_at >= _SAY_SECONDS:
            dropped, self._dropped, self._said_at = self._dropped, 0, now
            log.warning("the collector takes too little: %d calls, rounds and answers are in no trace", dropped)
