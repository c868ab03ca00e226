"""How far a quantized weight is from what it was made of."""

import math
from collections.abc import Iterable
from typing import Any

from mxq.formats.cpu_rows import Measures
from mxq.formats.rules import BLOCK

_BIAS = 127


class ErrorMeter:
    """Adds up the quantization error of one weight over chunks of its rows."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0
        self._saturated = self._zero_blocks = 0
        self._lowest, self._highest = 255, 0

    def add(self, measures: Iterable[Measures]) -> None:
        """Take in what was measured of finite elements, chunk by chunk."""
        for chunk in measures:
            self._signal += chunk.signal
            self._noise += chunk.noise
            self._saturated += chunk.saturated
            self._zero_blocks += chunk.zero_blocks
            self._lowest = min(self._lowest, chunk.lowest)
            self._highest = max(self._highest, chunk.highest)

    def as_dict(self, elements: int) -> dict[str, Any]:
        """Return the measures of a weight of so many elements; None those that one of zeros, or without error, has not.

        ``sqnr_db`` is 10 log10 of signal to noise energy, ``relative_error`` the noise's norm over the signal's,
        ``saturated`` the share of elements beyond the largest code, ``scale_exponents`` the lowest and highest power of
        two among the scales of blocks that are not all zeros.
        """
        error = math.sqrt(self._noise / self._signal) if self._signal else None
        return {
            "sqnr_db": round(-20 * math.log10(error), 4) if error else None,
            "relative_error": None if error is None else round(error, 6),
            "saturated": self._saturated / elements,
            "blocks": elements // BLOCK,
            "zero_blocks": self._zero_blocks,
            "scale_exponents": [self._lowest - _BIAS, self._highest - _BIAS] if self._highest else None,
        }
