"""E2M1, the elements of MXFP4: four bits, sign << 3 | exponent << 1 | mantissa, exponent bias 1.

Codes 0..7 mean 0, 0.5, 1, 1.5, 2, 3, 4, 6 and codes 8..15 their negatives; there is no infinity and no NaN. Values are
rounded to nearest, ties to the even code, and saturate at +-6 (OCP Microscaling Formats v1.0, section 5.3.3).
"""

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
"""What the sixteen codes mean."""

# Operands are tensors because PyTorch takes twice as long over a Python number, and on the few rows of a decode step
# that is most of what fake_quantize costs; of zero dimensions, they work beside any device's.
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)  # a float32's exponent field
# Adding 1.5 * 2^22 * b to a float32 of magnitude in [b, 2b) rounds it, ties to even, to a multiple of b / 2: E2M1's one
# mantissa bit. The result counts those steps in its low bits.
_MAGIC = torch.tensor(1.5 * 2**22)
_ONE = 127 << 23


def encode(y: Tensor, *, signed_zero: bool) -> Tensor:
    """Return the codes (int32) of ``y``.

    Args:
        y: float32 of magnitude below 2^100, of any shape.
        signed_zero: whether -0, and what rounds to it, gets code 8 instead of 0.
    """
    magnitude = y.abs()
    binade = _binade(magnitude)
    steps = (magnitude + binade.view(torch.float32) * _MAGIC).view(torch.int32) & 7
    code = (steps + ((binade - _ONE) >> 22)).clamp_(max=7)  # each binade above 1 starts two codes later
    negative = torch.signbit(y) if signed_zero else (y < 0) & (code > 0)
    code |= negative.int() << 3
    return code


def rounded(y: Tensor) -> Tensor:
    """Return the values (float32) that the codes of ``y`` mean, zeros as +0, and NaN where ``y`` is not finite.

    Args:
        y: float32 of magnitude below 2^100 or not finite, of any shape.
    """
    magic = _binade(y).view(torch.float32).mul_(_MAGIC)
    return (y + magic).sub_(magic).clamp_(-6.0, 6.0)


def _binade(y: Tensor) -> Tensor:
    """Return the bits of the largest power of two not above ``|y|``, but 1 where that is below 1 (int32)."""
    return (y.view(torch.int32) & _EXPONENT).clamp_(min=_ONE)
