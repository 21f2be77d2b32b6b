"""Logs: one line per record, on stderr."""

import logging

import pytest

from outrider.observe.logging import configure_logging


def test_a_record_is_one_line_also_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("info")
        log = logging.getLogger("some.part")
        log.debug("unseen")
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            log.exception("it broke\nbadly\x1b[2J\x9b1m")
    finally:
        root.handlers, root.level = handlers, level
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "ERROR some.part it broke\\nbadly\\x1b[2J\\x9b1m" in line
    assert "ValueError: first\\nsecond" in line
    assert line[:4].isdigit()
    assert line.split()[0].endswith("Z")
