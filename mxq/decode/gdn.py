"""Gated delta net layers that can take back what they read: run T tokens, then commit the first n of them.

Per value head the layer keeps a matrix S [key dim, value dim] and updates it for every token i (g_i <= 0, k_i of unit
length)::

    S_i = exp(g_i) S_(i-1) + k_i u_i^T        u_i = beta_i (v_i - exp(g_i) S_(i-1)^T k_i)        o_i = S_i^T q_i

In the chunked (WY) form all u of a block follow from S_0, the state before it, by one triangular solve. With
G_i = g_1 + ... + g_i and D_ij = exp(G_i - G_j) for i >= j::

    (I + tril(beta_i k_i^T k_j D_ij, -1)) U = beta (V - exp(G) K S_0)
    O = exp(G) Q S_0 + tril(Q K^T D) U

Row i of U and O depends on tokens up to i only, so drafts that turn out wrong leave the earlier rows right, and
committing n tokens needs neither the projections nor the solve again::

    S_n = exp(G_n) S_0 + sum over i <= n of exp(G_n - G_i) k_i u_i^T

The causal convolution's state is the last (kernel - 1) columns of what it read. States and the recurrence are float32,
whatever the model's dtype, as in transformers.

Source: arXiv 2412.06464 (gated delta rule), arXiv 2406.06484 (chunked form).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import l2norm

_CHUNK = 64
"""Tokens of a prompt that the chunked form takes at once."""


@dataclass(frozen=True)
class Update:
    """What one layer needs to commit any number of the T tokens it has just read."""

    window: Tensor
    """Convolution inputs [channels, kernel - 1 + T]: the state before, then the T tokens."""
    keys: Tensor
    """[value heads, key dim, T], float32, unit length."""
    values: Tensor
    """The u_i [value heads, T, value dim], float32."""
    decay: Tensor
    """The G_i [value heads, T], float32."""


class GatedDeltaState:
    """Convolution and recurrent states of all gated delta net layers, at the last committed token.

    ``recurrent`` [layers, value heads, key dim, value dim] float32; ``convolution`` [layers, channels, kernel - 1] in
    the model's dtype. Layers are stacked so that a commit costs a few operations for all of them together.
    """

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> None:
        first = layers[0]
        shape = (len(layers), first.num_v_heads, first.head_k_dim, first.head_v_dim)
        self.recurrent = torch.zeros(shape, dtype=torch.float32, device=device)
        self.convolution = torch.zeros(
            len(layers), first.conv_dim, first.conv_kernel_size - 1, dtype=dtype, device=device
        )

    def commit(self, updates: Sequence[Update], n: int) -> None:
        """Move every layer on by the first ``n`` >= 1 of the tokens that made ``updates`` (one per layer)."""
        keys = torch.stack([update.keys[:, :, :n] for update in updates])
        values = torch.stack([update.values[:, :n] for update in updates])
        decay = torch.stack([update.decay[:, :n] for update in updates])
        self.recurrent = advance(self.recurrent, keys, values, decay)
        width = self.convolution.shape[-1]
        self.convolution = torch.stack([update.window[:, n : n + width] for update in updates])


def read_block(layer: Any, x: Tensor, recurrent: Tensor, convolution: Tensor) -> tuple[Tensor, Update]:
    """Run one layer over ``x`` [1, T, hidden] from a state that stays as it is.

    ``layer`` is transformers' ``Qwen3_5GatedDeltaNet`` (or its MoE twin); ``recurrent`` and ``convolution`` are that
    layer's slices of :class:`GatedDeltaState`. Returns the output [1, T, hidden] and the update to commit later. Takes
    T x T numbers per head: meant for a decoding step or a block of drafts.
    """
    inputs, window = _inputs(layer, x, convolution)
    out, values, decay = delta_rule(*inputs, recurrent)
    return _projected(layer, out, x), Update(window, inputs[1], values, decay)


def read_prompt(layer: Any, x: Tensor, recurrent: Tensor, convolution: Tensor) -> Tensor:
    """Run one layer over ``x`` [1, T, hidden] of any length and move its state on by all of it, in place.

    Returns the output [1, T, hidden].
    """
    (queries, keys, values, g, beta), window = _inputs(layer, x, convolution)
    outs = []
    for begin in range(0, x.shape[1], _CHUNK):
        part = slice(begin, begin + _CHUNK)
        k = keys[:, :, part]
        out, u, decay = delta_rule(queries[:, :, part], k, values[:, part], g[:, part], beta[:, part], recurrent)
        outs.append(out)
        recurrent.copy_(advance(recurrent, k, u, decay))
    convolution.copy_(window[:, x.shape[1] :])
    return _projected(layer, torch.cat(outs, dim=1), x)


def _inputs(layer: Any, x: Tensor, convolution: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return queries, keys, values, g and beta as :func:`delta_rule` takes them, and the convolution's window."""
    length = x.shape[1]
    window = torch.cat([convolution, layer.in_proj_qkv(x)[0].T], dim=1)
    mixed = F.silu(F.conv1d(window[None], layer.conv1d.weight, groups=layer.conv_dim))[0]
    qk, values = mixed.split([2 * layer.key_dim, layer.value_dim])
    qk = l2norm(qk.float().view(2, layer.num_k_heads, 1, layer.head_k_dim, length), dim=3)
    # Several value heads share a key head.
    qk = qk.expand(-1, -1, layer.num_v_heads // layer.num_k_heads, -1, -1).flatten(1, 2)
    values = values.float().view(layer.num_v_heads, layer.head_v_dim, length).transpose(1, 2)
    beta = layer.in_proj_b(x)[0].sigmoid().float().T
    g = -layer.A_log.float().exp() * F.softplus(layer.in_proj_a(x)[0].float() + layer.dt_bias)
    return (qk[0] * layer.head_k_dim**-0.5, qk[1], values, g.T, beta), window


def delta_rule(
    queries: Tensor, keys: Tensor, values: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return O [heads, T, value dim], U of the same shape and G [heads, T] (see the module's formulas).

    ``queries``, ``keys`` [heads, key dim, T]; ``values`` [heads, T, value dim]; ``g``, ``beta`` [heads, T]; ``state``
    [heads, key dim, value dim].
    """
    length = g.shape[1]
    decay = g.cumsum(1)
    both = torch.cat([keys, queries], dim=2).transpose(1, 2)
    remembered, seen = (decay.exp().repeat(1, 2).unsqueeze(2) * torch.bmm(both, state)).split(length, dim=1)
    u = (values - remembered) * beta.unsqueeze(2)
    # The first tril keeps exp from overflowing above the diagonal, the second empties that part.
    pairwise = (decay.unsqueeze(2) - decay.unsqueeze(1)).tril_().exp_().tril_().repeat(1, 2, 1)
    within, across = (torch.bmm(both, keys) * pairwise).split(length, dim=1)
    if length > 1:
        u = torch.linalg.solve_triangular(within * beta.unsqueeze(2), u, upper=False, unitriangular=True)
    return torch.baddbmm(seen, across, u), u, decay


def advance(state: Tensor, keys: Tensor, u: Tensor, decay: Tensor) -> Tensor:
    """Return S_n from S_0 = ``state`` [..., key dim, value dim] and n tokens' k, u and G, shaped as above."""
    last = decay[..., -1:]
    faded = keys * (last - decay).exp().unsqueeze(-2)
    return torch.matmul(faded, u).add_(state * last.exp().unsqueeze(-1))


def _projected(layer: Any, out: Tensor, x: Tensor) -> Tensor:
    """Norm, gate and project the heads' outputs ``out`` [value heads, T, value dim] into [1, T, hidden]."""
    gate = layer.in_proj_z(x).view(-1, layer.head_v_dim)
    normed = layer.norm(out.transpose(0, 1).reshape(-1, layer.head_v_dim).to(x.dtype), gate)
    return layer.out_proj(normed.view(1, -1, layer.value_dim))
