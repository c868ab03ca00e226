"""AITER's kernels, emulated: what they compute, with every operand fetched from the addresses that they load from.

It shows whether the bytes of a layout are where a kernel looks for them, without the hardware: results through a right
layout are those of the plain layer, bit for bit, and through any other they are far away. Speed is no aim.

What is computed, by AITER after v0.1.20: activations are quantized in blocks of 32 (rule ``rceil``; vLLM's emulation
has ``even``); gate and up come of one product, silu(gate) * up is rounded to bfloat16, quantized again and multiplied
by down; experts are added up with the router's weights. Kernels add in float32, in an order of their own. Here products
are added in float64, which holds sums of MXFP4's products of like magnitude exactly: the parts that GPUs have of a
layer give the whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mxq.formats import mxfp4
from mxq.layouts.aiter import gu16_row, swz_address, tile16_address
from mxq.layouts.operands import Experts, Linear

Address = Callable[[Any, Any, int], Any]


def _in_place(row: Tensor, rows: int) -> Tensor:
    return row


def _plain(row: Tensor, column: Tensor, columns: int) -> Tensor:
    return row * columns + column


@dataclass(frozen=True)
class Reader:
    """Where a kernel looks for bytes.

    Attributes:
        weight: from row, byte and the bytes of a row to the offset in a matrix of codes.
        scale: the same in a matrix of scales, of as many columns as are stored.
        gate_up_row: from a row of gate or up, stacked, and the number of them to the row that is looked up.
    """

    weight: Address
    scale: Address
    gate_up_row: Callable[[Tensor, int], Tensor] = _in_place


PLAIN = Reader(_plain, _plain)
SEPARATED = Reader(tile16_address, swz_address)
"""``gemm_a4w4``, and ``fused_moe`` in gate mode "separated"."""
INTERLEAVED = Reader(tile16_address, swz_address, gu16_row)
"""``fused_moe`` in gate mode "interleave": activations stay in bfloat16 (a16w4), or become fp8, which is not here."""


def gemm(x: Tensor, layer: Linear[Tensor], reader: Reader = SEPARATED, rule: str | None = "rceil") -> Tensor:
    """Return x @ W.T of a dense a4w4 layer.

    Args:
        x: [M, K] in bfloat16.
        layer: the layout that ``reader`` reads.
        reader: where bytes are looked for.
        rule: how activations are quantized, a name in :data:`mxq.formats.rules.RULES`; None leaves them in bfloat16.

    Returns:
        float64 [M, N].

    Raises:
        ValueError: shapes that do not belong together.
    """
    n, width = layer.weight.shape
    if x.ndim != 2 or x.shape[1] != width * 2:
        raise ValueError(f"activations {[*x.shape]} do not belong to a weight of {[*layer.weight.shape]}")
    return _quantized(x, rule) @ _fetched(layer.weight, layer.scale, torch.arange(n, device=x.device), reader).T


def fused_moe(
    x: Tensor,
    experts: Experts[Tensor],
    weights: Tensor,
    ids: Tensor,
    *,
    reader: Reader = SEPARATED,
    rule: str | None = "rceil",
    first: int = 0,
) -> Tensor:
    """Return what ``fused_moe`` with 4-bit weights and SiLU adds up for the experts that it has.

    Args:
        x: [tokens, H] in bfloat16; H may be less than that of padded experts, as zeros are appended.
        experts: the layout that ``reader`` reads.
        weights: [tokens, k], the router's.
        ids: [tokens, k], the router's experts, counted over all GPUs.
        reader: where bytes are looked for.
        rule: how activations are quantized, a name in :data:`mxq.formats.rules.RULES`; None leaves them in bfloat16.
        first: number of the first of ``experts``; others than these are left to other GPUs.

    Returns:
        float64 [tokens, H], H that of ``x``. The parts of a layer's GPUs, of a part of I or of the experts, are to be
        added.

    Raises:
        ValueError: shapes that do not belong together.
    """
    count, hidden, intermediate = experts.sizes
    if x.ndim != 2 or x.shape[1] > hidden or weights.shape != ids.shape or len(ids) != len(x):
        shapes = f"activations {[*x.shape]}, router's weights {[*weights.shape]} and experts {[*ids.shape]}"
        raise ValueError(f"{shapes} do not belong to experts of H = {hidden}")
    a = _quantized(F.pad(x, (0, hidden - x.shape[1])), rule)
    rows = torch.arange(2 * intermediate, device=x.device)
    at = reader.gate_up_row(rows, 2 * intermediate)
    out = torch.zeros(a.shape, dtype=torch.float64, device=x.device)
    for expert in range(count):
        token, slot = torch.nonzero(ids == first + expert, as_tuple=True)
        if not len(token):
            continue
        w13 = _fetched(experts.w13[expert], experts.w13_scale[expert], at, reader)
        w2 = _fetched(experts.w2[expert], experts.w2_scale[expert], torch.arange(hidden, device=x.device), reader)
        gate, up = (a[token] @ w13.T).float().chunk(2, dim=-1)
        b = _quantized((F.silu(gate) * up).bfloat16(), rule)
        out.index_add_(0, token, (b @ w2.T) * weights[token, slot, None].double())
    return out[:, : x.shape[1]]


def _quantized(x: Tensor, rule: str | None) -> Tensor:
    return (x if rule is None else mxfp4.fake_quantize(x, rule)).double()


def _fetched(weight: Tensor, scale: Tensor, rows: Tensor, reader: Reader) -> Tensor:
    """Return the values of ``rows`` of a matrix, float64 [len(rows), K], each byte from where it is looked for."""

    def bytes_of(memory: Tensor, address: Address, columns: int) -> Tensor:
        column = torch.arange(columns, device=memory.device)
        return memory.reshape(-1)[address(rows[:, None], column, memory.shape[1])]

    width = weight.shape[1]
    codes = bytes_of(weight, reader.weight, width)
    return mxfp4.dequantize(codes, bytes_of(scale, reader.scale, width // 16), torch.float32).double()
