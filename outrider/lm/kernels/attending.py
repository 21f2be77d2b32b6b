"""Attention over pages where they lie.

A row's keys are cut into chunks at fixed positions, each is weighed by itself, and they are merged in order: what a row
becomes depends on its own sequence alone, not on the batch, on the threads or on the rows beside it.
"""

import math
from typing import Any

import numpy as np
from numba import carray, njit, types

from outrider.lm.kernels.products import FLOAT, blend, products
from outrider.lm.kernels.records import CHUNK, UNIT
from outrider.lm.kernels.vectors import exponentials, highest, number, pointer, put, rounded, size_of, whole

_LOWEST = np.float32(-np.inf)
_NOTHING = np.float32(0)
# Between the scores of two rows: a chunk, and what is read beyond it.
_SCORES = 4 * (CHUNK + 8)

barrier = types.ExternalFunction("GOMP_barrier", types.void())


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def attend(kind: Any, job: Any, keys: int, window: int, thread: int, threads: int) -> None:
    """A thread's part of one attention; all threads of the team call it. Ends without a barrier."""
    units = carray(pointer(job.units), (job.unit_count,), UNIT)
    scratch = job.scratch + thread * job.scratch_size
    chunks = job.chunks if job.split != 0 else 1
    for item in range(thread, job.unit_count * chunks * job.kv_heads, threads):
        head, rest = item % job.kv_heads, item // job.kv_heads
        chunk, unit = rest % chunks, units[rest // chunks]
        first, end = chunk_range(unit, window)
        if job.split != 0:
            if first <= chunk < end:
                attend_chunk(
                    kind, job, keys, window, unit, head, chunk, scratch, partial(job, rest // chunks, head, chunk)
                )
        else:
            total = scratch + 4 * job.most * (job.dim + CHUNK + 8)
            part = total + 4 * job.most * (job.dim + 2)
            begin(job, unit, total)
            for at in range(first, end):
                attend_chunk(kind, job, keys, window, unit, head, at, scratch, part)
                merge(job, unit, total, part)
            finish(kind, job, unit, head, total)
    if job.split != 0:
        barrier()
        for item in range(thread, job.unit_count * job.kv_heads, threads):
            head, unit = item % job.kv_heads, units[item // job.kv_heads]
            total = scratch + 4 * job.most * (job.dim + CHUNK + 8)
            begin(job, unit, total)
            first, end = chunk_range(unit, window)
            for at in range(first, end):
                merge(job, unit, total, partial(job, item // job.kv_heads, head, at))
            finish(kind, job, unit, head, total)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def partial(job: Any, unit: int, head: int, chunk: int) -> int:
    """Where a chunk's part is kept."""
    at: int = job.partial + 4 * ((unit * job.kv_heads + head) * job.chunks + chunk) * job.most * (job.dim + 2)
    return at


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def chunk_range(unit: Any, window: int) -> tuple[int, int]:
    """The chunks that a unit sees something of."""
    first = max(0, unit.start + 1 - window) // CHUNK if window != 0 else 0
    return first, (unit.start + unit.rows + CHUNK - 1) // CHUNK


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def attend_chunk(
    kind: Any, job: Any, keys: int, window: int, unit: Any, head: int, chunk: int, scratch: int, part: int
) -> None:
    """What a chunk gives a unit: part [rows, dim + 2], the weighed values, the top score and the weights' sum."""
    group, dim, high = job.group, job.dim, unit.rows * job.group
    start = chunk * CHUNK
    end = min(start + CHUNK, unit.start + unit.rows)
    first = max(start, unit.start + 1 - window) if window != 0 else start
    scores = scratch + 4 * high * dim
    for row in range(high):
        at = job.query + (unit.row + row // group) * job.query_stride + (head * group + row % group) * dim * 4
        for column in range(dim):
            put(FLOAT, scratch, row * dim + column, number(at, column))
    stride = dim * size_of(kind)
    key = first
    while key < end:
        slot = whole(unit.pages, key // job.page_size) * job.page_size + key % job.page_size
        count = min(job.page_size - key % job.page_size, end - key)
        address = keys + (head * job.slots + slot) * stride
        products(kind, address, stride, count, scratch, dim * 4, high, dim, scores + 4 * (key - start), _SCORES)
        key += count
    for row in range(high):
        weigh_row(job, window, unit, row, start, first, end, scores + row * _SCORES, part + 4 * row * (dim + 2))
    key = first
    while key < end:
        slot = whole(unit.pages, key // job.page_size) * job.page_size + key % job.page_size
        count = min(job.page_size - key % job.page_size, end - key)
        address = keys + ((job.kv_heads + head) * job.slots + slot) * stride
        blend(kind, scores + 4 * (key - start), _SCORES, high, address, stride, count, part, 4 * (dim + 2), dim)
        key += count


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def weigh_row(
    job: Any, window: int, unit: Any, row: int, start: int, first: int, end: int, scores: int, part: int
) -> None:
    """Makes weights of a row's scores, of which it sees some, and an empty part."""
    position = unit.start + row // job.group
    seen = max(first, position + 1 - window) if window != 0 else first
    unseen = min(end, position + 1)
    top, total = _LOWEST, _NOTHING
    if seen < unseen:
        for key in range(unseen, unseen + 8):
            put(FLOAT, scores, key - start, _LOWEST)
        count = (unseen - seen + 7) // 8 * 8
        top = highest(scores + 4 * (seen - start), count)
        for key in range(unseen, seen + count):  # exp stops above 0
            put(FLOAT, scores, key - start, _LOWEST)
        total = exponentials(scores + 4 * (seen - start), count, top, job.scale)
    for key in range(first, min(seen, end)):
        put(FLOAT, scores, key - start, _NOTHING)
    for key in range(max(unseen, first), end):
        put(FLOAT, scores, key - start, _NOTHING)
    for column in range(job.dim):
        put(FLOAT, part, column, _NOTHING)
    put(FLOAT, part, job.dim, top)
    put(FLOAT, part, job.dim + 1, total)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def begin(job: Any, unit: Any, total: int) -> None:
    """An empty sum of parts."""
    for row in range(unit.rows * job.group):
        at = row * (job.dim + 2)
        for column in range(job.dim):
            put(FLOAT, total, at + column, _NOTHING)
        put(FLOAT, total, at + job.dim, _LOWEST)
        put(FLOAT, total, at + job.dim + 1, _NOTHING)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def merge(job: Any, unit: Any, total: int, part: int) -> None:
    """Adds a chunk's part to the sum."""
    dim = job.dim
    for row in range(unit.rows * job.group):
        at = row * (dim + 2)
        top, more = number(total, at + dim), number(part, at + dim)
        weights, added = number(total, at + dim + 1), number(part, at + dim + 1)
        if added == 0:  # sees nothing of the chunk
            continue
        both = max(top, more)
        before = _NOTHING if weights == 0 else np.float32(math.exp(job.scale * (top - both)))
        now = np.float32(math.exp(job.scale * (more - both)))
        for column in range(dim):
            value = before * number(total, at + column) + now * number(part, at + column)
            put(FLOAT, total, at + column, value)
        put(FLOAT, total, at + dim, both)
        put(FLOAT, total, at + dim + 1, before * weights + now * added)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def finish(kind: Any, job: Any, unit: Any, head: int, total: int) -> None:
    """Writes a unit's output for one key head."""
    group, dim = job.group, job.dim
    for row in range(unit.rows * group):
        at = row * (dim + 2)
        weights = number(total, at + dim + 1)
        to = job.output + ((unit.row + row // group) * job.kv_heads + head) * group * dim * 4 + (row % group) * dim * 4
        for column in range(dim):
            put(FLOAT, to, column, rounded(kind, number(total, at + column) / weights))
