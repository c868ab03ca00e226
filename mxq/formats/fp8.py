"""FP8 E4M3 with a scale for every block of a matrix, as numbers: what block-FP8 checkpoints mean.

A code is ``s eeee mmm`` (OCP 8-bit Floating Point 1.0, E4M3): (-1)^s 2^(e - 7) (1 + m/8), for e = 0 instead
(-1)^s 2^-6 m/8; 0x7F and 0xFF are NaN, and nothing is infinite. An element is its code's value times its block's
scale, multiplied in float32. That is exact where the scale is a bfloat16, as in Qwen's: 4 bits times 8.

A block has 256 values, however large it is. They are computed once, and elements look theirs up.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

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
    tables = _nearest_bfloat16(bits) if out.dtype == np.uint16 else bits
    with _once:  # however many threads ask for it at the same time
        kernel = _compiled()
    kernel(codes, tables, which, width, out)


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


_once = threading.Lock()


@functools.lru_cache
def _compiled() -> Callable[..., None]:
    """Return the kernel, from numba's cache where there is one: without a writable place numba refuses to look."""
    try:
        return njit(nogil=True, cache=True)(_look_up)
    except RuntimeError:
        return njit(nogil=True)(_look_up)


def _look_up(codes: Any, tables: Any, which: Any, width: int, out: Any) -> None:
    """Give every element of ``out`` its code's entry in the table of its block."""
    rows, columns = codes.shape
    for row in range(rows):
        for block in range(tables.shape[1]):
            table = tables[which[row], block]
            for column in range(block * width, min((block + 1) * width, columns)):
                out[row, column] = table[codes[row, column]]
