"""Kernels for the CPU that numba compiles, an optional extra (`outrider[cpu]`): torch's own operations are the equal.

They are for what torch is slow at: attention over pages, which torch copies first, and bfloat16 on processors without
AVX-512, for which torch has no packed product.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.lm.kernels.compiled import Kernels

# "0" or "off": torch's operations alone.
SWITCH = "OUTRIDER_KERNELS"

_log = logging.getLogger(__name__)


@cache
def kernels() -> "Kernels | None":
    """What was compiled, or None where the extra, the processor or torch's OpenMP is missing, or it is turned off."""
    if os.environ.get(SWITCH, "").lower() in {"0", "off"} or not _has_what_they_need():
        return None
    _choose_cache()
    try:
        from outrider.lm.kernels.compiled import Kernels

        return Kernels()
    except (ImportError, OSError, AttributeError, RuntimeError) as error:  # RuntimeError: no place for compiled code
        _log.warning("kernels are left out, torch computes everything: %s", error)
        return None


def _has_what_they_need() -> bool:
    if sys.platform != "linux" or importlib.util.find_spec("numba") is None:
        return False
    return platform.machine() == "aarch64" or {"avx2", "fma"} <= _flags()


def _flags() -> set[str]:
    """What the first processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def _choose_cache() -> None:
    """Compiled code lies apart for each version: numba looks at the age of one file where we have several."""
    from numba import config

    digest = hashlib.sha256(b"".join(it.read_bytes() for it in sorted(Path(__file__).parent.glob("*.py"))))
    root = os.environ.get("OUTRIDER_CACHE") or str(Path.home() / ".cache" / "outrider")
    config.CACHE_DIR = str(Path(root).expanduser() / "kernels" / digest.hexdigest()[:16])
