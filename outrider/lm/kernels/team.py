"""The threads that kernels run on: those of torch's own OpenMP, so that a pass never has two sets of threads."""

import ctypes
from pathlib import Path

import llvmlite.binding
import torch

# What the kernels call by name.
_SYMBOLS = ("GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")


class Team:
    """Raises OSError or AttributeError where torch brings no GNU OpenMP."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libgomp.so.1"))
        for name in _SYMBOLS:
            llvmlite.binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, function: int, data: int) -> None:
        """Calls a compiled function in each of torch's threads, with the address of its record. Releases the GIL."""
        self._parallel(function, data, torch.get_num_threads(), 0)
