"""MXFP4 to bfloat16 on a CPU: the bits of :func:`mxq.formats.mxfp4.dequantize`, several times as fast.

A byte of codes is two elements, which a table of 256 gives in bfloat16; one multiplication gives them their scale.

Why bfloat16 holds every value that is not too large: an element is 0 or +-m * 2^k with m 1 or 3 and k from -1 to 2, a
scale is 2^(b - 127). So a value has two significant bits, of bfloat16's eight, and its last bit stands for 2^-128 or
more, where bfloat16's subnormal numbers reach down to 2^-133. Values below 2^-126, which take a scale byte of 0 or 1,
are subnormal: exact here, but zero in an engine that flushes such numbers. What does not fit are magnitudes of 2^128 or
more: elements from 4 on under byte 253, and from 2 on under byte 254. They become infinity, and byte 255 makes NaN.
"""

import functools

import torch
from torch import Tensor

from mxq.formats import elements, scales
from mxq.formats.mxfp4 import BLOCK

SAFE_BYTE = 252
"""The largest scale byte under which every value is finite."""


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """Return the values [N, K] (bfloat16) of ``packed`` uint8 [N, K/2] with ``scale`` uint8 [N, K/32], on the CPU.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ValueError(f"packed {list(packed.shape)} and scale {list(scale.shape)} do not belong together")
    pairs, powers = _tables()
    values = torch.index_select(pairs, 0, packed.reshape(-1).int()).view(torch.bfloat16)
    values.view(-1, BLOCK).mul_(torch.index_select(powers, 0, scale.reshape(-1).int()).unsqueeze(-1))
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2)


@functools.lru_cache
def _tables() -> tuple[Tensor, Tensor]:
    """Return what a byte of codes means, two bfloat16 as one int32, and what a scale byte means (bfloat16)."""
    byte = torch.arange(256)
    values = torch.tensor(elements.VALUES, dtype=torch.bfloat16)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    return pairs.view(torch.int32).view(-1), scales.values(byte).bfloat16()
