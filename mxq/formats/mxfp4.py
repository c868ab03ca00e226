"""OCP MXFP4: blocks of 32 four-bit floats that share one power-of-two scale.

The format (OCP Microscaling Formats v1.0, section 5)::

    element  E2M1   sign, 2 exponent bits, 1 mantissa bit: :mod:`mxq.formats.elements`
    scale    E8M0   one byte b per block means 2^(b - 127); 255 means NaN
    block           32 consecutive elements of the last axis
    value           element * 2^(b - 127)

In memory, and in a checkpoint, a tensor of shape [..., K] becomes two uint8 tensors: the packed codes [..., K/2], where
the low nibble holds the even element, and the scales [..., K/32]. K must be a multiple of 32: padding would put blocks
into a checkpoint that no engine expects.

How a block's scale follows from its elements is a rule with a name: :mod:`mxq.formats.rules`. Elements are divided by
the scale that is stored, and rounded: to nearest, ties to the even code, saturating at +-6.

What happens at the edges:

* A negative value that rounds to zero, and -0, gets code 0, as in Quark: code 8 is never written. ``rceil`` keeps the
  sign, as AITER does.
* A block of zeros gets the scale byte that the rule's author writes: 1 for ``even``, 104 for Quark's ``floor``,
  ``ceil`` and ``diffs``, 0 for AITER's ``rceil``; ``mse`` writes 1.
* Other blocks get bytes from 1 to 253: where a rule asks for less than 2^-126 the scale stays at 2^-126. (Quark divides
  by 2^-127 there but stores byte 1, which decodes to twice the value, and its ``even`` stores 254 instead of 253 where
  the largest magnitude is at least 1.75 * 2^127. AITER stores 0 there, and 254 or 255.)
* A block that holds NaN or infinity gets scale byte 255 and decodes to NaN, all of it: bad numbers stay visible.
  ``mxq quantize`` refuses such a weight; here it matters for activations.

Everything is exact: scaling by a power of two loses nothing that survives the rounding to four bits, and rules compare
errors exactly, so the results are the same on every device.
"""

import torch
from torch import Tensor

from mxq.formats import elements
from mxq.formats.rules import BLOCK, scale_rule
from mxq.formats.scales import reciprocal, scale_bits
from mxq.formats.scales import values as scale_values

__all__ = ["BLOCK", "dequantize", "fake_quantize", "quantize", "scale_values"]

_SMALLEST_BYTE = 1


def quantize(x: Tensor, rule: str = "even") -> tuple[Tensor, Tensor]:
    """Quantize ``x`` along its last axis.

    Args:
        x: [..., K] in bfloat16, float16 or float32; K is a multiple of 32.
        rule: a name in :data:`mxq.formats.rules.RULES`.

    Returns:
        (packed, scale): uint8 [..., K/2] and uint8 [..., K/32], on the device of ``x``.

    Raises:
        ValueError: K is not a multiple of 32, or the rule is unknown.
        TypeError: ``x`` is of another type.
    """
    blocks = _blocks(x)
    scale = scale_bits(blocks, rule)
    # A block of NaN or infinity is all NaN and infinity here; its codes mean nothing, so they are zeros everywhere.
    y = torch.nan_to_num(blocks * reciprocal(scale), nan=0.0, posinf=0.0, neginf=0.0)
    code = elements.encode(y, signed_zero=scale_rule(rule).signed_zero)
    pairs = code.to(torch.uint8).view(*x.shape[:-1], x.shape[-1] // 2, 2)
    byte = (scale >> 23).to(torch.uint8).squeeze(-1)
    zero_byte = scale_rule(rule).zero_byte
    if zero_byte != _SMALLEST_BYTE:
        byte.masked_fill_(blocks.abs().amax(dim=-1) == 0, zero_byte)
    return pairs[..., 0] | pairs[..., 1] << 4, byte


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values [..., K] of ``packed`` uint8 [..., K/2] with ``scale`` uint8 [..., K/32].

    bfloat16 and float32 hold every one of them exactly, but for those of 2^128 and above, which become infinity.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ValueError(f"packed {list(packed.shape)} and scale {list(scale.shape)} do not belong together")
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).int()
    values = torch.tensor(elements.VALUES, device=packed.device)[codes].view(*scale.shape, BLOCK)
    return (values * scale_values(scale).unsqueeze(-1)).to(dtype).view(*packed.shape[:-1], packed.shape[-1] * 2)


def fake_quantize(x: Tensor, rule: str = "even") -> Tensor:
    """Return ``dequantize(*quantize(x), x.dtype)`` without making the bytes: what an MXFP4 linear does to its input.

    It runs before every quantized linear of every step, so it is few operations and no tables.

    Args:
        x: [..., K] in bfloat16, float16 or float32; K is a multiple of 32.
        rule: as for :func:`quantize`.

    Raises:
        ValueError, TypeError: as :func:`quantize`.
    """
    blocks = _blocks(x)
    scale = scale_bits(blocks, rule)
    y = blocks * reciprocal(scale)
    value = elements.rounded(y)
    if scale_rule(rule).signed_zero:
        value = value.copysign_(y)
    return value.mul_(scale.view(torch.float32)).to(x.dtype).view(x.shape)


def _blocks(x: Tensor) -> Tensor:
    """Return ``x`` [..., K] as float32 [..., K/32, 32]."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"MXFP4 is made from bfloat16, float16 or float32, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"the last axis of {list(x.shape)} is not a multiple of {BLOCK}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).float()
