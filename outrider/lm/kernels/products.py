"""Products of a few positions with weights that are read once."""

from typing import Any

import numpy as np
from numba import njit

from outrider.lm.kernels.records import PANEL
from outrider.lm.kernels.tiles import dots, panel_dots, settle, weigh
from outrider.lm.kernels.vectors import size_of

# The kinds, by their types.
BFLOAT16, FLOAT = np.uint16(0), np.float32(0)

# Positions whose inputs stay in the processor's cache while all weights go by.
_POSITIONS = 60
# So many of their inputs stay in its first cache, beside those weights of a panel, while the positions go by.
_INPUTS = 640
# Bytes of a position's sums for a panel.
_SUMS = 4 * PANEL * 8
# With one position a panel goes by once, and what is needed next is not far.
_NEAR = 1024


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
def add_products(kind: Any, panel: int, inputs: int, input_stride: int, wide: int, length: int, sums: int) -> None:
    """sums[m, r, k % 8] += weights[r, k] * inputs[m, k] over `length` inputs of a panel, for m < wide."""
    done, ahead = 0, PANEL * length * size_of(kind) if wide > 1 else _NEAR
    while done < wide:
        left, x, to = wide - done, inputs + done * input_stride, sums + done * _SUMS
        if left == 5 or left > 8:
            panel_dots(kind, 2, 5, panel, ahead, x, input_stride, length, to)
            done += 5
        elif left == 3 or left == 6:
            panel_dots(kind, 4, 3, panel, ahead, x, input_stride, length, to)
            done += 3
        elif left >= 4:
            panel_dots(kind, 2, 4, panel, ahead, x, input_stride, length, to)
            done += 4
        elif left == 2:
            panel_dots(kind, 4, 2, panel, ahead, x, input_stride, length, to)
            done += 2
        else:
            panel_dots(kind, 8, 1, panel, ahead, x, input_stride, length, to)
            done += 1
        ahead = 0


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def panel_products(kind: Any, panel: int, inputs: int, input_stride: int, wide: int, length: int, sums: Any) -> None:
    """sums[m, r, l] = sum of weights[r, k] * inputs[m, k] over the k with k % 8 = l, for a panel's r and m < wide."""
    parts = (length + _INPUTS - 1) // _INPUTS
    part = (length // 8 + parts - 1) // parts * 8
    sums[:wide] = 0
    for first in range(0, length, part):
        weights, x = panel + first * PANEL * size_of(kind), inputs + 4 * first
        add_products(kind, weights, x, input_stride, wide, min(part, length - first), sums.ctypes.data)


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
    panels = (count + PANEL - 1) // PANEL
    return min(panels * thread // threads * PANEL, count), min(panels * (thread + 1) // threads * PANEL, count)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def linear(
    kind: Any, layer: Any, first: int, end: int, rows: int, inputs: int, input_stride: int, out: int, residual: bool
) -> None:
    """Outputs first ... end of a layer for all rows, from inputs float32 to out [rows, outputs] float32.

    They replace what is there or, as a `residual`, are added to it. `first` is a multiple of 8. The order of a sum is
    that of `products`.
    """
    length, width = layer.inputs, layer.outputs
    size, sums = PANEL * length * size_of(kind), np.empty((_POSITIONS, PANEL, 8), np.float32)
    for at in range(0, rows, _POSITIONS):
        wide = min(_POSITIONS, rows - at)
        for row in range(first, end, PANEL):
            panel, bias = layer.weights + row // PANEL * size, layer.bias + 4 * row if layer.bias != 0 else 0
            panel_products(kind, panel, inputs + at * input_stride, input_stride, wide, length, sums)
            for position in range(wide):
                found, to = sums.ctypes.data + position * _SUMS, out + 4 * ((at + position) * width + row)
                settle(kind, found, min(PANEL, end - row), bias, residual, to)
