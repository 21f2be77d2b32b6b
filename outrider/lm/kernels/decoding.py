"""A pass through the layers of a model that is built as Llama is, by one team of threads for all of it."""

from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from outrider.lm.kernels.attending import attend, barrier
from outrider.lm.kernels.products import BFLOAT16, FLOAT, linear, share
from outrider.lm.kernels.records import ATTENTION, LAYER, PASS, PRODUCT
from outrider.lm.kernels.vectors import gated, number, pointer, put, rounded, square_sum, whole

_ENTRY = types.void(types.voidptr)

thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
team_size = types.ExternalFunction("omp_get_num_threads", types.int32())


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def normed(kind: Any, source: int, size: int, weight: int, epsilon: float, to: int) -> None:
    """RMS norm of `size` float32; `to` may be their place."""
    factor = np.float32(1) / np.sqrt(square_sum(source, size) / np.float32(size) + epsilon)
    for index in range(size):
        put(FLOAT, to, index, rounded(kind, number(source, index) * factor * number(weight, index)))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def norm_rows(kind: Any, job: Any, weight: int, thread: int, threads: int) -> None:
    """From hidden to normed."""
    for row in range(thread, job.rows, threads):
        at = row * job.size * 4
        normed(kind, job.hidden + at, job.size, weight, job.epsilon, job.normed + at)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def turned(kind: Any, head: int, dim: int, cos: int, sin: int) -> None:
    """Rotates one head, [dim], in place."""
    half = dim // 2
    for index in range(half):
        first, second = number(head, index), number(head, half + index)
        put(FLOAT, head, index, rounded(kind, first * number(cos, index) - second * number(sin, index)))
        last = second * number(cos, half + index) + first * number(sin, half + index)
        put(FLOAT, head, half + index, rounded(kind, last))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def place_heads(kind: Any, job: Any, layer: Any, thread: int, threads: int) -> None:
    """Norms and rotates queries and keys, and stores keys and values in their slots."""
    attention = job.attention
    kv_heads, dim, slots = attention.kv_heads, attention.dim, attention.slots
    heads = attention.group * kv_heads
    every = heads + 2 * kv_heads
    for item in range(thread, job.rows * every, threads):
        row, head = item // every, item % every
        at, place = job.mixed + item * dim * 4, row * dim * 4
        norm = layer.query_norm if head < heads else layer.key_norm
        if head < heads + kv_heads:
            if norm != 0:
                normed(kind, at, dim, norm, job.epsilon, at)
            turned(kind, at, dim, job.cos + place, job.sin + place)
        if head >= heads:
            to = ((head - heads) * slots + whole(job.slots, row)) * dim
            for index in range(dim):
                put(kind, layer.keys, to + index, number(at, index))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def feed_forward(kind: Any, job: Any, layer: Any, thread: int, threads: int) -> None:
    """From normed to hidden. A thread makes the same part of gate and up projection."""
    width = layer.down.inputs
    first, end = share(width, thread, threads)
    row_size, size = layer.gate_up.outputs * 4, job.size * 4
    linear(kind, layer.gate_up, first, end, job.rows, job.normed, size, job.gate_up, False)
    linear(kind, layer.gate_up, width + first, width + end, job.rows, job.normed, size, job.gate_up, False)
    for row in range(job.rows):
        at = job.gate_up + row * row_size
        gated(at + first * 4, at + (width + first) * 4, end - first)
        for column in range(first, end):
            put(FLOAT, at, column, rounded(kind, number(at, column)))
    barrier()
    first, end = share(job.size, thread, threads)
    linear(kind, layer.down, first, end, job.rows, job.gate_up, row_size, job.hidden, True)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def through_layers(kind: Any, job: Any, thread: int, threads: int) -> None:
    """Every line waits for all threads' part of the line before."""
    layers = carray(pointer(job.layers), (job.layer_count,), LAYER)
    size = job.size * 4
    for index in range(job.layer_count):
        layer = layers[index]
        mixed = layer.query_key_value
        norm_rows(kind, job, layer.before_attention, thread, threads)
        barrier()
        first, end = share(mixed.outputs, thread, threads)
        linear(kind, mixed, first, end, job.rows, job.normed, size, job.mixed, False)
        barrier()
        place_heads(kind, job, layer, thread, threads)
        barrier()
        attend(kind, job.attention, layer.keys, layer.window, thread, threads)
        barrier()
        first, end = share(job.size, thread, threads)
        wide = layer.output.inputs * 4
        linear(kind, layer.output, first, end, job.rows, job.attention.output, wide, job.hidden, True)
        barrier()
        norm_rows(kind, job, layer.before_mlp, thread, threads)
        barrier()
        feed_forward(kind, job, layer, thread, threads)
        barrier()


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def one_linear(kind: Any, job: Any, thread: int, threads: int) -> None:
    """A thread's part of a PRODUCT."""
    first, end = share(job.linear.outputs, thread, threads)
    linear(kind, job.linear, first, end, job.rows, job.input, job.linear.inputs * 4, job.output, False)


def pass_bfloat16(data: Any) -> None:
    """A PASS, one thread of the team."""
    through_layers(BFLOAT16, carray(data, (1,), PASS)[0], thread_number(), team_size())


def linear_bfloat16(data: Any) -> None:
    """A PRODUCT."""
    one_linear(BFLOAT16, carray(data, (1,), PRODUCT)[0], thread_number(), team_size())


def attention_bfloat16(data: Any) -> None:
    """An ATTENTION."""
    job = carray(data, (1,), ATTENTION)[0]
    attend(BFLOAT16, job, job.keys, job.window, thread_number(), team_size())


def pass_float32(data: Any) -> None:
    """A PASS."""
    through_layers(FLOAT, carray(data, (1,), PASS)[0], thread_number(), team_size())


def linear_float32(data: Any) -> None:
    """A PRODUCT."""
    one_linear(FLOAT, carray(data, (1,), PRODUCT)[0], thread_number(), team_size())


def attention_float32(data: Any) -> None:
    """An ATTENTION."""
    job = carray(data, (1,), ATTENTION)[0]
    attend(FLOAT, job, job.keys, job.window, thread_number(), team_size())


def compiled(function: Any) -> int:
    """The address of one of the functions above, compiled or from numba's cache."""
    address: int = cfunc(_ENTRY, cache=True)(function).address
    return address
