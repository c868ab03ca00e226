"""The CPU's MXFP4 kernel, in LLVM's language.

It is written as vectors, where a block of 32 elements is one value and LLVM cuts it to what the processor has, because
compilers do not find that form in a loop over elements. 32 elements of 16 bits take about a hundred instructions of
AVX2, and two hundred if their error is measured as well.

Where the compiled kernel can be kept (NUMBA_CACHE_DIR, else beside this file, else in the user's cache) a process
starts with it, elsewhere it compiles its own in about a second.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from mxq.formats.rules import BLOCK, NAN_BYTE

AT_ONCE = 128
"""Blocks that get their scales before their codes."""
LIMITS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""In units of the scale. A code counts those below the magnitude; every other tie goes down, to the even code."""
SIGN, SATURATED, COLUMNS = 7, 8, 9
"""After them come a limit beyond which an element keeps its sign, and one beyond which it is saturated."""


def compiled(measured: bool) -> Callable[..., None]:
    """Return the kernel, which compiles itself once however many threads ask for it at the same time."""
    with _once:
        return _compiled(measured)


_once = threading.Lock()


@functools.lru_cache
def _compiled(measured: bool) -> Callable[..., None]:
    """Return the kernel, from numba's cache where there is one: without a writable place numba refuses to look."""
    rows = _measured_rows if measured else _rows
    try:
        return njit(nogil=True, cache=True)(rows)
    except RuntimeError:
        return njit(nogil=True)(rows)


def _rows(bits, packed, scale, limits, sums, counts, rule, first, last):
    """Quantize rows ``first`` to ``last``.

    Scales come first, some hundred at a time: a block's codes wait for its scale, and the next block's scale should not
    wait for them.
    """
    blocks = scale.shape[1]
    for row in range(first, last):
        for start in range(0, blocks, AT_ONCE):
            stop = min(start + AT_ONCE, blocks)
            some, some_scale = bits[row, start * 32 : stop * 32], scale[row, start:stop]
            _scales(some, some_scale, limits, rule)
            _codes(some, packed[row, start * 16 : stop * 16], some_scale, limits)


def _measured_rows(bits, packed, scale, limits, sums, counts, rule, first, last):
    """Do what :func:`_rows` does, and measure."""
    blocks = scale.shape[1]
    for row in range(first, last):
        for start in range(0, blocks, AT_ONCE):
            stop = min(start + AT_ONCE, blocks)
            some, some_scale = bits[row, start * 32 : stop * 32], scale[row, start:stop]
            _measured_scales(some, some_scale, limits, rule, counts[row])
            some_packed = packed[row, start * 16 : stop * 16]
            _measured_codes(some, some_packed, some_scale, limits, sums[row], counts[row])


@intrinsic
def _scales(typing, bits, scale, limits, rule):
    """Choose the scales of blocks: bits [K] -> scale uint8 [K/32].

    limits is [256, 9, 32]; rule int32 [3] is carry, finer, zero_byte.
    """
    return _intrinsic(_Row.scales, bits=bits, scale=scale, limits=limits, rule=rule)


@intrinsic
def _measured_scales(typing, bits, scale, limits, rule, counts):
    """Do what :func:`_scales` does; counts[1:5] are updated."""
    return _intrinsic(_Row.scales, bits=bits, scale=scale, limits=limits, rule=rule, counts=counts)


@intrinsic
def _codes(typing, bits, packed, scale, limits):
    """Make the codes of blocks from their scales: bits [K] -> packed uint8 [K/2]."""
    return _intrinsic(_Row.codes, bits=bits, packed=packed, scale=scale, limits=limits)


@intrinsic
def _measured_codes(typing, bits, packed, scale, limits, sums, counts):
    """Do what :func:`_codes` does; sums (signal, noise) and counts[0] are updated."""
    return _intrinsic(_Row.codes, bits=bits, packed=packed, scale=scale, limits=limits, sums=sums, counts=counts)


def _intrinsic(write: Callable[..., None], **kinds: Any) -> Any:
    """Return the signature of an intrinsic that takes arrays of those kinds, and what generates it."""

    def generate(context, builder, signature, arguments):
        arrays = {
            name: context.make_array(kind)(context, builder, value)
            for name, kind, value in zip(kinds, signature.args, arguments, strict=True)
        }
        blocks = cgutils.unpack_tuple(builder, arrays["scale"].shape)[0]
        pointers = {name: array.data for name, array in arrays.items()}
        write(_Row(builder, kinds["bits"].dtype, pointers), blocks)
        return context.get_dummy_value()

    return types.void(*kinds.values()), generate


