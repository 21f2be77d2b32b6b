"""What numba's kernels are made of: sums whose order is what the code says.

A compiler that may reorder sums does so differently for one position and for five, and a token's logits would then
depend on what else is in its pass. Addresses are int64, as `Tensor.data_ptr` gives them; strides are in bytes. `kind`
says what weights, keys and values are by its type: uint16 stands for bfloat16, the upper half of a float32; else
float32.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.lm.kernels.instructions import FLOAT, INT, INTS, LANES, LONG, SHORT, Code, lanes


@intrinsic  # type: ignore[untyped-decorator]
def highest(typing: Any, address: Any, count: Any) -> Any:
    """The greatest of `count` float32, a multiple of 8; NaN is passed over."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build)
        best = cgutils.alloca_once_value(build, lanes(float("-inf")))

        def greater(first: ir.Value, second: ir.Value) -> ir.Value:
            return build.select(build.fcmp_ordered(">", first, second), first, second)

        with cgutils.for_range_slice(build, LONG(0), arguments[1], LONG(LANES), LONG) as (place, _):
            build.store(greater(code.floats(code.at(arguments[0], code.times(place, 4))), build.load(best)), best)
        value = build.load(best)
        for width in (4, 2, 1):
            turned = ir.Constant(INTS, [(lane + width) % LANES for lane in range(LANES)])
            value = greater(value, build.shuffle_vector(value, value, turned))
        return build.extract_element(value, INT(0))

    return types.float32(types.int64, types.int64), write


@intrinsic  # type: ignore[untyped-decorator]
def square_sum(typing: Any, address: Any, count: Any) -> Any:
    """Of `count` float32, a multiple of 8."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build)
        total = cgutils.alloca_once_value(build, lanes(0.0))
        with cgutils.for_range_slice(build, LONG(0), arguments[1], LONG(LANES), LONG) as (place, _):
            value = code.floats(code.at(arguments[0], code.times(place, 4)))
            build.store(code.fma(value, value, build.load(total)), total)
        (value,) = code.sums([build.load(total)])
        return build.extract_element(value, INT(0))

    return types.float32(types.int64, types.int64), write


@intrinsic  # type: ignore[untyped-decorator]
def exponentials(typing: Any, address: Any, count: Any, top: Any, scale: Any) -> Any:
    """Makes exp(scale * (x - top)) of `count` float32, a multiple of 8, in place; returns their sum."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build)
        start, count, top, scale = arguments
        total = cgutils.alloca_once_value(build, lanes(0.0))
        top, scale = code.splat(top), code.splat(scale)
        with cgutils.for_range_slice(build, LONG(0), count, LONG(LANES), LONG) as (place, _):
            at = code.at(start, code.times(place, 4))
            value = code.exp(build.fmul(build.fsub(code.floats(at), top), scale))
            code.store(value, at)
            build.store(build.fadd(build.load(total), value), total)
        (value,) = code.sums([build.load(total)])
        return build.extract_element(value, INT(0))

    return types.float32(types.int64, types.int64, types.float32, types.float32), write


@intrinsic  # type: ignore[untyped-decorator]
def gated(typing: Any, gate: Any, up: Any, count: Any) -> Any:
    """gate = silu(gate) * up for `count` float32, a multiple of 8."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build)
        with cgutils.for_range_slice(build, LONG(0), arguments[2], LONG(LANES), LONG) as (place, _):
            at = code.at(arguments[0], code.times(place, 4))
            value, factor = code.floats(at), code.floats(code.at(arguments[1], code.times(place, 4)))
            below = build.fadd(lanes(1.0), code.exp(build.fneg(value)))
            code.store(build.fmul(build.fdiv(value, below), factor), at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), write


@intrinsic  # type: ignore[untyped-decorator]
def size_of(typing: Any, kind: Any) -> Any:
    """Bytes of a number."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return LONG(Code(build, kind).size)

    return types.int64(kind), write


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any) -> Any:
    """For numba's carray."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return build.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), write


@intrinsic  # type: ignore[untyped-decorator]
def number(typing: Any, address: Any, index: Any) -> Any:
    """The float32 there."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build)
        at = code.at(arguments[0], code.times(arguments[1], 4))
        return build.load(code.pointer(at, FLOAT), align=4)

    return types.float32(types.int64, types.int64), write


@intrinsic  # type: ignore[untyped-decorator]
def whole(typing: Any, address: Any, index: Any) -> Any:
    """The int64 there."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build)
        return build.load(code.pointer(code.at(arguments[0], code.times(arguments[1], 8)), LONG))

    return types.int64(types.int64, types.int64), write


@intrinsic  # type: ignore[untyped-decorator]
def rounded(typing: Any, kind: Any, value: Any) -> Any:
    """A float32 as the kind can hold it."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code, value = Code(build, kind), arguments[1]
        return build.bitcast(code.rounded(value), FLOAT) if code.half else value

    return types.float32(kind, types.float32), write


@intrinsic  # type: ignore[untyped-decorator]
def put(typing: Any, kind: Any, address: Any, index: Any, value: Any) -> Any:
    """Stores a float32 as the kind, `index` numbers behind the address."""

    def write(context: Any, build: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(build, kind)
        _, address, index, value = arguments
        to = code.at(address, code.times(index, code.size))
        if code.half:
            value = build.trunc(build.lshr(code.rounded(value), INT(16)), SHORT)
        build.store(value, code.pointer(to, value.type), align=code.size)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.float32), write
