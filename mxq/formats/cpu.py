"""MXFP4 on a CPU: the bytes of :func:`mxq.formats.mxfp4.quantize`, and the error with them, in one pass over memory.

The kernel (:mod:`mxq.formats.cpu_kernel`) never computes with the numbers it rounds. As integers, the bits of floats
without their sign are ordered as the magnitudes are, so an element's code is how many of seven limits its bits exceed.
Where a limit lies at a scale is computed here, exactly, per type, ties included.

Threads are Python's: the kernel holds no lock.
"""

import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mxq.formats.cpu_kernel import COLUMNS, LIMITS, NAN_BYTE, SATURATED, SIGN, compiled
from mxq.formats.mxfp4 import BLOCK
from mxq.formats.rules import scale_rule

_LARGEST_BYTE = 253
# Integers stand for the types: their width, and signed for bfloat16, unsigned for float16.
_BITS = {torch.bfloat16: np.int16, torch.float16: np.uint16, torch.float32: np.int32}


@dataclass(frozen=True)
class Measures:
    """What a quantization did to a tensor. Sums are of finite blocks only.

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


def quantize(
    x: Tensor, rule: str = "even", *, threads: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` along its last axis, as :func:`mxq.formats.mxfp4.quantize` does and to the same bytes.

    Args:
        x: [..., K] in bfloat16, float16 or float32 on the CPU, of any strides (a copy is made where elements of a row
            are not adjacent); K is a multiple of 32.
        rule: a name in :data:`mxq.formats.rules.RULES`.
        threads: how many work on it.
        out: what an earlier call returned for a tensor of this shape, to be written again: memory that the system
            has to find first takes longer than the quantization.

    Returns:
        (packed, scale): uint8 [..., K/2] and uint8 [..., K/32], contiguous.

    Raises:
        ValueError: K is not a multiple of 32, the rule is unknown, or ``out`` does not fit.
        TypeError: ``x`` is of another type.
    """
    packed, scale, _ = _quantize(x, rule, threads, out, measured=False)
    return packed, scale


def quantize_measured(
    x: Tensor, rule: str = "even", *, threads: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Measures]:
    """:func:`quantize`, and what it did to the numbers, which does not depend on ``threads`` either."""
    packed, scale, (sums, counts) = _quantize(x, rule, threads, out, measured=True)
    bad = np.flatnonzero(counts[:, 2])
    measures = Measures(
        signal=math.fsum(sums[:, 0]),
        noise=math.fsum(sums[:, 1]),
        saturated=int(counts[:, 0].sum()),
        zero_blocks=int(counts[:, 1].sum()),
        bad_blocks=int(counts[:, 2].sum()),
        lowest=int(counts[:, 3].min(initial=NAN_BYTE)),
        highest=int(counts[:, 4].max(initial=0)),
        first_bad_row=int(bad[0]) if bad.size else None,
    )
    return packed, scale, measures


def _quantize(
    x: Tensor, rule: str, threads: int, out: tuple[Tensor, Tensor] | None, *, measured: bool
) -> tuple[Tensor, Tensor, tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
    """Return codes, scales and, per row, the sums [n, 2] and counts [n, 5] that Measures are made of."""
    chosen = scale_rule(rule)
    if x.dtype not in _BITS:
        raise TypeError(f"MXFP4 is made from bfloat16, float16 or float32, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"the last axis of {list(x.shape)} is not a multiple of {BLOCK}")
    columns = x.shape[-1]
    shapes = [(*x.shape[:-1], columns // per_byte) for per_byte in (2, BLOCK)]
    packed, scale = out or (torch.empty(shape, dtype=torch.uint8) for shape in shapes)
    for tensor, shape in zip((packed, scale), shapes, strict=True):
        if tensor.shape != shape or tensor.dtype != torch.uint8 or not tensor.is_contiguous():
            raise ValueError(f"out is {tensor.dtype} {list(tensor.shape)}, not contiguous uint8 {list(shape)}")
    count = math.prod(x.shape[:-1]) if columns else 0
    sums, counts = np.zeros((count, 2)), np.zeros((count, 5), np.int64)
    counts[:, 3] = NAN_BYTE
    if count == 0:
        return packed, scale, (sums, counts)
    rows = x.detach().reshape(count, columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    arguments = (
        rows.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy().view(_BITS[x.dtype]),
        packed.view(count, -1).numpy(),
        scale.view(count, -1).numpy(),
        _limits(x.dtype, chosen.signed_zero),
        sums,
        counts,
        np.array([chosen.carry, chosen.finer, chosen.zero_byte], np.int32),
    )
    kernel = compiled(measured)
    parts = min(threads, count)
    if parts == 1:
        kernel(*arguments, 0, count)
    else:
        edges = [count * part // parts for part in range(parts + 1)]
        for done in [_pool(threads).submit(kernel, *arguments, *edges[i : i + 2]) for i in range(parts)]:
            done.result()
    return packed, scale, (sums, counts)


@functools.lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "mxfp4")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads stay behind


@functools.lru_cache
def _limits(dtype: torch.dtype, signed_zero: bool) -> npt.NDArray[Any]:
    """Return, for every scale byte, the largest bits that do not exceed each limit, in the type's integers.

    It is [256, 9, 32]: 32 times the same, as whole vectors to compare with. No magnitude exceeds a limit of bytes that
    no number is divided by.
    """
    integer = np.iinfo(np.int32 if dtype == torch.float32 else np.int16)
    result = np.full((256, COLUMNS), integer.max, np.int64)
    for byte in range(1, _LARGEST_BYTE + 1):
        scale = math.ldexp(1.0, byte - 127)
        for i, limit in enumerate(LIMITS):
            result[byte, i] = _largest_bits(limit * scale, dtype, below=i % 2 == 1)
        result[byte, SATURATED] = _largest_bits(6 * scale, dtype, below=False)
    result[:, SIGN] = result[:, 0]
    if signed_zero:
        result[:NAN_BYTE, SIGN] = -1
    return np.repeat(result.astype(_BITS[dtype])[..., None], BLOCK, axis=-1)


def _largest_bits(value: float, dtype: torch.dtype, *, below: bool) -> int:
    """Return the bits of the largest ``dtype`` number not above (or below) a power of two times up to three bits."""
    exact = torch.tensor(value, dtype=torch.float64)
    rounded = exact.to(dtype)
    bits = int(rounded.view(torch.int32 if dtype == torch.float32 else torch.int16))
    too_large = rounded.double() >= exact if below else rounded.double() > exact
    return bits - 1 if too_large else bits
