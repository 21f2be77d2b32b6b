"""Rows over the CPUs that torch computes with: numpy alone would leave all but one of them idle."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

Result = TypeVar("Result")

# Fewer numbers than this a thread are done before another thread has woken up.
_LEAST_NUMBERS = 1 << 18


def for_rows(function: Callable[[int], Result], rows: int, numbers: int) -> list[Result]:
    """[function(0), ..., function(rows - 1)], on as many threads as torch uses where that pays.

    Args:
        function: of one row; independent of the others, and spends its time where the interpreter lock is free.
        rows: how many.
        numbers: that a row holds.
    """
    threads = min(torch.get_num_threads(), rows, rows * numbers // _LEAST_NUMBERS)
    if threads < 2:
        return [function(row) for row in range(rows)]

    def share(thread: int) -> list[Result]:
        return [function(row) for row in range(rows * thread // threads, rows * (thread + 1) // threads)]

    others = [_pool(threads).submit(share, thread) for thread in range(1, threads)]
    results = share(0)
    for other in others:
        results += other.result()
    return results


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads live as long as the process; they hold no state."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="rows")
