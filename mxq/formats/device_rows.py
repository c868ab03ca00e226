"""MXFP4 of rows of numbers on a GPU: what :class:`mxq.formats.cpu_rows.Rows` does, by PyTorch and the GPU's kernel."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mxq.formats import elements, kernels
from mxq.formats.cpu_rows import Measures
from mxq.formats.rules import BLOCK, NAN_BYTE
from mxq.formats.scales import values

_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class DeviceRows:
    """What a device makes of rows of one type by one rule.

    Attributes:
        at_once: elements that are best read, quantized and written before the next ones are read.
    """

    at_once = 1 << 20

    def __init__(self, kind: str, rule: str, device: str) -> None:
        """Prepare for numbers of a ``kind`` in :data:`mxq.formats.cpu_rows.KINDS` on a device as torch calls it."""
        self._dtype, self._rule, self._device = _TYPES[kind], rule, torch.device(device)

    def quantize(self, bits: npt.NDArray[Any], packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8]) -> Measures:
        """Quantize rows, as :meth:`mxq.formats.cpu_rows.Rows.quantize`, which see, to the same bytes."""
        x = torch.from_numpy(bits.view(np.uint8)).to(self._device).view(self._dtype)
        made = kernels.quantize(x, self._rule)
        for out, tensor in zip((packed, scale), made, strict=True):
            torch.from_numpy(out).copy_(tensor)
        return measure(x, *made)


def measure(x: Tensor, packed: Tensor, scale: Tensor) -> Measures:
    """Return how far codes and scales are from what they were made of, in double precision, on its device.

    Args:
        x: [rows, K] in bfloat16, float16 or float32.
        packed: uint8 [rows, K/2].
        scale: uint8 [rows, K/32].
    """
    exact = x.view(*scale.shape, BLOCK).double()
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(exact.shape).int()
    scales = values(scale).double().unsqueeze(-1)
    bad = scale == NAN_BYTE
    zero = (exact == 0).all(dim=-1)
    exact = torch.where(bad.unsqueeze(-1), 0.0, exact)
    meant = torch.tensor(elements.VALUES, dtype=torch.float64, device=x.device)[codes] * scales
    noise = torch.where(bad.unsqueeze(-1), 0.0, exact - meant)
    ordinary = ~(bad | zero)
    signal, noise = torch.stack([exact.square().sum(), noise.square().sum()]).tolist()
    saturated, zeros, bads, lowest, highest = torch.stack(
        [
            (exact.abs() > 6 * scales).logical_and_(~bad.unsqueeze(-1)).sum(),
            zero.sum(),
            bad.sum(),
            torch.where(ordinary, scale, NAN_BYTE).min(),
            torch.where(ordinary, scale, 0).max(),
        ]
    ).tolist()
    bad_rows = bad.any(dim=-1).nonzero()
    return Measures(
        signal=signal,
        noise=noise,
        saturated=saturated,
        zero_blocks=zeros,
        lowest=lowest,
        highest=highest,
        bad_blocks=bads,
        first_bad_row=int(bad_rows[0]) if len(bad_rows) else None,
    )
