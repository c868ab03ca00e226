"""MXFP4 quantization by the fastest kernel that a tensor's device has; the bytes are the same from all of them."""

import functools
from importlib.util import find_spec

from torch import Tensor

from mxq.formats import mxfp4


def quantize(x: Tensor, rule: str = "even", *, threads: int = 1) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` along its last axis: :func:`mxq.formats.mxfp4.quantize`, which see, only faster.

    Args:
        x: [..., K] in bfloat16, float16 or float32, of any strides, on any device; K is a multiple of 32.
        rule: a name in :data:`mxq.formats.rules.RULES`.
        threads: how many CPU threads work on a tensor that is on the CPU.
    """
    if x.device.type == "cpu":
        from mxq.formats import cpu

        return cpu.quantize(x, rule, threads=threads)
    if x.device.type == "cuda" and _has_triton():
        from mxq.formats import gpu

        return gpu.quantize(x, rule)
    return mxfp4.quantize(x, rule)


@functools.lru_cache
def _has_triton() -> bool:
    """Whether Triton is installed: PyTorch brings it where it supports it, which is Linux."""
    return find_spec("triton") is not None
