"""OCP MXFP4: blocks of 32 four-bit floats that share one power-of-two scale.

The format (OCP Microscaling Formats v1.0, section 5)::

    element  E2M1   sign, 2 exponent bits (bias 1), 1 mantissa bit; code = sign << 3 | exponent << 1 | mantissa
                    codes 0..7 mean 0, 0.5, 1, 1.5, 2, 3, 4, 6; there is no infinity and no NaN
    scale    E8M0   one byte b per block means 2^(b - 127); 255 means NaN
    block           32 consecutive elements of the last axis
    value           element * 2^(b - 127)

In memory, and in a checkpoint, a tensor of shape [..., K] becomes two uint8 tensors: the packed codes [..., K/2], where
the low nibble holds the even element, and the scales [..., K/32]. K must be a multiple of 32: padding would put blocks
into a checkpoint that no engine expects.

The scale rule ``even`` rounds a block's largest magnitude to one mantissa bit, half up, before taking its exponent:
amax in [1.75 * 2^n, 3.5 * 2^n) gets the scale 2^(n - 1), so that amax / scale lies in [3.5, 7). It is the rule of AMD
Quark's presets, and of torchao (EVEN) and compressed-tensors. OCP's own rule, floor(log2(amax)) - 2, lets amax / scale
reach 8 and so saturates more.

What happens at the edges:

* Elements are rounded to nearest, ties to the even code, and saturate at +-6.
* Zero is always +0: a negative value that rounds to zero gets code 0, and code 8 is never written, as in Quark.
* A block of zeros gets scale byte 1, as in Quark. Byte 0 is never written: where ``even`` asks for less than 2^-126 the
  scale stays at 2^-126, and elements are divided by that same scale. (Quark divides by 2^-127 there but stores byte 1,
  which decodes to twice the value. It also stores 254 instead of 253 where amax is at least 1.75 * 2^127.)
* A block that holds NaN or infinity gets scale byte 255 and decodes to NaN, all of it: bad numbers stay visible.
  ``mxq quantize`` refuses such a weight; here it matters for activations.

Everything is exact: scaling by a power of two loses nothing that survives the rounding to four bits, so the results are
the same on every device.
"""

import math

import torch
from torch import Tensor

BLOCK = 32
"""Elements that share one scale."""

# Bits of float32 values. Operands are tensors because PyTorch takes twice as long over a Python number, and on the few
# rows of a decode step that is most of what fake_quantize costs; of zero dimensions, they work beside any device's.
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)  # the exponent field; as a value, infinity
_QUARTER = torch.tensor(1 << 21, dtype=torch.int32)  # a quarter of the mantissa's range
_TWO_BINADES = torch.tensor(2 << 23, dtype=torch.int32)
_INVERSE = torch.tensor(254 << 23, dtype=torch.int32)  # minus the bits of a power of two: the bits of its reciprocal
# Adding 1.5 * 2^22 * b to a float32 of magnitude in [b, 2b) rounds it, ties to even, to a multiple of b / 2: E2M1's one
# mantissa bit. The result counts those steps in its low bits.
_MAGIC = torch.tensor(1.5 * 2**22)
_ONE = 127 << 23
_SMALLEST_SCALE = 1 << 23  # 2^-126, scale byte 1
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
_SCALES = (*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan)


def quantize(x: Tensor, rule: str = "even") -> tuple[Tensor, Tensor]:
    """Quantize ``x`` along its last axis.

    Args:
        x: [..., K] in bfloat16, float16 or float32; K is a multiple of 32.
        rule: how a block's scale follows from its largest magnitude; ``even`` is the one there is.

    Returns:
        (packed, scale): uint8 [..., K/2] and uint8 [..., K/32], on the device of ``x``.

    Raises:
        ValueError: K is not a multiple of 32, or the rule is unknown.
        TypeError: ``x`` is of another type.
    """
    blocks = _blocks(x)
    scale = _scale_bits(blocks, rule)
    # A block of NaN or infinity is all NaN and infinity here; its codes mean nothing, so they are zeros everywhere.
    y = torch.nan_to_num(blocks * _reciprocal(scale), nan=0.0, posinf=0.0, neginf=0.0)
    magnitude = y.abs()
    binade = _binade(magnitude)
    steps = (magnitude + binade.view(torch.float32) * _MAGIC).view(torch.int32) & 7
    code = (steps + ((binade - _ONE) >> 22)).clamp_(max=7)  # each binade above 1 starts two codes later
    code |= ((y < 0) & (code > 0)).int() << 3
    pairs = code.to(torch.uint8).view(*x.shape[:-1], x.shape[-1] // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, (scale >> 23).to(torch.uint8).squeeze(-1)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values [..., K] of ``packed`` uint8 [..., K/2] with ``scale`` uint8 [..., K/32].

    bfloat16 and float32 hold every one of them exactly, but for those of 2^128 and above, which become infinity.

    Raises:
        ValueError: the shapes do not belong together.
    """
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ValueError(f"packed {list(packed.shape)} and scale {list(scale.shape)} do not belong together")
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).int()
    elements = torch.tensor(_VALUES, device=packed.device)[codes].view(*scale.shape, BLOCK)
    return (elements * scale_values(scale).unsqueeze(-1)).to(dtype).view(*packed.shape[:-1], packed.shape[-1] * 2)


def scale_values(scale: Tensor) -> Tensor:
    """Return the powers of two (float32) that scale bytes (uint8) stand for, NaN for 255."""
    return torch.tensor(_SCALES, device=scale.device)[scale.int()]


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
    scale = _scale_bits(blocks, rule)
    y = blocks * _reciprocal(scale)
    magic = _binade(y).view(torch.float32).mul_(_MAGIC)
    y = (y + magic).sub_(magic).clamp_(-6.0, 6.0).mul_(scale.view(torch.float32))
    return y.to(x.dtype).view(x.shape)


def _blocks(x: Tensor) -> Tensor:
    """Return ``x`` [..., K] as float32 [..., K/32, 32]."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"MXFP4 is made from bfloat16, float16 or float32, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"the last axis of {list(x.shape)} is not a multiple of {BLOCK}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK).float()


def _scale_bits(blocks: Tensor, rule: str) -> Tensor:
    """Return the scales [..., 1] of ``blocks`` as bits of float32 powers of two (int32): the byte, shifted by 23."""
    if rule != "even":
        raise ValueError(f"unknown scale rule {rule!r}; the one there is is 'even'")
    amax = blocks.abs().amax(dim=-1, keepdim=True).view(torch.int32)
    rounded = (amax + _QUARTER) & _EXPONENT  # a mantissa of 1.75 and above carries into the next binade
    finite = (rounded - _TWO_BINADES).clamp_(min=_SMALLEST_SCALE)
    return torch.where(amax < _EXPONENT, finite, _EXPONENT)


def _reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale from the scale's bits; -infinity for byte 255, which leaves no finite number in its block."""
    return (_INVERSE - scale).view(torch.float32)


def _binade(y: Tensor) -> Tensor:
    """Return the bits of the largest power of two not above ``|y|``, but 1 where that is below 1 (int32)."""
    return (y.view(torch.int32) & _EXPONENT).clamp_(min=_ONE)
