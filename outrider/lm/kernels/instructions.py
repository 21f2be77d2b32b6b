"""LLVM instructions that the kernels' building blocks are made of: vectors of eight float32."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 8
FLOAT, INT, SHORT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
FLOATS, INTS, _SHORTS = (ir.VectorType(it, LANES) for it in (FLOAT, INT, SHORT))


class Code:
    """Writes instructions.

    Attributes:
        half: whether numbers of the kind are bfloat16.
        size: their bytes.
    """

    def __init__(self, builder: ir.IRBuilder, kind: Any = types.float32) -> None:
        self.builder, self.half = builder, kind == types.uint16
        self.size = 2 if self.half else 4

    def at(self, address: ir.Value, *offsets: ir.Value | int) -> ir.Value:
        """An address and offsets in bytes."""
        for offset in offsets:
            address = self.builder.add(address, LONG(offset) if isinstance(offset, int) else offset)
        return address

    def times(self, count: ir.Value, size: int | ir.Value) -> ir.Value:
        """count * size."""
        return self.builder.mul(count, LONG(size) if isinstance(size, int) else size)

    def pointer(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        """To what lies there."""
        return self.builder.inttoptr(address, kind.as_pointer())

    def floats(self, address: ir.Value) -> ir.Value:
        """Eight float32 at an address."""
        return self.builder.load(self.pointer(address, FLOATS), align=4)

    def widened(self, address: ir.Value) -> ir.Value:
        """Eight numbers of the kind."""
        if not self.half:
            return self.floats(address)
        shorts = self.builder.load(self.pointer(address, _SHORTS), align=2)
        return self.builder.bitcast(self.builder.shl(self.builder.zext(shorts, INTS), lanes(16, INT)), FLOATS)

    def store(self, value: ir.Value, address: ir.Value) -> None:
        """Writes a float32 or a vector of them."""
        self.builder.store(value, self.pointer(address, value.type), align=4)

    def some(self, address: ir.Value, here: ir.Value) -> ir.Value:
        """Eight float32 of which only those of the lanes `here` are read; 0 in the others."""
        kind = ir.FunctionType(FLOATS, [FLOATS.as_pointer(), INT, here.type, FLOATS])
        load = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.masked.load.v8f32.p0")
        return self.builder.call(load, [self.pointer(address, FLOATS), INT(4), here, lanes(0.0)])

    def store_some(self, value: ir.Value, address: ir.Value, here: ir.Value) -> None:
        """Writes the lanes `here` of eight float32."""
        self.call("llvm.masked.store.v8f32.p0", ir.VoidType(), value, self.pointer(address, FLOATS), INT(4), here)

    def call(self, name: str, kind: ir.Type, *arguments: ir.Value) -> ir.Value:
        """One of LLVM's own functions."""
        declared = ir.FunctionType(kind, [it.type for it in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, declared, name), arguments)

    def fma(self, first: ir.Value, second: ir.Value, added: ir.Value) -> ir.Value:
        """first * second + added, rounded once."""
        return self.call("llvm.fma.v8f32", FLOATS, first, second, added)

    def splat(self, value: ir.Value) -> ir.Value:
        """A number in every lane."""
        kind = ir.VectorType(value.type, LANES)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))

    def prefetch(self, address: ir.Value) -> None:
        """Asks for a line of memory."""
        place = self.pointer(address, ir.IntType(8))
        self.call("llvm.prefetch.p0", ir.VoidType(), place, INT(0), INT(3), INT(1))

    def sums(self, values: list[ir.Value]) -> list[ir.Value]:
        """Of each vector's lanes, of up to eight at once: halves first, whichever else is summed beside it."""
        for parts in (1, 2, 4):  # of different vectors in one
            width = LANES // parts
            low = [
                vector + part * width + lane
                for vector in (0, LANES)
                for part in range(parts)
                for lane in range(width // 2)
            ]
            pairs = [(values[i], values[min(i + 1, len(values) - 1)]) for i in range(0, len(values), 2)]
            values = [self._paired(first, second, low, width // 2) for first, second in pairs]
        return values

    def _paired(self, first: ir.Value, second: ir.Value, low: list[int], step: int) -> ir.Value:
        chosen = [ir.Constant(INTS, [lane + more for lane in low]) for more in (0, step)]
        return self.builder.fadd(*(self.builder.shuffle_vector(first, second, it) for it in chosen))

    def exp(self, value: ir.Value) -> ir.Value:
        """To the last bits; of what is beyond -87 and 88 that of the bound; NaN stays."""
        build = self.builder
        for order, bound in (("<", -87.0), (">", 88.0)):
            value = build.select(build.fcmp_ordered(order, value, lanes(bound)), lanes(bound), value)
        whole = self.call("llvm.rint.v8f32", FLOATS, build.fmul(value, lanes(1.4426950408889634)))
        rest = self.fma(whole, lanes(-0.693359375), value)
        rest = self.fma(whole, lanes(2.12194440e-4), rest)
        # Cephes' polynomial of expf.
        series = lanes(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            series = self.fma(series, rest, lanes(factor))
        series = build.fadd(self.fma(series, build.fmul(rest, rest), rest), lanes(1.0))
        power = build.shl(build.add(build.fptosi(whole, INTS), lanes(127, INT)), lanes(23, INT))
        return build.fmul(series, build.bitcast(power, FLOATS))

    def rounded(self, value: ir.Value) -> ir.Value:
        """The bits of float32 rounded to bfloat16, to nearest even, in int32; NaN stays one. One, or eight."""
        build, many = self.builder, value.type == FLOATS

        def constant(number: int) -> ir.Constant:
            return lanes(number, INT) if many else INT(number)

        bits = build.bitcast(value, INTS if many else INT)
        odd = build.and_(build.lshr(bits, constant(16)), constant(1))
        near = build.and_(build.add(build.add(bits, constant(0x7FFF)), odd), constant(0xFFFF0000))
        return build.select(build.fcmp_unordered("uno", value, value), constant(0x7FC00000), near)

    def as_kind(self, value: ir.Value) -> ir.Value:
        """Eight float32 as the kind can hold them."""
        return self.builder.bitcast(self.rounded(value), FLOATS) if self.half else value


def lanes(value: float, kind: ir.Type = FLOAT) -> ir.Constant:
    """A constant in every lane."""
    return ir.Constant(ir.VectorType(kind, LANES), [value] * LANES)
