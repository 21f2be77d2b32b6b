"""What `configure_logging` changes, put back."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored_logging() -> Iterator[None]:
    """Whatever the block configures, logging is as before afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers, root.level, sys.excepthook, threading.excepthook = before