_I1, _I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()


class _Row:
    """Writes the instructions of the intrinsics; vectors are of the 32 elements of a block."""

    def __init__(self, builder: Any, dtype: Any, pointers: dict[str, Any]) -> None:
        self.b = builder
        self.float16 = dtype == types.uint16
        self.width = dtype.bitwidth
        self.lane = ir.IntType(self.width)
        self.block = ir.VectorType(self.lane, BLOCK)
        self.floats = ir.VectorType(_F32, BLOCK)
        self.at = pointers

    def scales(self, blocks: Any) -> None:
        """Loop over the blocks."""
        b = self.b
        carry, finer, zero_byte = (b.load(b.gep(self.at["rule"], [_I64(i)])) for i in range(3))
        measured = "counts" in self.at
        starts = [b.load(b.gep(self.at["counts"], [_I64(i)])) for i in range(1, 5)] if measured else []
        counts = [cgutils.alloca_once_value(b, start) for start in starts]
        with cgutils.for_range(b, blocks) as loop:
            magnitude = self.magnitude(self.elements(loop.index))
            amax = self.float32_bits(self.call(f"llvm.vector.reduce.smax.v32i{self.width}", self.lane, magnitude))
            finite = b.icmp_signed("<", amax, _I32(0x7F800000))
            zero = b.icmp_signed("==", amax, _I32(0))
            byte = self.most(b.sub(b.lshr(b.add(amax, carry), _I32(23)), _I32(2)), _I32(1))
            byte = self.finest(byte, magnitude, b.select(finite, finer, _I32(0)))
            if measured:
                zeros, bad, lowest, highest = counts
                ordinary = b.and_(finite, b.not_(zero))
                wide = b.zext(byte, _I64)
                b.store(b.add(b.load(zeros), b.zext(zero, _I64)), zeros)
                b.store(b.add(b.load(bad), b.zext(b.not_(finite), _I64)), bad)
                b.store(self.least(b.load(lowest), b.select(ordinary, wide, _I64(NAN_BYTE))), lowest)
                b.store(self.most(b.load(highest), b.select(ordinary, wide, _I64(0))), highest)
            byte = b.select(zero, zero_byte, b.select(finite, byte, _I32(NAN_BYTE)))
            b.store(b.trunc(byte, _I8), b.gep(self.at["scale"], [loop.index]))
        for i, count in enumerate(counts, start=1):
            b.store(b.load(count), b.gep(self.at["counts"], [_I64(i)]))

    def codes(self, blocks: Any) -> None:
        """Loop over the blocks."""
        b = self.b
        measured = "sums" in self.at
        nothing = ir.Constant(ir.VectorType(_F64, 8), [0.0] * 8)
        totals = [cgutils.alloca_once_value(b, nothing) for _ in range(2)]
        saturated = cgutils.alloca_once_value(b, _I64(0))
        with cgutils.for_range(b, blocks) as loop:
            self.prefetch(loop.index)
            elements = self.elements(loop.index)
            magnitude = self.magnitude(elements)
            byte = b.zext(b.load(b.gep(self.at["scale"], [loop.index])), _I32)
            above = self.above(magnitude, byte, COLUMNS if measured else COLUMNS - 1)
            eights = self.splat_constant(self.block, 8)
            sign = b.lshr(elements, self.splat_constant(self.block, self.width - 4))
            sign = b.and_(sign, b.and_(above[SIGN], eights))
            self.pack(b.or_(b.neg(self.sum(above[: len(LIMITS)])), sign), loop.index)
            if measured:
                with b.if_then(b.icmp_signed("!=", byte, _I32(NAN_BYTE)), likely=True):
                    self.measure(magnitude, byte, above, totals, saturated)
        if measured:
            for i, total in enumerate(totals):
                self.add_to("sums", i, self.tree(b.load(total)))
            self.add_to("counts", 0, b.load(saturated))

    def prefetch(self, block: Any) -> None:
        """Ask for the elements that the next call begins with, at the same block of it."""
        b = self.b
        for offset in range(0, BLOCK * self.width // 8, 64):
            index = b.add(b.mul(block, _I64(BLOCK)), _I64(AT_ONCE * BLOCK + offset * 8 // self.width))
            pointer = b.bitcast(b.gep(self.at["bits"], [index]), _I8.as_pointer())
            self.call("llvm.prefetch.p0", ir.VoidType(), pointer, _I32(0), _I32(3), _I32(1))

    def measure(self, magnitude: Any, byte: Any, above: list[Any], totals: list[Any], saturated: Any) -> None:
        """Add the squares of a block's elements and errors to ``totals``, each in eight parts."""
        b, doubles = self.b, ir.VectorType(_F64, 8)
        y = self.scaled(magnitude, byte)
        factor = self.power(b.mul(b.sub(byte, _I32(127)), _I32(2)), _F64)
        for total, values in zip(totals, (y, b.fsub(y, self.values(above))), strict=True):
            squares = self.eight_sums_of_squares(b.fpext(values, ir.VectorType(_F64, BLOCK)))
            b.store(self.call("llvm.fmuladd.v8f64", doubles, squares, self.splat(factor, 8), b.load(total)), total)
        beyond = b.bitcast(b.trunc(above[SATURATED], ir.VectorType(_I1, BLOCK)), _I32)
        b.store(b.add(b.load(saturated), b.zext(self.call("llvm.ctpop.i32", _I32, beyond), _I64)), saturated)

    def add_to(self, name: str, index: int, value: Any) -> None:
        pointer = self.b.gep(self.at[name], [_I64(index)])
        add = self.b.fadd if value.type == _F64 else self.b.add
        self.b.store(add(self.b.load(pointer), value), pointer)

    def elements(self, block: Any) -> Any:
        return self.vector("bits", self.b.mul(block, _I64(BLOCK)))

    def vector(self, name: str, index: Any) -> Any:
        b = self.b
        return b.load(b.bitcast(b.gep(self.at[name], [index]), self.block.as_pointer()), align=1)

    def magnitude(self, elements: Any) -> Any:
        return self.b.and_(elements, self.splat_constant(self.block, (1 << self.width - 1) - 1))

    def scaled(self, magnitude: Any, byte: Any) -> Any:
        """Return magnitudes over the scale, as float32."""
        return self.times(self.numbers(magnitude), self.power(self.b.sub(_I32(127), byte), _F32))

    def finest(self, byte: Any, magnitude: Any, finer: Any) -> Any:
        """Return, of ``byte`` and the ``finer`` below it, that of the lowest squared error (mxq.formats.rules)."""
        b = self.b
        sum_type = _F64 if self.width == 32 else _F32
        best, gain = cgutils.alloca_once_value(b, byte), cgutils.alloca_once_value(b, sum_type(0.0))
        with b.if_then(b.icmp_signed(">", finer, _I32(0)), likely=False):
            y = self.scaled(magnitude, byte)
            first = self.values(self.above(magnitude, byte, len(LIMITS)))
            with cgutils.for_range(b, finer) as loop:
                candidate = self.most(b.sub(byte, b.add(loop.index, _I32(1))), _I32(1))
                second = self.values(self.above(magnitude, candidate, len(LIMITS)))
                second = self.times(second, self.power(b.sub(candidate, byte), _F32))
                difference = b.fsub(first, second)
                other = b.fsub(b.fadd(first, second), b.fadd(y, y))
                if self.width == 32:
                    difference, other = (b.fpext(v, ir.VectorType(_F64, BLOCK)) for v in (difference, other))
                more = self.tree(b.fmul(difference, other))
                better = b.fcmp_ordered(">", more, b.load(gain))
                b.store(b.select(better, candidate, b.load(best)), best)
                b.store(b.select(better, more, b.load(gain)), gain)
        return b.load(best)

    def above(self, magnitude: Any, byte: Any, count: int) -> list[Any]:
        """Return masks (0 or -1 per element): which of the first ``count`` limits of ``byte`` an element exceeds."""
        b = self.b
        base = b.mul(b.zext(byte, _I64), _I64(COLUMNS * BLOCK))
        limits = [self.vector("limits", b.add(base, _I64(i * BLOCK))) for i in range(count)]
        return [b.sext(b.icmp_signed(">", magnitude, limit), self.block) for limit in limits]

    def values(self, above: list[Any]) -> Any:
        """Return what the codes mean, without signs (float32)."""
        # The upper ten bits of a bfloat16 are 0, 252 and 254 to 259 for the codes 0 to 7.
        b = self.b
        bits = b.sub(
            b.and_(above[0], self.splat_constant(self.block, 251)), self.sum([*above[: len(LIMITS)], above[1]])
        )
        if self.width == 32:
            return b.bitcast(b.shl(bits, self.splat_constant(self.block, 22)), self.floats)
        return self.bfloat16(b.shl(bits, self.splat_constant(self.block, 6)))

    def pack(self, code: Any, block: Any) -> None:
        """Store codes, two in a byte."""
        b = self.b
        if self.width == 32:
            code = b.trunc(code, ir.VectorType(_I16, BLOCK))
        pairs = b.bitcast(code, ir.VectorType(_I32, BLOCK // 2))
        pairs = b.or_(pairs, b.lshr(pairs, self.splat_constant(pairs.type, 12)))
        target = ir.VectorType(_I8, BLOCK // 2)
        pointer = b.gep(self.at["packed"], [b.mul(block, _I64(BLOCK // 2))])
        b.store(b.trunc(pairs, target), b.bitcast(pointer, target.as_pointer()), align=1)

    def float32_bits(self, amax: Any) -> Any:
        b = self.b
        if self.float16:
            return b.bitcast(b.fpext(b.bitcast(amax, ir.HalfType()), _F32), _I32)
        return amax if self.width == 32 else b.shl(b.zext(amax, _I32), _I32(16))

    def numbers(self, magnitude: Any) -> Any:
        """Return magnitudes as float32."""
        if self.width == 32:
            return self.b.bitcast(magnitude, self.floats)
        if self.float16:
            return self.b.fpext(self.b.bitcast(magnitude, ir.VectorType(ir.HalfType(), BLOCK)), self.floats)
        return self.bfloat16(magnitude)

    def bfloat16(self, bits: Any) -> Any:
        """Return bfloat16 numbers as float32: those of a bfloat16 block in the order 0, 2, 4 ..., 1, 3, 5 ...

        That order, in which nothing but sums follows, is two instructions for sixteen.
        """
        b, words = self.b, ir.VectorType(_I32, BLOCK // 2)
        if self.float16:
            wide = b.zext(bits, ir.VectorType(_I32, BLOCK))
            return b.bitcast(b.shl(wide, self.splat_constant(wide.type, 16)), self.floats)
        pairs = b.bitcast(bits, words)
        even = b.shl(pairs, self.splat_constant(words, 16))
        odd = b.and_(pairs, self.splat_constant(words, -0x10000))
        every = ir.Constant(ir.VectorType(_I32, BLOCK), list(range(BLOCK)))
        return b.bitcast(b.shuffle_vector(even, odd, every), self.floats)

    def power(self, exponent: Any, kind: Any) -> Any:
        """Return two to the power of an int32, as a number of ``kind``."""
        b = self.b
        if kind == _F32:
            return b.bitcast(b.shl(b.add(exponent, _I32(127)), _I32(23)), _F32)
        return b.bitcast(b.shl(b.zext(b.add(exponent, _I32(1023)), _I64), _I64(52)), _F64)

    def times(self, vector: Any, factor: Any) -> Any:
        return self.b.fmul(vector, self.splat(factor, vector.type.count))

    def eight_sums_of_squares(self, vector: Any) -> Any:
        # In double precision, because errors of single precision would not cancel out: squares of bfloat16 end in the
        # bits 000, 001 or 100, so that most of them would be rounded down.
        total = None
        for start in range(0, BLOCK, 8):
            mask = ir.Constant(ir.VectorType(_I32, 8), list(range(start, start + 8)))
            part = self.b.shuffle_vector(vector, vector, mask)
            if total is None:
                total = self.b.fmul(part, part)
            else:
                total = self.call("llvm.fmuladd.v8f64", part.type, part, part, total)
        return total

    def tree(self, vector: Any) -> Any:
        """Return the sum of a vector of floats, halving it again and again."""
        count = vector.type.count
        while count > 1:
            count //= 2
            masks = (ir.Constant(ir.VectorType(_I32, count), list(range(i, i + count))) for i in (0, count))
            vector = self.b.fadd(*(self.b.shuffle_vector(vector, vector, mask) for mask in masks))
        return self.b.extract_element(vector, _I32(0))

    def sum(self, vectors: list[Any]) -> Any:
        return functools.reduce(self.b.add, vectors)

    def least(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def most(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def splat(self, value: Any, count: int) -> Any:
        one = self.b.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, _I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, count), [0] * count))

    def splat_constant(self, kind: Any, value: int) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), arguments)
