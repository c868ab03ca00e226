"""Routed experts whose two matrix products take inputs that are rounded to MXFP4."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mxq.formats.mxfp4 import fake_quantize


# An operator, since vLLM compiles what calls it (without --enforce-eager), and no compiler knows who gets which tokens.
@torch.library.custom_op("mxq::routed_experts", mutates_args=())
def routed(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return what the experts make of tokens, rounding as :mod:`mxq.decode` does.

    Args:
        x: [T, H], the tokens.
        w13: [E, 2 I, H], gate and up; the rows of gate come first.
        w2: [E, H, I], down.
        weights: [T, k], of each token's experts.
        experts: [T, k], which they are; less than 0 for those of another process.
    """
    inputs = fake_quantize(x)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(inputs[tokens], w13[expert]).chunk(2, dim=-1)
        inner = fake_quantize(F.silu(gate) * up)
        out.index_add_(0, tokens, F.linear(inner, w2[expert]).float() * weights[tokens, slots, None])
    return out.to(x.dtype)


@routed.register_fake
def _like_tokens(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    return torch.empty_like(x)
