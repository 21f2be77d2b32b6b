"""Logs: one line per record, on stderr."""

import logging
import sys
import time

_CONTROLS = (*range(32), *range(127, 160))
_ESCAPED = {code: f"\\x{code:02x}" for code in _CONTROLS if code != ord("\t")} | {10: "\\n", 13: "\\r"}


class _OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO target_service.service message`; line breaks, also of tracebacks, are escaped, and
    so is what else a terminal would obey: peers choose some of the words."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_ESCAPED)


def configure_logging(level: str) -> None:
    """Sends records of `level` ("debug", "info", "warning", "error") and above to stderr, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
