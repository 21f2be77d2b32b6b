"""Logs: one line per record, on stderr."""

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from types import TracebackType

from opentelemetry import trace

_PLAIN = frozenset("\t")

_uncaught = logging.getLogger("uncaught")


def _visible(letter: str) -> str:
    return letter if letter.isprintable() or letter in _PLAIN else letter.encode("unicode_escape").decode()


class _OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO target_service.service message`; line breaks, also of tracebacks, are escaped, and
    so is what else a terminal or a reader of lines would obey, or nobody sees: peers choose some of the words."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if line.isprintable() else "".join(map(_visible, line))


class _Json(logging.Formatter):
    """`{"ts": ..., "level": ..., "logger": ..., "message": ...}` in ASCII; with `exception` where there is one,
    `trace_id` and `span_id` of the span that the record was made in, and the `session_id` that the record carries."""

    def format(self, record: logging.LogRecord) -> str:
        ts = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        entry = {"ts": f"{ts}Z", "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            entry |= {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}
        session_id = getattr(record, "session_id", None)
        if session_id is not None:
            entry["session_id"] = str(session_id)
        return json.dumps(entry)


def configure_logging(level: str, log_format: str = "text") -> None:
    """Sends records of `level` ("debug", "info", "warning", "error") and above to stderr, and nowhere else.

    In the format "json" also what would else be printed there: warnings, and exceptions that nobody caught.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _uncaught.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)
