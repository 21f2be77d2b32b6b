"""Products of a few positions with weights that are read once."""

from typing import Any

import numpy as np
from numba import njit

from outrider.lm.kernels.vectors import dots, number, put, rounded, size_of, weigh

# The kinds, by their types.
BFLOAT16, FLOAT = np.uint16(0), np.float32(0)

# Positions whose inputs stay in the processor's cache while all weights go by.
_POSITIONS = 60
_ROWS = 8


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def products(
    kind: Any,
    weights: int,
    stride: int,
    count: int,
    inputs: int,
    input_stride: int,
    wide: int,
    length: int,
    out: int,
    out_stride: int,
) -> None:
    """out[m, r] = sum over k of weights[r, k] * inputs[m, k], for r < count, m < wide; length is a multiple of 8."""
    done = 0
    while done < wide:
        left, x, to = wide - done, inputs + done * input_stride, out + done * out_stride
        if left == 5 or left > 8:
            dots(kind, 2, 5, weights, stride, count, x, input_stride, length, to, out_stride)
            done += 5
        elif left == 3 or left == 6:
            dots(kind, 4, 3, weights, stride, count, x, input_stride, length, to, out_stride)
            done += 3
        elif left >= 4:
            dots(kind, 2, 4, weights, stride, count, x, input_stride, length, to, out_stride)
            done += 4
        elif left == 2:
            dots(kind, 4, 2, weights, stride, count, x, input_stride, length, to, out_stride)
            done += 2
        else:
            dots(kind, 8, 1, weights, stride, count, x, input_stride, length, to, out_stride)
            done += 1


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def blend(
    kind: Any,
    weights: int,
    weight_stride: int,
    high: int,
    values: int,
    stride: int,
    count: int,
    out: int,
    out_stride: int,
    dim: int,
) -> None:
    """out[m, :dim] += sum over k < count of weights[m, k] * values[k, :dim], for m < high."""
    size = size_of(kind)
    for row in range(0, high, 3):
        w, o = weights + row * weight_stride, out + row * out_stride
        part = 0
        while part + 32 <= dim:
            v, to = values + part * size, o + part * 4
            if high - row >= 3:
                weigh(kind, 3, 4, w, weight_stride, v, stride, count, to, out_stride)
            elif high - row == 2:
                weigh(kind, 2, 4, w, weight_stride, v, stride, count, to, out_stride)
            else:
                weigh(kind, 1, 4, w, weight_stride, v, stride, count, to, out_stride)
            part += 32
        while part < dim:
            for one in range(row, min(row + 3, high)):
                to = out + one * out_stride + part * 4
                weigh(
                    kind,
                    1,
                    1,
                    weights + one * weight_stride,
                    weight_stride,
                    values + part * size,
                    stride,
                    count,
                    to,
                    out_stride,
                )
            part += 8


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """A thread's part of `count` things: (first, end), in multiples of 8."""
    blocks = (count + _ROWS - 1) // _ROWS
    return min(blocks * thread // threads * _ROWS, count), min(blocks * (thread + 1) // threads * _ROWS, count)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def linear(
    kind: Any, layer: Any, first: int, end: int, rows: int, inputs: int, input_stride: int, out: int, residual: int
) -> None:
    """Outputs first ... end of a layer for all rows: inputs float32 to out [rows, outputs] float32.

    Where `residual` is not 0, they are added to what is there, [rows, outputs], and `out` is scratch.
    """
    length, width = layer.inputs, layer.outputs
    stride = length * size_of(kind)
    for at in range(0, rows, _POSITIONS):
        wide = min(_POSITIONS, rows - at)
        x, to = inputs + at * input_stride, out + at * width * 4
        for row in range(first, end, _ROWS):
            count = min(_ROWS, end - row)
            weights = layer.weights + row * stride
            products(kind, weights, stride, count, x, input_stride, wide, length, to + row * 4, width * 4)
    for row in range(rows):
        for column in range(first, end):
            value = number(out, row * width + column)
            if layer.bias != 0:
                value += number(layer.bias, column)
            value = rounded(kind, value)
            if residual != 0:
                put(
                    FLOAT, residual, row * width + column, rounded(kind, number(residual, row * width + column) + value)
                )
            else:
                put(FLOAT, out, row * width + column, value)
