"""AITER's kernels, emulated over their layouts, compute what the plain layer is: with the testbed's trained experts."""

from dataclasses import astuple
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mxq import testbed
from mxq.formats import mxfp4
from mxq.layouts import operands, reader
from mxq.layouts.operands import Experts, Linear

TOKENS, TOP_K, EXPERTS = 24, 2, 4


@cache
def experts(hidden: int = 256) -> Experts[Tensor]:
    """The first layer's experts, plain; of a smaller hidden size, the first so many of their columns and rows."""
    tensors = {}
    for shard in testbed.path("testbed:moe").glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                if name.startswith("model.language_model.layers.0.mlp.experts."):
                    tensors[name.rpartition(".")[2]] = file.get_tensor(name)
    w13, w13_scale = mxfp4.quantize(tensors["gate_up_proj"][..., :hidden].contiguous())
    w2, w2_scale = mxfp4.quantize(tensors["down_proj"][:, :hidden].contiguous())
    return Experts(w13, w13_scale, w2, w2_scale)


@cache
def routed(hidden: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """Activations with outliers, as there are behind a norm, the router's weights and experts."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, hidden, generator=generator)
    x[:, ::37] *= 20
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return x.bfloat16(), weights / weights.sum(-1, keepdim=True), ids


def activations(x: Tensor, rule: str | None) -> np.ndarray:
    return x.double().numpy() if rule is None else values(*mxfp4.quantize(x, rule))


def values(packed: Tensor, scale: Tensor) -> np.ndarray:
    codes = packed.numpy()
    elements = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1).view(ml_dtypes.float4_e2m1fn)
    scales = scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return elements.astype(np.float64) * scales.repeat(32, -1)


@cache
def expected(hidden: int, rule: str | None) -> np.ndarray:
    """The layer token by token, of the plain checkpoint: float64 [tokens, hidden]."""
    plain, (x, weights, ids) = experts(hidden), routed(hidden)
    w13, w2 = values(plain.w13, plain.w13_scale), values(plain.w2, plain.w2_scale)
    a = activations(x, rule)
    out = np.zeros(x.shape)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            h = torch.from_numpy(w13[expert] @ a[token]).float()
            gate, up = h[:256], h[256:]
            activated = (torch.nn.functional.silu(gate) * up).bfloat16()
            out[token] += weight * (w2[expert] @ activations(activated[None], rule)[0])
    return out


def distance(got: Tensor, hidden: int, rule: str | None) -> float:
    reference = expected(hidden, rule)
    return float(np.linalg.norm(got.numpy() - reference) / np.linalg.norm(reference))


LAYOUTS = {
    "separated": (operands.moe_a4w4, reader.SEPARATED, 128),
    "interleaved": (operands.moe_interleaved, reader.INTERLEAVED, 256),
}


@pytest.mark.parametrize(("layout", "rule"), [("separated", "rceil"), ("separated", "even"), ("interleaved", None)])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("hidden", [256, 192])
def test_parts_read_through_the_layout_add_up_to_the_layer(
    hidden: int, tp: int, ep: int, layout: str, rule: str | None
) -> None:
    laid_out, kernel, multiple = LAYOUTS[layout]
    total = torch.zeros(TOKENS, hidden, dtype=torch.float64)
    for rank in range(tp * ep):
        part = operands.part_of_experts(experts(hidden), tp=tp, tp_rank=rank % tp, ep=ep, ep_rank=rank // tp)
        padded = operands.pad_experts(part, 256, -(-part.sizes[2] // multiple) * multiple)
        first = EXPERTS // ep * (rank // tp)
        out = reader.fused_moe(*_arguments(laid_out(padded), hidden), reader=kernel, rule=rule, first=first)
        plain = reader.fused_moe(*_arguments(part, hidden), reader=reader.PLAIN, rule=rule, first=first)
        assert torch.equal(out, plain)
        total += out
    assert distance(total, hidden, rule) < 1e-14


def _arguments(layer: Experts[Tensor], hidden: int) -> tuple[Tensor, Experts[Tensor], Tensor, Tensor]:
    x, weights, ids = routed(hidden)
    return x, layer, weights, ids


@pytest.mark.parametrize("kernel", ["PLAIN", "SEPARATED", "INTERLEAVED"])
@pytest.mark.parametrize("layout", ["plain", *LAYOUTS])
def test_what_another_kernel_reads_is_far_away(layout: str, kernel: str) -> None:
    """As on the hardware, nothing fails: the wrong bytes are read."""
    layer = experts() if layout == "plain" else LAYOUTS[layout][0](experts())
    found = distance(reader.fused_moe(*_arguments(layer, 256), reader=getattr(reader, kernel)), 256, "rceil")
    assert found < 1e-14 if layout == kernel.lower() else not found < 0.3


def test_gate_and_up_in_the_wrong_order_are_far_away() -> None:
    plain = experts()
    swapped = Experts(plain.w13.roll(256, 1), plain.w13_scale.roll(256, 1), plain.w2, plain.w2_scale)
    assert distance(reader.fused_moe(*_arguments(operands.moe_a4w4(swapped), 256)), 256, "rceil") > 0.3


def test_the_scale_rule_of_activations_makes_a_difference_and_a_small_one() -> None:
    """So results of AITER and of vLLM's emulation cannot be equal."""
    found = distance(reader.fused_moe(*_arguments(operands.moe_a4w4(experts()), 256), rule="even"), 256, "rceil")
    assert 0.01 < found < 0.3


@pytest.mark.parametrize("rule", ["rceil", "even", None])
def test_dense_layers_are_read_through_their_layout(rule: str | None) -> None:
    plain = Linear(experts().w13[0], experts().w13_scale[0])
    x, _, _ = routed()
    out = reader.gemm(x, operands.dense_asm(plain), rule=rule)
    reference = activations(x, rule) @ values(plain.weight, plain.scale).T
    assert np.linalg.norm(out.numpy() - reference) < 1e-14 * np.linalg.norm(reference)
    assert not torch.allclose(reader.gemm(x, plain, rule=rule), out, rtol=0.1)


def test_a_part_is_gates_rows_ups_rows_and_downs_columns() -> None:
    plain = experts()
    part = operands.part_of_experts(plain, tp=4, tp_rank=3, ep=2, ep_rank=1)
    assert part.sizes == (2, 256, 64)
    assert torch.equal(part.w13[1, :64], plain.w13[3, 192:256])
    assert torch.equal(part.w13_scale[1, 64:], plain.w13_scale[3, 448:512])
    assert torch.equal(part.w2[0], plain.w2[2, :, 96:128])
    assert torch.equal(part.w2_scale[0], plain.w2_scale[2, :, 6:])
    from_numpy = operands.part_of_experts(
        Experts(*(x.numpy() for x in astuple(plain))), tp=4, tp_rank=3, ep=2, ep_rank=1
    )
    assert all(np.array_equal(a, b) for a, b in zip(astuple(from_numpy), astuple(part), strict=True))


def test_what_does_not_belong_together_is_refused() -> None:
    plain, (x, weights, ids) = experts(), routed()
    with pytest.raises(ValueError, match=r"TP 16, EP 1 of \[4, 256, 128\]: I = 256 is not a multiple of 512"):
        operands.part_of_experts(plain, tp=16)
    with pytest.raises(ValueError, match=r"TP 1, EP 3 of \[4, 256, 128\]: E = 4 is not a multiple of 3"):
        operands.part_of_experts(plain, ep=3)
    with pytest.raises(ValueError, match="there is no rank 2 of 2"):
        operands.part_of_experts(plain, tp=2, tp_rank=2)
    with pytest.raises(ValueError, match=r"activations \[24, 512\], .* do not belong to experts of H = 256"):
        reader.fused_moe(x.repeat(1, 2), plain, weights, ids)
    with pytest.raises(ValueError, match=r"router's weights \[24, 1\] and experts \[24, 2\] do not belong"):
        reader.fused_moe(x, plain, weights[:, :1], ids)
    with pytest.raises(ValueError, match=r"activations \[24, 192\] do not belong to a weight of \[512, 128\]"):
        reader.gemm(x[:, :192], Linear(plain.w13[0], plain.w13_scale[0]))
