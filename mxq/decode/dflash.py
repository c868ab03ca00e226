"""The DFlash drafter's network: a small bidirectional transformer that drafts a whole block in one pass.

It reads the target through *context features*: the outputs of a few target layers, concatenated, projected by ``fc``
and normed. In every draft layer the features become keys and values at their tokens' true positions; they are never
queries and no layer updates them. The queries are one block: the last committed token's embedding (the anchor), then
K mask embeddings. Slot j predicts the token at its own position, not the next one. Embedding and output head are the
target's and are not part of this module.

The module's parameter names are those of the published checkpoints (``fc.weight``, ``hidden_norm.weight``,
``layers.0.self_attn.q_proj.weight``, ...), so a state dict loads as it is. Norms are plain RMSNorm (weight w), unlike
the target's, which store w - 1.

Source: arXiv 2602.06036; the layout is that of the z-lab checkpoints and of vLLM's ``qwen3_dflash.py``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, rotate_half

from mxq.models.dflash import DFlashConfig

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [batch, kv heads, length, head dim]; keys are normed and rotated."""


class DFlashAttention(nn.Module):
    """Block queries over the context's and the block's own keys."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def key_value(self, x: Tensor, rotary: KeyValue) -> KeyValue:
        """Return the keys and values of ``x`` [batch, length, hidden] at the positions ``rotary`` was made for."""
        key = self.k_norm(self._heads(self.k_proj(x)))
        return _rotate(key, rotary), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rotary: KeyValue, context: KeyValue, mask: Tensor | None) -> Tensor:
        """Return the attention output [batch, length, hidden] of ``x``, whose positions follow the context's."""
        query = _rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)
        own_key, own_value = self.key_value(x, rotary)
        key = torch.cat([context[0], own_key], dim=2)
        value = torch.cat([context[1], own_value], dim=2)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DFlashMLP(nn.Module):
    """Gated feed-forward: down(silu(gate) * up)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward output, shaped like ``x`` [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DFlashLayer(nn.Module):
    """One draft layer: pre-norm attention and feed-forward."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: KeyValue, context: KeyValue, mask: Tensor | None) -> Tensor:
        """Return the layer's output [batch, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModel(nn.Module):
    """The whole drafter: features to context keys and values, block embeddings to block hidden states."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.hidden_size * len(config.target_layer_ids), config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> KeyValue:
        """Return cosine and sine for ``positions`` [batch, length], each [batch, 1, length, head dim]."""
        exponent = torch.arange(0, self.config.head_dim, 2, device=positions.device, dtype=torch.float32)
        frequency = self.config.rope_theta ** -(exponent / self.config.head_dim)
        angle = positions[:, None, :, None].float() * frequency
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def context(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Turn target features into every layer's context keys and values.

        ``features`` [batch, length, layers tapped x hidden]: outputs of ``target_layer_ids`` concatenated in that
        order; ``positions`` [batch, length]: their tokens' absolute positions.
        """
        c = self.hidden_norm(self.fc(features))
        rotary = self.rotary(positions, c.dtype)
        return [layer.self_attn.key_value(c, rotary) for layer in self.layers]  # type: ignore[union-attr,operator]

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: Sequence[KeyValue],
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Return the block's final hidden states [batch, length, hidden], ready for the target's output head.

        ``embeddings`` [batch, length, hidden] of the anchor and the masks at ``positions`` [batch, length];
        ``context`` from :meth:`context`. ``masks``: one per layer, boolean, True where a query (row) may look at a key
        (context first, then block), broadcastable to [batch, heads, length, context + length]; None lets every slot
        see everything, which is what full attention means here.
        """
        rotary = self.rotary(positions, embeddings.dtype)
        x = embeddings
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, context[index], None if masks is None else masks[index])
        return self.norm(x)


def _rotate(x: Tensor, rotary: KeyValue) -> Tensor:
    return x * rotary[0] + rotate_half(x) * rotary[1]


def masks(config: DFlashConfig, context: int, block: int, device: torch.device) -> list[Tensor | None]:
    """Return each layer's mask for a block of ``block`` slots right behind ``context`` positions.

    Boolean [block, context + block], True where a slot may look; None where it may look everywhere. A layer is
    causal if ``is_causal`` says so, and, where it says nothing, if it is a sliding one. A window of W positions
    counts the slot's own; where the layer is not causal it reaches as far forward as back.
    """
    query = torch.arange(context, context + block, device=device)[:, None]
    key = torch.arange(context + block, device=device)
    kinds: dict[str, Tensor | None] = {}
    for kind in set(config.layer_types):
        sliding = kind == "sliding_attention"
        causal = sliding if config.is_causal is None else config.is_causal
        mask = key <= query if causal else None
        if sliding and config.sliding_window is not None:
            near = (query - key).abs() < config.sliding_window
            mask = near if mask is None else mask & near
        kinds[kind] = mask
    return [kinds[kind] for kind in config.layer_types]
