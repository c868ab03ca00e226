"""MXFP4 of tensors on a CPU: the bytes of :func:`mxq.formats.mxfp4.quantize`, and the error with them, in one pass."""

import math

import torch
from torch import Tensor

from mxq.formats.cpu_rows import KINDS, Measures, Rows
from mxq.formats.rules import BLOCK, scale_rule

_KINDS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def quantize(
    x: Tensor, rule: str = "even", *, threads: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` along its last axis, as :func:`mxq.formats.mxfp4.quantize` does and to the same bytes.

    Args:
        x: [..., K] in bfloat16, float16 or float32 on the CPU, of any strides (a copy is made where elements of a row
            are not adjacent); K is a multiple of 32.
        rule: a name in :data:`mxq.formats.rules.RULES`.
        threads: how many work on it.
        out: what an earlier call returned for a tensor of this shape, to be written again: memory that the system
            has to find first takes longer than the quantization.

    Returns:
        (packed, scale): uint8 [..., K/2] and uint8 [..., K/32], contiguous.

    Raises:
        ValueError: K is not a multiple of 32, the rule is unknown, or ``out`` does not fit.
        TypeError: ``x`` is of another type.
    """
    packed, scale, _ = _quantize(x, rule, threads, out, measured=False)
    return packed, scale


def quantize_measured(
    x: Tensor, rule: str = "even", *, threads: int = 1, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Measures]:
    """:func:`quantize`, and what it did to the numbers, which does not depend on ``threads`` either."""
    return _quantize(x, rule, threads, out, measured=True)


def _quantize(
    x: Tensor, rule: str, threads: int, out: tuple[Tensor, Tensor] | None, *, measured: bool
) -> tuple[Tensor, Tensor, Measures]:
    scale_rule(rule)  # raises for one that is unknown
    if x.dtype not in _KINDS:
        raise TypeError(f"MXFP4 is made from bfloat16, float16 or float32, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"the last axis of {list(x.shape)} is not a multiple of {BLOCK}")
    columns = x.shape[-1]
    shapes = [(*x.shape[:-1], columns // per_byte) for per_byte in (2, BLOCK)]
    packed, scale = out or (torch.empty(shape, dtype=torch.uint8) for shape in shapes)
    for tensor, shape in zip((packed, scale), shapes, strict=True):
        if tensor.shape != shape or tensor.dtype != torch.uint8 or not tensor.is_contiguous():
            raise ValueError(f"out is {tensor.dtype} {list(tensor.shape)}, not contiguous uint8 {list(shape)}")
    count = math.prod(x.shape[:-1]) if columns else 0
    rows = x.detach().reshape(count, columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    kind = _KINDS[x.dtype]
    measures = Rows(kind, rule, measured=measured).quantize(
        rows.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy().view(KINDS[kind].bits),
        packed.view(count, columns // 2).numpy(),
        scale.view(count, columns // BLOCK).numpy(),
        threads,
    )
    return packed, scale, measures
