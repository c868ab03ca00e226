"""MXFP4 on a CPU, of rows of numbers given by their bits: codes, scales and the error, in one pass over memory.

The kernel (:mod:`mxq.formats.cpu_kernel`) never computes with the numbers it rounds. As integers, the bits of floats
without their sign are ordered as the magnitudes are, and an element's code follows from how far they are above those of
its scale. Where limits lie at a scale is computed here, exactly, per type, ties included.

There is no torch here, whose import takes longer than the quantization of a gigabyte. Threads are Python's: the kernel
holds no lock.
"""

import ctypes
import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mxq.formats.cpu_kernel import COLUMNS, COUNTS, LIMITS, OFFSET, SATURATED, SIGN, compiled
from mxq.formats.rules import BLOCK, NAN_BYTE, scale_rule

_LARGEST_BYTE = 253
_MEASURED_AT_ONCE = 1 << 19  # elements: sums do not depend on how many threads add them up


@dataclass(frozen=True)
class Kind:
    """A type of numbers.

    Attributes:
        bits: the integers that stand for it: of its width, and signed for bfloat16, unsigned for float16.
        mantissa: how many bits of the significand are stored.
        bias: of the exponent.
    """

    bits: type[np.int16] | type[np.uint16] | type[np.int32]
    mantissa: int
    bias: int

    @property
    def infinity(self) -> int:
        """The bits of infinity; those of NaN are larger, without the sign."""
        return (2 * self.bias + 1) << self.mantissa


KINDS = {"BF16": Kind(np.int16, 7, 127), "F16": Kind(np.uint16, 10, 15), "F32": Kind(np.int32, 23, 127)}
"""By the names that safetensors gives them."""


@dataclass(frozen=True)
class Measures:
    """What a quantization did to a tensor. Sums are of finite blocks only, and right to a part in ten million.

    Attributes:
        signal: sum of squares of the elements.
        noise: sum of squares of the differences to what the codes mean.
        saturated: elements of a magnitude beyond 6 times their scale.
        zero_blocks: blocks of zeros.
        lowest, highest: among the scale bytes of all other blocks; 255 and 0 if there are none.
        bad_blocks: blocks that hold NaN or infinity.
        first_bad_row: the first row, of the tensor seen as a matrix, with such a block; None if there is none.
    """

    signal: float
    noise: float
    saturated: int
    zero_blocks: int
    lowest: int
    highest: int
    bad_blocks: int
    first_bad_row: int | None


class Rows:
    """What the kernel makes of rows of one type by one rule.

    Attributes:
        at_once: elements that are best read, quantized and written before the next ones are read.
    """

    at_once = 1 << 19  # which stay in the processor's cache meanwhile

    def __init__(self, kind: str, rule: str, *, measured: bool) -> None:
        """Prepare for numbers of a ``kind`` in :data:`KINDS` and a ``rule`` in :data:`mxq.formats.rules.RULES`."""
        chosen = scale_rule(rule)
        self._limits = _limits(kind, chosen.signed_zero)
        self._rule = (chosen.carry, chosen.finer, chosen.zero_byte)
        self._kernel = compiled(kind, measured)

    def quantize(
        self, bits: npt.NDArray[Any], packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8], threads: int = 1
    ) -> Measures:
        """Quantize rows; the measures are of no meaning where they were not asked for.

        Args:
            bits: [rows, K] integers as the kind says, elements of a row adjacent; K is a multiple of 32.
            packed: [rows, K/2], contiguous, is written.
            scale: [rows, K/32], contiguous, is written.
            threads: how many work on it; the result does not depend on it.
        """
        rows, columns = bits.shape
        step = max(1, _MEASURED_AT_ONCE // max(1, columns))
        addresses = (*(array.ctypes.data for array in (bits, packed, scale)), self._limits.ctypes.data)
        numbers = (*self._rule, bits.strides[0] // bits.itemsize, columns // BLOCK)

        def part(first: int) -> tuple[Any, Any]:
            sums, counts = _Sums(), _Counts()
            self._kernel(*addresses, sums, counts, *numbers, first, min(first + step, rows))
            return sums, counts

        return _measures(list((map if threads == 1 else _pool(threads).map)(part, range(0, rows, step))))


_Sums = ctypes.c_double * 2
_Counts = ctypes.c_int64 * len(COUNTS)


def _measures(parts: list[tuple[Any, Any]]) -> Measures:
    """Return the measures of all parts of a tensor, in order."""
    columns = list(zip(*(counts for _, counts in parts), strict=True)) or [()] * len(COUNTS)
    saturated, zero_blocks, bad_blocks, lowest, highest, first_bad_row = columns
    return Measures(
        signal=math.fsum(sums[0] for sums, _ in parts),
        noise=math.fsum(sums[1] for sums, _ in parts),
        saturated=sum(saturated),
        zero_blocks=sum(zero_blocks),
        lowest=min(lowest, default=NAN_BYTE),
        highest=max(highest, default=0),
        bad_blocks=sum(bad_blocks),
        first_bad_row=next((row for row in first_bad_row if row >= 0), None),
    )


@functools.lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "mxfp4")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads stay behind


@functools.lru_cache
def _limits(name: str, signed_zero: bool) -> npt.NDArray[Any]:
    """Return, for every scale byte, the largest bits that do not exceed each limit, and the scale: [256, 5] integers.

    Those of float16, whose elements are taken as float32, are that kind's. Nothing exceeds a limit of the bytes that no
    number is divided by, nor the scale.
    """
    kind = KINDS["F32" if name == "F16" else name]
    result = np.full((256, COLUMNS), np.iinfo(kind.bits).max, kind.bits)
    for byte in range(1, _LARGEST_BYTE + 1):
        scale = math.ldexp(1.0, byte - 127)
        for i, limit in enumerate(LIMITS):
            result[byte, i] = _largest_bits(limit * scale, kind, below=i % 2 == 1)
        # The bits of the scale, less those of 2 to the -126: so much are the bits of 1.0 above the code 2.
        result[byte, OFFSET] = (byte - 1) << kind.mantissa
        result[byte, SATURATED] = _largest_bits(6 * scale, kind, below=False)
    result[:, SIGN] = result[:, 0]
    if signed_zero:
        result[:NAN_BYTE, SIGN] = -1
    return result


def _largest_bits(value: float, kind: Kind, *, below: bool) -> int:
    """Return the bits of the largest number of a kind that is not above (or is below) a positive ``value``."""
    exponent = max(math.frexp(value)[1] - 1, 1 - kind.bias)
    steps = math.ldexp(value, kind.mantissa - exponent)  # exact: few bits, far from the ends of double precision
    bits = ((exponent + kind.bias - 1) << kind.mantissa) + math.floor(steps)
    return min(bits - (below and steps.is_integer()), kind.infinity - 1)
