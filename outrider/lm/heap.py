"""What the C library keeps of freed memory."""

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """glibc's function, or None."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows
        return None


def give_back() -> None:
    """Gives it to the system: weights that were packed and freed are as much as the model, and nothing reuses them."""
    trim = _trim()
    if trim is not None:
        trim(0)
