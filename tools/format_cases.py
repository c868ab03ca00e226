"""Tensors on which MXFP4 kernels could go wrong, and ways to lay them out: for the tests and for bench_formats.py."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# In units of the scale: codes, the points halfway between them, and where the rules change their minds about the scale.
_POINTS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)
_LARGEST = (2.0, 3.0, 3.5, 4.0, 6.0, 7.0)


def numbers(dtype: torch.dtype, *, every: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors [n, K] of ``dtype`` on the CPU, K being a multiple of 32.

    Args:
        dtype: bfloat16, float16 or float32.
        every: take one in so many of the scales, for kernels that run slowly.
    """
    random = torch.Generator().manual_seed(20)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    yield "normal", (0.02 * torch.randn(67, 224, generator=random)).to(dtype)
    yield "heavy tails", (torch.randn(64, 96, generator=random) / torch.rand(64, 96, generator=random)).to(dtype)
    yield "few values", (torch.randint(-16, 17, (256, 64), generator=random) / 4).to(dtype)  # errors that are equal
    yield "one row", torch.randn(1, 32, generator=random).to(dtype)
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max
    yield "random bits", torch.randint(low, high, (512, 64), generator=random, dtype=integer).view(dtype)
    yield "edges", _edges(dtype)
    yield "rounding boundaries", _boundaries(dtype, every)
    if dtype != torch.float32:
        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        yield "every pattern", patterns.view(dtype).view(-1, 32)
        yield "every pattern, shuffled", patterns[torch.randperm(1 << 16, generator=random)].view(dtype).view(-1, 64)
        yield "every magnitude at every scale", _magnitudes(dtype, every)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "odd address": lambda x: x.new_zeros(x.numel() + 1)[1:].view_as(x).copy_(x),
    "rows apart": lambda x: x.new_zeros(2 * x.shape[0], x.shape[1])[::2].copy_(x),
    "columns of a wider matrix": lambda x: x.new_zeros(x.shape[0], x.shape[1] + 64)[:, 32:-32].copy_(x),
    "odd rows": lambda x: x.new_zeros(x.shape[0], x.shape[1] + 33)[:, 2:-31].copy_(x),
    "columns apart": lambda x: x.new_zeros(x.shape[0], 3 * x.shape[1])[:, ::3].copy_(x),
    "transposed": lambda x: x.T.contiguous().T,
    "axes swapped": lambda x: torch.stack([x, x.flip(0), x.flip(1)]).transpose(0, 1),
    "repeated": lambda x: x[:, None].expand(-1, 2, -1),
    "one axis": lambda x: x.reshape(-1),
    "empty": lambda x: x[:0],
}
"""How else the numbers of a matrix [n, K] can lie in memory. Not all keep its shape."""


def _edges(dtype: torch.dtype) -> Tensor:
    limits = torch.finfo(dtype)
    blocks = torch.zeros(24, 32)
    blocks[1] = -0.0
    blocks[2, ::2] = -0.0
    blocks[3, 7] = limits.max
    blocks[4] = limits.min
    blocks[5, 31] = limits.smallest_normal
    blocks[6] = -limits.smallest_normal
    blocks[7] = torch.arange(32) * limits.smallest_normal * limits.eps  # subnormal
    blocks[8, 0] = -limits.smallest_normal * limits.eps
    for row, bad in zip(range(9, 18, 3), (torch.nan, torch.inf, -torch.inf), strict=True):
        blocks[row] = bad
        blocks[row + 1, 0] = bad
        blocks[row + 2] = 1.0
        blocks[row + 2, 31] = bad
    blocks[18] = torch.tensor([6.0, -0.2] * 16)  # negative and rounds to zero
    blocks[19, 5] = -1.0
    blocks[20] = 1.0
    blocks[21] = torch.arange(32) - 16.0
    return blocks.to(dtype)


def _boundaries(dtype: torch.dtype, every: int) -> Tensor:
    """Points of _POINTS and their neighbours in ``dtype``, below every largest element, at every scale."""
    near = _neighbours(torch.tensor(_POINTS).to(dtype)).double()
    largest = _neighbours(torch.tensor(_LARGEST).to(dtype)).double()
    return _at_every_scale(torch.cat([_blocks(near, value) for value in largest.tolist()]), dtype, every)


def _magnitudes(dtype: torch.dtype, every: int) -> Tensor:
    """Everything that ``dtype`` holds from 1/32 of a largest element up to it, at every scale."""
    finite = torch.arange(1 << 15, dtype=torch.int16).view(dtype).double()
    blocks = [_blocks(finite[finite >= value / 32], value) for value in (3.5, 4.0, 7.0)]
    return _at_every_scale(torch.cat(blocks), dtype, every)


def _blocks(magnitudes: Tensor, largest: float) -> Tensor:
    """Return blocks [n, 32] that begin with ``largest`` and together hold both signs of all smaller magnitudes."""
    smaller = magnitudes[magnitudes <= largest]
    signed = torch.cat([smaller, -smaller, smaller.new_zeros(-2 * len(smaller) % 31)]).view(-1, 31)
    return torch.cat([signed.new_full((len(signed), 1), largest), signed], dim=1)


def _at_every_scale(blocks: Tensor, dtype: torch.dtype, every: int) -> Tensor:
    return torch.cat([(blocks * 2.0**exponent).to(dtype) for exponent in _exponents(dtype)[::every]])


def _exponents(dtype: torch.dtype) -> list[int]:
    return list(range(-16, 14)) if dtype == torch.float16 else list(range(-128, 126))


def _neighbours(x: Tensor) -> Tensor:
    """Return positive ``x`` with the numbers of its type just below and above each."""
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    bits = x.view(integer)
    return torch.stack([bits - 1, bits, bits + 1], dim=1).view(-1).to(integer).view(x.dtype)
