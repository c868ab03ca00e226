"""The CPU's MXFP4 kernel, in LLVM's language.

It is written as vectors, where a block of 32 elements is one value and LLVM cuts it to what the processor has, because
compilers do not find that form in a loop over elements.

The bits of a float without its sign are a number that grows with the magnitude. Less those of the block's scale, and
rounded to one bit of the significand, ties to even, they are the code of whatever is as large as the scale; below, two
limits tell 0, 0.5 and 1 apart. So no number is divided, and subnormal ones need no care of their own.

Where machine code can be kept a process starts with what an earlier one compiled (:mod:`mxq.formats.machine_code`).
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir

from mxq.formats import machine_code
from mxq.formats.rules import BLOCK, NAN_BYTE

AT_ONCE = 128
"""Blocks that get their scales before their codes."""
LIMITS = (0.25, 0.75)
"""In units of the scale: what is above the first is not 0, and what reaches the second is not 0.5."""
SIGN, OFFSET, SATURATED, COLUMNS = 2, 3, 4, 5
"""After them come a limit beyond which an element keeps its sign, the scale itself, and the largest that fits."""
COUNTS = ("saturated", "zero_blocks", "bad_blocks", "lowest", "highest", "first_bad_row")
"""What is counted, in the order of the kernel."""

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_INFINITY = 0x7F800000
_LANES = {"BF16": _I16, "F16": _I16, "F32": _I32}
"""As numbers are stored; in vectors, those of float16 are float32."""
_POINTERS = ("bits", "packed", "scale", "limits", "sums", "counts")
_NUMBERS = ("carry", "finer", "zero_byte", "stride", "blocks", "first", "last")


@functools.lru_cache
def compiled(kind: str, measured: bool) -> Callable[..., None]:
    """Return the kernel for numbers of a kind by the name that safetensors gives it.

    Its arguments are addresses and integers:

    * bits [rows, K], ``stride`` elements from one row to the next; packed uint8 [rows, K/2]; scale uint8 [rows, K/32];
    * limits [256, 5], integers like bits; those of float32 where bits are of float16;
    * sums float64 [2] and counts int64 [6], written if it measures: signal and noise, and :data:`COUNTS`;
    * carry, finer and zero_byte of the scale rule; stride; blocks, K/32; the first row and that after the last one.
    """
    types = [ctypes.c_void_p] * len(_POINTERS) + [ctypes.c_int64] * len(_NUMBERS)
    name = f"{kind}_{'measured' if measured else 'plain'}"
    return machine_code.function(name, lambda name: _source(name, kind, measured), Path(__file__).read_bytes(), types)


def _source(name: str, kind: str, measured: bool) -> str:
    module, byte = ir.Module(), _I8.as_pointer()
    lane = _LANES[kind].as_pointer()
    pointers = [lane, byte, byte, _lane(kind).as_pointer(), _F64.as_pointer(), _I64.as_pointer()]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), pointers + [_I64] * len(_NUMBERS)), name)
    _Kernel(function, kind, measured).rows()
    return str(module)


def _lane(kind: str) -> Any:
    return _I16 if kind == "BF16" else _I32


class _Kernel:
    """Writes the instructions; vectors are of the 32 elements of a block."""

    def __init__(self, function: Any, kind: str, measured: bool) -> None:
        self.b = ir.IRBuilder(function.append_basic_block())
        self.float16 = kind == "F16"
        self.lane = _lane(kind)
        self.width = self.lane.width
        self.dropped = self.width - 10  # bits of the significand but the one that a code has
        self.block = ir.VectorType(self.lane, BLOCK)
        self.floats = ir.VectorType(_F32, BLOCK)
        self.measured = measured
        self.at = dict(zip(_POINTERS, function.args, strict=False))
        self.number = dict(zip(_NUMBERS, function.args[len(_POINTERS) :], strict=True))
        for name in ("carry", "finer", "zero_byte"):
            self.number[name] = self.b.trunc(self.number[name], _I32)
        nothing = ir.Constant(ir.VectorType(_F64, 8), [0.0] * 8)
        self.totals = [self.variable(nothing) for _ in range(2)]
        self.counts = {name: self.variable(_I64(0)) for name in COUNTS}
        self.b.store(_I64(NAN_BYTE), self.counts["lowest"])
        self.b.store(_I64(-1), self.counts["first_bad_row"])
        self.largest = self.b.alloca(ir.ArrayType(_LANES[kind], AT_ONCE))

    def rows(self) -> None:
        """Loop over the rows.

        Scales come first, some hundred at a time: a block's codes wait for its scale, and the next block's scale should
        not wait for them.
        """
        b, blocks = self.b, self.number["blocks"]
        whole = dict(self.at)
        with machine_code.loop(b, b.sub(self.number["last"], self.number["first"])) as i:
            row = b.add(self.number["first"], i)
            bad = b.load(self.counts["bad_blocks"])
            with machine_code.loop(b, b.udiv(b.add(blocks, _I64(AT_ONCE - 1)), _I64(AT_ONCE))) as part:
                start = b.mul(part, _I64(AT_ONCE))
                count = self.least(b.sub(blocks, start), _I64(AT_ONCE))
                place = b.add(b.mul(row, blocks), start)
                element = b.add(b.mul(row, self.number["stride"]), b.mul(start, _I64(BLOCK)))
                self.at["bits"] = b.gep(whole["bits"], [element])
                self.at["packed"] = b.gep(whole["packed"], [b.mul(place, _I64(BLOCK // 2))])
                self.at["scale"] = b.gep(whole["scale"], [place])
                self.scales(count)
                self.codes(count)
            first = self.counts["first_bad_row"]
            now = b.load(self.counts["bad_blocks"])
            found = b.and_(b.icmp_signed("==", bad, _I64(0)), b.icmp_signed(">", now, _I64(0)))
            b.store(b.select(found, row, b.load(first)), first)
        if self.measured:
            for i, total in enumerate(self.totals):
                b.store(self.tree(b.load(total)), b.gep(self.at["sums"], [_I64(i)]))
            for i, count in enumerate(self.counts.values()):
                b.store(b.load(count), b.gep(self.at["counts"], [_I64(i)]))
        b.ret_void()

    def scales(self, blocks: Any) -> None:
        """Loop over some blocks of a row and write their scales.

        From the largest magnitudes on these are loops of plain numbers, of which LLVM makes vectors over blocks.
        """
        b = self.b
        with machine_code.loop(b, blocks) as block:
            magnitude = self.magnitude(self.stored(block))
            lane = magnitude.type.element
            largest = self.call(f"llvm.vector.reduce.smax.v32i{lane.width}", lane, magnitude)
            b.store(largest, b.gep(self.largest, [_I64(0), block]))
        with machine_code.loop(b, blocks) as block:
            amax = self.float32_bits(b.load(b.gep(self.largest, [_I64(0), block])))
            finite = b.icmp_signed("<", amax, _I32(_INFINITY))
            zero = b.icmp_signed("==", amax, _I32(0))
            byte = self.most(b.sub(b.lshr(b.add(amax, self.number["carry"]), _I32(23)), _I32(2)), _I32(1))
            byte = b.select(zero, self.number["zero_byte"], b.select(finite, byte, _I32(NAN_BYTE)))
            b.store(b.trunc(byte, _I8), b.gep(self.at["scale"], [block]))
        with (
            b.if_then(b.icmp_signed(">", self.number["finer"], _I32(0)), likely=False),
            machine_code.loop(b, blocks) as block,
        ):
            place = b.gep(self.at["scale"], [block])
            amax = self.float32_bits(b.load(b.gep(self.largest, [_I64(0), block])))
            ordinary = b.and_(b.icmp_signed("<", amax, _I32(_INFINITY)), b.icmp_signed(">", amax, _I32(0)))
            with b.if_then(ordinary):
                b.store(self.finest(b.load(place), self.magnitude(self.elements(block))), place)
        if self.measured:
            with machine_code.loop(b, blocks) as block:
                amax = self.float32_bits(b.load(b.gep(self.largest, [_I64(0), block])))
                byte = b.zext(b.load(b.gep(self.at["scale"], [block])), _I64)
                bad, zero = b.icmp_signed(">=", amax, _I32(_INFINITY)), b.icmp_signed("==", amax, _I32(0))
                ordinary = b.not_(b.or_(bad, zero))
                self.update("zero_blocks", b.add, b.zext(zero, _I64))
                self.update("bad_blocks", b.add, b.zext(bad, _I64))
                self.update("lowest", self.least, b.select(ordinary, byte, _I64(NAN_BYTE)))
                self.update("highest", self.most, b.select(ordinary, byte, _I64(0)))

    def codes(self, blocks: Any) -> None:
        """Loop over the same blocks and write their codes."""
        b = self.b
        with machine_code.loop(b, blocks) as block:
            self.prefetch(block)
            elements = self.elements(block)
            magnitude = self.magnitude(elements)
            byte = b.load(b.gep(self.at["scale"], [block]))
            code, above = self.code(magnitude, byte)
            sign = b.and_(b.lshr(elements, self.every(self.width - 4)), self.every(8))
            sign = b.select(b.icmp_signed(">", magnitude, self.limit(byte, SIGN)), sign, self.every(0))
            self.pack(b.or_(code, sign), block)
            if self.measured:
                with b.if_then(b.icmp_signed("!=", byte, _I8(NAN_BYTE)), likely=True):
                    self.measure(magnitude, byte, code, above)

    def prefetch(self, block: Any) -> None:
        """Ask for the elements that the next call begins with, at the same block of it."""
        b = self.b
        width = self.at["bits"].type.pointee.width
        for offset in range(0, BLOCK, 512 // width):
            index = b.add(b.mul(block, _I64(BLOCK)), _I64(AT_ONCE * BLOCK + offset))
            pointer = b.bitcast(b.gep(self.at["bits"], [index]), _I8.as_pointer())
            self.call("llvm.prefetch.p0", ir.VoidType(), pointer, _I32(0), _I32(3), _I32(1))

    def measure(self, magnitude: Any, byte: Any, code: Any, above: list[Any]) -> None:
        """Add the squares of a block's elements and errors to the totals, each in eight parts."""
        b, doubles = self.b, ir.VectorType(_F64, 8)
        wide = b.zext(byte, _I32)
        y = self.scaled(magnitude, wide)
        factor = self.power(b.mul(b.sub(wide, _I32(127)), _I32(2)), _F64)
        for total, values in zip(self.totals, (y, b.fsub(y, self.values(code, above))), strict=True):
            squares = b.fpext(self.eight_sums_of_squares(values), doubles)
            b.store(self.call("llvm.fmuladd.v8f64", doubles, squares, self.splat(factor, 8), b.load(total)), total)
        beyond = b.bitcast(b.icmp_signed(">", magnitude, self.limit(byte, SATURATED)), _I32)
        self.update("saturated", b.add, b.zext(self.call("llvm.ctpop.i32", _I32, beyond), _I64))

    def update(self, name: str, operation: Callable[[Any, Any], Any], value: Any) -> None:
        self.b.store(operation(self.b.load(self.counts[name]), value), self.counts[name])

    def variable(self, value: Any) -> Any:
        """Return a place in the function's frame that holds ``value`` from here on."""
        with self.b.goto_entry_block():
            place = self.b.alloca(value.type)
        self.b.store(value, place)
        return place

    def stored(self, block: Any) -> Any:
        """Return the bits of a block's elements as they are stored."""
        b, place = self.b, self.b.gep(self.at["bits"], [self.b.mul(block, _I64(BLOCK))])
        kind = ir.VectorType(place.type.pointee, BLOCK)
        return b.load(b.bitcast(place, kind.as_pointer()), align=1)

    def elements(self, block: Any) -> Any:
        """Return the bits of a block's elements, those of float16 as float32."""
        b, stored = self.b, self.stored(block)
        if not self.float16:
            return stored
        return b.bitcast(b.fpext(b.bitcast(stored, ir.VectorType(ir.HalfType(), BLOCK)), self.floats), self.block)

    def magnitude(self, bits: Any) -> Any:
        return self.b.and_(bits, self.splat_constant(bits.type, (1 << bits.type.element.width - 1) - 1))

    def scaled(self, magnitude: Any, byte: Any) -> Any:
        """Return magnitudes over the scale, as float32."""
        return self.times(self.numbers(magnitude), self.power(self.b.sub(_I32(127), byte), _F32))

    def finest(self, byte: Any, magnitude: Any) -> Any:
        """Return, of ``byte`` and the ``finer`` below it, that of the lowest squared error (mxq.formats.rules)."""
        b = self.b
        sum_type = _F64 if self.width == 32 else _F32
        best, gain = self.variable(byte), self.variable(sum_type(0.0))
        wide = b.zext(byte, _I32)
        y = self.scaled(magnitude, wide)
        first = self.values(*self.code(magnitude, byte))
        with machine_code.loop(b, self.number["finer"]) as index:
            other = self.most(b.sub(wide, b.add(index, _I32(1))), _I32(1))
            candidate = b.trunc(other, _I8)
            second = self.values(*self.code(magnitude, candidate))
            second = self.times(second, self.power(b.sub(other, wide), _F32))
            difference = b.fsub(first, second)
            rest = b.fsub(b.fadd(first, second), b.fadd(y, y))
            if self.width == 32:
                difference, rest = (b.fpext(v, ir.VectorType(_F64, BLOCK)) for v in (difference, rest))
            more = self.tree(b.fmul(difference, rest))
            better = b.fcmp_ordered(">", more, b.load(gain))
            b.store(b.select(better, candidate, b.load(best)), best)
            b.store(b.select(better, more, b.load(gain)), gain)
        return b.load(best)

    def limit(self, byte: Any, column: int) -> Any:
        """Return a limit of a scale, for each element of the block."""
        b = self.b
        index = b.add(b.mul(b.zext(byte, _I64), _I64(COLUMNS)), _I64(column))
        return self.splat(b.load(b.gep(self.at["limits"], [index])), BLOCK)

    def code(self, magnitude: Any, byte: Any) -> tuple[Any, list[Any]]:
        """Return codes without signs, and which elements are above each of :data:`LIMITS`."""
        b = self.b
        above = [b.icmp_signed(">", magnitude, self.limit(byte, i)) for i in range(len(LIMITS))]
        over = b.sub(magnitude, self.limit(byte, OFFSET))
        odd = b.and_(b.lshr(over, self.every(self.dropped)), self.every(1))
        half = self.every((1 << self.dropped - 1) - 1)
        rounded = b.ashr(b.add(b.add(over, half), odd), self.every(self.dropped))
        small = self.sum([b.zext(mask, self.block) for mask in above])
        return self.least(self.most(rounded, small), self.every(7)), above

    def values(self, code: Any, above: list[Any]) -> Any:
        """Return what codes mean, without signs (float32)."""
        # From 1.0 on, the upper ten bits of a float32 are the code and 252; 0.5 is one less than that.
        b = self.b
        half = b.and_(above[0], b.not_(above[1]))
        bits = b.sub(b.add(code, self.every(252)), b.zext(half, self.block))
        bits = b.select(above[0], bits, self.every(0))
        bits = b.shl(bits, self.every(self.dropped))
        return b.bitcast(bits, self.floats) if self.width == 32 else self.bfloat16(bits)

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

    def float32_bits(self, magnitude: Any) -> Any:
        """Return the bits as float32 of one stored magnitude."""
        if self.float16:
            return self.b.bitcast(self.b.fpext(self.b.bitcast(magnitude, ir.HalfType()), _F32), _I32)
        return magnitude if self.width == 32 else self.b.shl(self.b.zext(magnitude, _I32), _I32(16))

    def numbers(self, magnitude: Any) -> Any:
        """Return magnitudes as float32."""
        return self.b.bitcast(magnitude, self.floats) if self.width == 32 else self.bfloat16(magnitude)

    def bfloat16(self, bits: Any) -> Any:
        """Return bfloat16 numbers as float32, in the order 0, 2, 4 ..., 1, 3, 5 ...

        That order, in which nothing but sums follows, is two instructions for sixteen.
        """
        b, words = self.b, ir.VectorType(_I32, BLOCK // 2)
        pairs = b.bitcast(bits, words)
        even = b.shl(pairs, self.splat_constant(words, 16))
        odd = b.and_(pairs, self.splat_constant(words, -0x10000))
        both = ir.Constant(ir.VectorType(_I32, BLOCK), list(range(BLOCK)))
        return b.bitcast(b.shuffle_vector(even, odd, both), self.floats)

    def power(self, exponent: Any, kind: Any) -> Any:
        """Return two to the power of an int32, as a number of ``kind``."""
        b = self.b
        if kind == _F32:
            return b.bitcast(b.shl(b.add(exponent, _I32(127)), _I32(23)), _F32)
        return b.bitcast(b.shl(b.zext(b.add(exponent, _I32(1023)), _I64), _I64(52)), _F64)

    def times(self, vector: Any, factor: Any) -> Any:
        return self.b.fmul(vector, self.splat(factor, vector.type.count))

    def eight_sums_of_squares(self, vector: Any) -> Any:
        # In single precision, for a third less work: four numbers each, whose rounding is some 1e-9 of their sum.
        total = None
        for start in range(0, BLOCK, 8):
            mask = ir.Constant(ir.VectorType(_I32, 8), list(range(start, start + 8)))
            part = self.b.shuffle_vector(vector, vector, mask)
            if total is None:
                total = self.b.fmul(part, part)
            else:
                total = self.call("llvm.fmuladd.v8f32", part.type, part, part, total)
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

    def every(self, value: int) -> Any:
        return self.splat_constant(self.block, value)

    def splat_constant(self, kind: Any, value: int) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        return self.b.call(function, arguments)
