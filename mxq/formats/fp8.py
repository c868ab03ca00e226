"""FP8 E4M3 with a scale for every block of a matrix, as numbers: what block-FP8 checkpoints mean.

A code is ``s eeee mmm`` (OCP 8-bit Floating Point 1.0, E4M3): (-1)^s 2^(e - 7) (1 + m/8), for e = 0 instead
(-1)^s 2^-6 m/8; 0x7F and 0xFF are NaN, and nothing is infinite. An element is its code's value times its block's
scale, multiplied in float32. That is exact where the scale is a bfloat16, as in Qwen's: 4 bits times 8.

A block has 256 values, however large it is. They are computed once, and elements look theirs up.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from mxq.formats import machine_code

TYPES: dict[str, type[Any]] = {"F32": np.uint32, "BF16": np.uint16}
"""Types in which numbers are given, by the names of safetensors -> integers that hold their bits."""


def dequantize(
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    which: npt.NDArray[np.int64],
    width: int,
    out: npt.NDArray[Any],
) -> None:
    """Compute rows of numbers.

    Args:
        codes: [rows, K].
        scales: [rows of blocks, ceil(K / width)].
        which: [rows], for each the row of blocks that it is in.
        width: columns of a block.
        out: [rows, K], contiguous, is written: the bits of float32 or, as uint16, of the nearest bfloat16, ties to the
            even one.
    """
    with np.errstate(all="ignore"):
        bits = (values() * scales[..., None]).view(np.uint32)
    tables = np.ascontiguousarray(_nearest_bfloat16(bits) if out.dtype == np.uint16 else bits)
    codes, which = np.ascontiguousarray(codes), np.ascontiguousarray(which)
    addresses = (array.ctypes.data for array in (codes, tables, which, out))
    _compiled(out.itemsize * 8)(*addresses, *codes.shape, width, scales.shape[1])


@functools.lru_cache
def values() -> npt.NDArray[np.float32]:
    """Return what each of the 256 codes means."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def _nearest_bfloat16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Round the bits of float32; quiet NaN stays NaN."""
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


@functools.lru_cache
def _compiled(width: int) -> Callable[..., None]:
    """Return what gives every element its code's entry in the table of its block, for entries of so many bits.

    Its arguments are addresses of codes, tables [rows of blocks, blocks of a row, 256], which and out, then rows,
    columns, columns of a block and blocks of a row.
    """
    types = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
    return machine_code.function(f"fp8_{width}", lambda name: _source(name, width), Path(__file__).read_bytes(), types)


def _source(name: str, width: int) -> str:
    byte, entry, number = ir.IntType(8), ir.IntType(width), ir.IntType(64)
    pointers = [kind.as_pointer() for kind in (byte, entry, number, entry)]
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), pointers + [number] * 4), name)
    codes, tables, which, out, rows, columns, block_columns, blocks = function.args
    out.add_attribute("noalias")
    b = ir.IRBuilder(function.append_basic_block())
    with machine_code.loop(b, rows) as row, machine_code.loop(b, blocks) as block:
        number_of_table = b.add(b.mul(b.load(b.gep(which, [row])), blocks), block)
        table = b.gep(tables, [b.mul(number_of_table, number(256))])
        start = b.mul(block, block_columns)
        left = b.sub(columns, start)
        count = b.select(b.icmp_signed("<", left, block_columns), left, block_columns)
        place = b.add(b.mul(row, columns), start)
        with machine_code.loop(b, count) as column:
            at = b.add(place, column)
            code = b.zext(b.load(b.gep(codes, [at])), number)
            b.store(b.load(b.gep(table, [code])), b.gep(out, [at]))
    b.ret_void()
    return str(function.module)
