"""E8M0, the scales of MXFP4, and how a block gets one.

A byte b means 2^(b - 127), 255 means NaN. Here scales are float32 powers of two by their bits (int32), b << 23: byte 0,
which would be 2^-127, is written by none of these functions, and infinity stands for NaN.
"""

import math

import torch
from torch import Tensor

from mxq.formats import elements
from mxq.formats.rules import RULES, scale_rule

_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)  # the exponent field; as a value, infinity
_TWO_BINADES = torch.tensor(2 << 23, dtype=torch.int32)
_INVERSE = torch.tensor(254 << 23, dtype=torch.int32)  # minus the bits of a power of two: the bits of its reciprocal
_CARRY = {name: torch.tensor(rule.carry, dtype=torch.int32) for name, rule in RULES.items()}
_ONE = torch.tensor(127 << 23, dtype=torch.int32)
_BINADE = 1 << 23
_SMALLEST = 1 << 23  # 2^-126, scale byte 1
_VALUES = (*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan)


def values(scale: Tensor) -> Tensor:
    """Return the powers of two (float32) that scale bytes (uint8) stand for, NaN for 255."""
    return torch.tensor(_VALUES, device=scale.device)[scale.int()]


def scale_bits(blocks: Tensor, rule: str) -> Tensor:
    """Return the scales [..., 1] (int32, bits of float32) of ``blocks`` (float32 [..., 32]) by a rule's name.

    A block of zeros gets the smallest scale, one that holds NaN or infinity gets infinity.

    Raises:
        ValueError: the rule is unknown.
    """
    finer = scale_rule(rule).finer
    amax = blocks.abs().amax(dim=-1, keepdim=True).view(torch.int32)
    scale = (((amax + _CARRY[rule]) & _EXPONENT) - _TWO_BINADES).clamp_(min=_SMALLEST)
    if finer:
        scale = _lowest_error(blocks, scale, finer)
    return torch.where(amax < _EXPONENT, scale, _EXPONENT)


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale (float32) from a scale's bits; -infinity for infinity, so that no element stays finite."""
    return (_INVERSE - scale).view(torch.float32)


def _lowest_error(blocks: Tensor, scale: Tensor, finer: int) -> Tensor:
    """Return, of ``scale`` and the ``finer`` scales below it, that of the lowest squared error, the first of equals."""
    # In units of `scale` everything but the sums fits into a float32; `rules` says why the sums are exact.
    y = blocks * reciprocal(scale)
    first = elements.rounded(y)
    best, gain = scale, torch.zeros(scale.shape, dtype=torch.float64, device=scale.device)
    for step in range(1, finer + 1):
        candidate = (scale - step * _BINADE).clamp_(min=_SMALLEST)
        shrink = (_ONE - (scale - candidate)).view(torch.float32)
        value = elements.rounded(blocks * reciprocal(candidate)) * shrink
        candidate_gain = ((first - value).double() * (first + value - 2 * y)).sum(dim=-1, keepdim=True)
        better = candidate_gain > gain
        best, gain = torch.where(better, candidate, best), torch.where(better, candidate_gain, gain)
    return best
