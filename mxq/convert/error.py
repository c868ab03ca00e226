"""How far a quantized weight is from what it was made of."""

import math
from typing import Any

import torch

from mxq.formats import mxfp4

_BIAS = 127


class ErrorMeter:
    """Adds up the quantization error of one weight over chunks of its rows."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0
        self._saturated = self._blocks = self._zero_blocks = 0
        self._lowest, self._highest = 255, 0

    def add(self, x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> None:
        """Take in rows ``x`` [n, K] and what they became: ``packed`` [n, K/2] and ``scale`` [n, K/32]."""
        exact = x.float()
        self._signal += _energy(exact)
        self._noise += _energy(exact - mxfp4.dequantize(packed, scale, torch.float32))
        blocks = exact.abs().view(*scale.shape, mxfp4.BLOCK)
        limit = 6.0 * mxfp4.scale_values(scale).unsqueeze(-1)
        self._saturated += int((blocks > limit).sum())
        zero = blocks.amax(-1) == 0
        self._blocks += zero.numel()
        self._zero_blocks += int(zero.sum())
        used = scale[~zero]
        if used.numel():
            self._lowest = min(self._lowest, int(used.min()))
            self._highest = max(self._highest, int(used.max()))

    def as_dict(self) -> dict[str, Any]:
        """Return the measures; those that a weight of zeros, or without error, has not are None.

        ``sqnr_db`` is 10 log10 of signal to noise energy, ``relative_error`` the noise's norm over the signal's,
        ``saturated`` the share of elements beyond the largest code, ``scale_exponents`` the lowest and highest power of
        two among the scales of blocks that are not all zeros.
        """
        error = math.sqrt(self._noise / self._signal) if self._signal else None
        return {
            "sqnr_db": round(-20 * math.log10(error), 4) if error else None,
            "relative_error": None if error is None else round(error, 8),
            "saturated": self._saturated / (self._blocks * mxfp4.BLOCK),
            "blocks": self._blocks,
            "zero_blocks": self._zero_blocks,
            "scale_exponents": [self._lowest - _BIAS, self._highest - _BIAS] if self._highest else None,
        }


def _energy(x: torch.Tensor) -> float:
    """Sum of squares, in double precision: those of small weights vanish in single."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
