"""Logs: one line per record, on stderr."""

import json
import logging
import sys
import threading

import pytest
from opentelemetry.sdk.trace import TracerProvider

from outrider.observe.logging import configure_logging
from tests.harness.logs import restored_logging


def test_a_record_is_one_line_also_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with restored_logging():
        configure_logging("info")
        log = logging.getLogger("some.part")
        log.debug("unseen")
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            log.exception("it broke\nbadly\x1b[2J\x9b1m\u2028\u202e\u200b\ud800 é 中")
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "ERROR some.part it broke\\nbadly\\x1b[2J\\x9b1m\\u2028\\u202e\\u200b\\ud800 é 中" in line
    assert "ValueError: first\\nsecond" in line
    assert line[:4].isdigit()
    assert line.split()[0].endswith("Z")


def test_a_json_record_is_one_line_that_says_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    provider = TracerProvider()
    log = logging.getLogger("some.part")
    with restored_logging():
        configure_logging("info", "json")
        with provider.get_tracer("test").start_as_current_span("a span") as span:
            log.warning("of %s", 'a "peer"\n{"level": "forged"}\x1b\u2028\ud800', extra={"session_id": "one\ntwo"})
        log.info("outside")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    context = span.get_span_context()
    assert first.pop("ts").endswith("Z")
    assert first == {
        "level": "WARNING",
        "logger": "some.part",
        "message": 'of a "peer"\n{"level": "forged"}\x1b\u2028\ud800',
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "session_id": "one\ntwo",
    }
    assert second.keys() == {"ts", "level", "logger", "message"}


def test_exceptions_are_json_also_where_nobody_caught_them(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("first\nsecond")

    with restored_logging():
        configure_logging("info", "json")
        try:
            fail()
        except ValueError as error:
            logging.getLogger("some.part").exception("it broke")
            sys.excepthook(ValueError, error, error.__traceback__)
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        logging.getLogger("py.warnings").warning("be warned")
    caught, uncaught, of_thread, warning = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (caught["message"], uncaught["message"]) == ("it broke", "ValueError: first\nsecond")
    for entry in (caught, uncaught, of_thread):
        assert entry["exception"].startswith("Traceback")
        assert entry["exception"].endswith("ValueError: first\nsecond")
    assert uncaught["level"] == of_thread["level"] == "CRITICAL"
    assert "be warned" in warning["message"]
