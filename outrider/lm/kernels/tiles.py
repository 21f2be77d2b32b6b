"""Sums of products, a tile of them at a time: so many that the processor has registers for them.

`kind`, addresses and strides as in `vectors`.
"""

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.lm.kernels.instructions import FLOAT, INT, INTS, LANES, LONG, Code, lanes
from outrider.lm.kernels.records import PANEL

_UNROLLED = 4


def _void(count: int, *first: Any) -> Any:
    return types.void(*first, *[types.int64] * count)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def dots(
    typing: Any,
    kind: Any,
    rows: Any,
    columns: Any,
    weights: Any,
    stride: Any,
    count: Any,
    inputs: Any,
    input_stride: Any,
    length: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[m, r] = sum over k of weights[r, k] * inputs[m, k], for r < count and m < the constant `columns`.

    Inputs are float32; `length` is a multiple of 8. Rows are taken `rows` (a constant: 1, 2, 4, 8) at a time, then one
    by one. What the next ones need is fetched meanwhile.
    """
    high, wide = rows.literal_value, columns.literal_value

    def tile(code: Code, high: int, first: ir.Value, arguments: Any) -> None:
        build = code.builder
        weights, stride, _, inputs, input_stride, length, out, out_stride = arguments
        row_at = [code.at(weights, code.times(stride, code.at(first, row))) for row in range(high)]
        input_at = [code.at(inputs, code.times(input_stride, it)) for it in range(wide)]
        sums = [[cgutils.alloca_once_value(build, lanes(0.0)) for _ in range(wide)] for _ in range(high)]

        def step(place: ir.Value) -> None:
            read = [code.floats(code.at(it, code.times(place, 4))) for it in input_at]
            for row in range(high):
                weight = code.widened(code.at(row_at[row], code.times(place, code.size)))
                for column in range(wide):
                    to = sums[row][column]
                    build.store(code.fma(weight, read[column], build.load(to)), to)

        block = LANES * _UNROLLED
        whole = code.times(build.sdiv(length, LONG(block)), block)
        with cgutils.for_range_slice(build, LONG(0), whole, LONG(block), LONG) as (place, _):
            for row in range(high):
                ahead = code.at(row_at[row], code.times(place, code.size), code.times(stride, high))
                for line in range(0, block * code.size, 64):
                    code.prefetch(code.at(ahead, line))
            for part in range(_UNROLLED):
                step(code.at(place, LANES * part))
        with cgutils.for_range_slice(build, whole, length, LONG(LANES), LONG) as (place, _):
            step(place)
        order = ir.Constant(ir.VectorType(INT, high), [_lane(row, high) for row in range(high)])
        for column in range(wide):
            (total,) = code.sums([build.load(sums[row][column]) for row in range(high)])
            to = code.at(out, code.times(out_stride, column), code.times(first, 4))
            code.store(build.shuffle_vector(total, total, order), to)

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code, arguments = Code(build, kind), arguments[3:]
        count = arguments[2]
        whole = code.times(build.sdiv(count, LONG(high)), high)
        with cgutils.for_range_slice(build, LONG(0), whole, LONG(high), LONG) as (first, _):
            tile(code, high, first, arguments)
        if high > 1:
            with cgutils.for_range_slice(build, whole, count, LONG(1), LONG) as (first, _):
                tile(code, 1, first, arguments)
        return context.get_dummy_value()

    return _void(8, kind, rows, columns), write


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def panel_dots(
    typing: Any,
    kind: Any,
    rows: Any,
    columns: Any,
    panel: Any,
    ahead: Any,
    inputs: Any,
    input_stride: Any,
    length: Any,
    sums: Any,
) -> Any:
    """sums[m, r, k % 8] += weights[r, k] * inputs[m, k] for the weights of a panel, r < 8 and m < `columns`.

    `rows` and `columns` are constants, and `rows` of the panel's outputs are summed at a time. `length` is a multiple
    of 8. What lies `ahead` bytes behind the weights is fetched meanwhile.
    """
    high, wide = rows.literal_value, columns.literal_value

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build, kind)
        panel, ahead, inputs, input_stride, length, out = arguments[3:]
        row_size, block, vector = LANES * code.size, LANES * _UNROLLED, 4 * LANES
        input_at = [code.at(inputs, code.times(input_stride, it)) for it in range(wide)]
        whole = code.times(build.sdiv(length, LONG(block)), block)

        def tile(first: ir.Value) -> None:
            begin, to = code.at(panel, code.times(first, row_size)), code.at(out, code.times(first, vector))
            places = [[code.at(to, vector * (PANEL * it + row)) for it in range(wide)] for row in range(high)]
            sums = [[cgutils.alloca_once_value(build, code.floats(it)) for it in row] for row in places]
            # Each tile fetches its part of what is ahead, from one end to the other.
            fetching = code.at(panel, ahead, code.times(code.times(first, length), code.size))

            def step(place: ir.Value) -> None:
                read = [code.floats(code.at(it, code.times(place, 4))) for it in input_at]
                for row in range(high):
                    weight = code.widened(code.at(begin, code.times(place, PANEL * code.size), row_size * row))
                    for column in range(wide):
                        variable = sums[row][column]
                        build.store(code.fma(weight, read[column], build.load(variable)), variable)

            with cgutils.for_range_slice(build, LONG(0), whole, LONG(block), LONG) as (place, _):
                fetched = code.at(fetching, code.times(place, high * code.size))
                for line in range(0, high * block * code.size, 64):
                    code.prefetch(code.at(fetched, line))
                for it in range(_UNROLLED):
                    step(code.at(place, LANES * it))
            with cgutils.for_range_slice(build, whole, length, LONG(LANES), LONG) as (place, _):
                step(place)
            for variable, place in zip(itertools.chain(*sums), itertools.chain(*places), strict=True):
                code.store(build.load(variable), place)

        with cgutils.for_range_slice(build, LONG(0), LONG(PANEL), LONG(high), LONG) as (first, _):
            tile(first)
        return context.get_dummy_value()

    return _void(6, kind, rows, columns), write


@intrinsic  # type: ignore[untyped-decorator]
def settle(typing: Any, kind: Any, sums: Any, count: Any, bias: Any, residual: Any, out: Any) -> Any:
    """out[r] = the sum of sums[r, :8] and of bias[r], rounded as the kind, for r < count, which is at most 8.

    `bias` may be 0. As a `residual` that is added to out[r], and rounded once more.
    """

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build, kind)
        sums, count, bias, residual, out = arguments[1:]
        (total,) = code.sums([code.floats(code.at(sums, 4 * LANES * row)) for row in range(PANEL)])
        order = ir.Constant(INTS, [_lane(row, PANEL) for row in range(PANEL)])
        here = build.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), code.splat(build.trunc(count, INT)))
        value = cgutils.alloca_once_value(build, build.shuffle_vector(total, total, order))
        with build.if_then(build.icmp_signed("!=", bias, LONG(0))):
            build.store(build.fadd(build.load(value), code.some(bias, here)), value)
        build.store(code.as_kind(build.load(value)), value)
        with build.if_then(residual):
            build.store(code.as_kind(build.fadd(code.some(out, here), build.load(value))), value)
        code.store_some(build.load(value), out, here)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.int64, types.boolean, types.int64), write


def _lane(row: int, high: int) -> int:
    """Where `sums` leaves the sum of one of `high` vectors."""
    where = [[it] * LANES for it in range(high)]
    for parts in (1, 2, 4):
        width = LANES // parts
        pairs = [(where[i], where[min(i + 1, len(where) - 1)]) for i in range(0, len(where), 2)]
        low = [part * width + lane for part in range(parts) for lane in range(width // 2)]
        where = [[first[it] for it in low] + [second[it] for it in low] for first, second in pairs]
    return where[0].index(row)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weigh(
    typing: Any,
    kind: Any,
    rows: Any,
    vectors: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    stride: Any,
    count: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[m, :8 * C] += sum over k < count of weights[m, k] * values[k, :8 * C], in the order of k, for m < M.

    M = `rows` and C = `vectors` are constants; weights are float32.
    """
    high, wide = rows.literal_value, vectors.literal_value

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build, kind)
        weights, weight_stride, values, stride, count, out, out_stride = arguments[3:]
        places = [
            [code.at(out, code.times(out_stride, row), 4 * LANES * part) for part in range(wide)] for row in range(high)
        ]
        sums = [[cgutils.alloca_once_value(build, code.floats(it)) for it in row] for row in places]
        weight_at = [code.at(weights, code.times(weight_stride, row)) for row in range(high)]
        with cgutils.for_range_slice(build, LONG(0), count, LONG(1), LONG) as (key, _):
            line = code.at(values, code.times(stride, key))
            read = [code.widened(code.at(line, code.size * LANES * part)) for part in range(wide)]
            for row in range(high):
                place = code.pointer(code.at(weight_at[row], code.times(key, 4)), FLOAT)
                weight = code.splat(build.load(place, align=4))
                for part in range(wide):
                    to = sums[row][part]
                    build.store(code.fma(weight, read[part], build.load(to)), to)
        for row in range(high):
            for part in range(wide):
                code.store(build.load(sums[row][part]), places[row][part])
        return context.get_dummy_value()

    return _void(7, kind, rows, vectors), write
