"""Scale rules: which power of two a block of 32 gets.

Let m = max |x| of a block, and x the block's elements. E2M1 ends at 6, with 4 the largest power of two below (OCP
Microscaling Formats v1.0: emax = 2). The rules, and whose they are::

    floor   2^floor(log2 m) / 4    OCP v1.0 section 6.3; torchao FLOOR    m / scale in [4, 8): saturates
    even    the same after m is rounded to one mantissa bit, half up      m / scale in [3.5, 7): saturates
            AMD Quark's presets; torchao EVEN; compressed-tensors; AITER's Triton kernels
    rceil   2^ceil(log2(m / 6))    AITER from 0.1.16; torchao RCEIL       m / scale in (3, 6]
    ceil    2^ceil(log2 m) / 4     Quark's and AITER's option             m / scale in (2, 4]
    diffs   of ceil's scale and the next finer one, that with the lower sum of (x - its code's value)^2
            Quark's OCP_MXFP4DiffsSpec
    mse     the same of ceil's scale and the two next finer ones

The first four add a constant to the bits of m as a float32, so that mantissas from some point on carry into the next
binade, and take the exponent: a rule is its ``carry``. AITER divides m by 6 in float32 before it looks for the power of
two; every mantissa gives the same as ``carry``.

``mse`` needs no more candidates: no scale at all has a lower squared error. In a unit that puts m in [4, 8), ceil's
scale is 2, or 1 if m is 4. Coarser ones only lose codes: those of 4 up to 8 are among those of 2, and those of 2 up to
4 among those of 1. At a quarter or less codes end at 1.5: against 1 that costs at least 6.25 on the largest element,
and no other can have gained more than 0.25^2.

A tie keeps the coarser scale. Errors are compared exactly, whatever the order of the sum: with a and b the values of
an element's codes at two scales, the difference of the squared errors is the sum of (a - b)(a + b - 2x), in which
elements that are zero at both vanish. In units of ceil's scale what is left is less than 2^8 and a multiple of 2^-13
for bfloat16, 2^-16 for float16 and 2^-29 for float32, so that a float32 (for float32 elements a float64) holds every
sum.

Where Quark differs, and is not followed:

* It takes logarithms in the type of x. In bfloat16 ``floor``, ``ceil`` and ``diffs`` start a binade off for some m
  close to a power of two (0.6 % and 0.2 % of Gaussian blocks for the first two); in float32 ``floor`` does in the last
  places below a power of two.
* Its ``diffs`` sums squares in the type of x. Where they overflow or vanish (m beyond about 2^+-60) it keeps ceil's
  scale uncompared; in bfloat16, rounding decides between scales that are almost equally good (with the above, 0.04 %
  of Gaussian blocks).

All rules keep a scale in [2^-126, 2^126]: see :mod:`mxq.formats.mxfp4` for the edges.
"""

from dataclasses import dataclass

BLOCK = 32
"""Elements that share one scale."""

NAN_BYTE = 255
"""The scale of a block that holds NaN or infinity; its codes mean nothing."""


@dataclass(frozen=True)
class ScaleRule:
    """A scale rule.

    Attributes:
        carry: added to the bits of a block's largest magnitude (a float32) before its exponent is taken, which two less
            is the scale's.
        finer: how many scales below that one are tried for a lower squared error.
        zero_byte: the scale byte of a block of zeros: what the rule's author writes, which may be one that no other
            block gets.
        signed_zero: whether a negative value that rounds to zero, and -0, becomes code 8 (-0) instead of 0.
    """

    carry: int
    finer: int = 0
    zero_byte: int = 1
    signed_zero: bool = False


_CEIL = (1 << 23) - 1  # anything above a power of two
_QUARK_EPS = 104  # 2^-23

RULES = {
    "even": ScaleRule(carry=1 << 21),  # mantissas from 1.75
    "floor": ScaleRule(carry=0, zero_byte=_QUARK_EPS),
    "ceil": ScaleRule(carry=_CEIL, zero_byte=_QUARK_EPS),
    "rceil": ScaleRule(carry=(1 << 22) - 1, zero_byte=0, signed_zero=True),  # mantissas above 1.5
    "diffs": ScaleRule(carry=_CEIL, finer=1, zero_byte=_QUARK_EPS),
    "mse": ScaleRule(carry=_CEIL, finer=2),
}
"""The rules by name. ``rceil`` writes zeros as AITER does, the others as Quark does."""


def scale_rule(name: str) -> ScaleRule:
    """Return the rule of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in RULES:
        raise ValueError(f"unknown scale rule {name!r}; use one of {', '.join(RULES)}")
    return RULES[name]
