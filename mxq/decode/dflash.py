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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, rotate_half

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [batch, kv heads, length, head dim]; keys are normed and rotated."""

_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "block_size",
)
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MOST_LAYERS = 1000
_LARGEST = 2**24
"""Beyond any real size, and small enough that no product of two sizes and a width overflows."""


@dataclass(frozen=True)
class DFlashConfig:
    """What a drafter's config.json says, as far as the network needs it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not _is_count(value):
                raise ValueError(f"{name} is {_short(value)}, not a positive integer")
        for name in ("num_target_layers", "sliding_window"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise ValueError(f"{name} is {_short(value)}, not a positive integer")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < 1e30:  # false for NaN too
                raise ValueError(f"{name} is {_short(value)}, not a positive number")
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < self.vocab_size:
            found = _short(self.mask_token_id)
            raise ValueError(f"mask_token_id is {found}, outside the vocabulary of {self.vocab_size}")
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"{self.num_attention_heads}, no multiple of num_key_value_heads {self.num_key_value_heads}"
            raise ValueError(f"num_attention_heads is {heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary positions need an even number")
        if self.is_causal is not None and type(self.is_causal) is not bool:
            raise ValueError(f"is_causal is {_short(self.is_causal)}, neither true nor false")
        if any(type(layer) is not int for layer in self.target_layer_ids):
            raise ValueError(f"target_layer_ids is {_short(list(self.target_layer_ids))}, not a list of integers")
        if len(self.layer_types) != self.num_hidden_layers or not _LAYER_TYPES.issuperset(self.layer_types):
            kinds = " or ".join(sorted(_LAYER_TYPES))
            raise ValueError(f"layer_types is not {self.num_hidden_layers} times {kinds}")

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "DFlashConfig":
        """Read a drafter's config.json.

        Raises KeyError naming a key that must be there and is not, ValueError naming one whose value cannot be right.
        """
        dflash = _object(config, "dflash_config", required=True)
        layers = config["num_hidden_layers"]
        if not _is_count(layers) or layers > _MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {_short(layers)}, not an integer from 1 to {_MOST_LAYERS}")
        rope = _object(config, "rope_parameters")
        _list(dflash, "target_layer_ids")
        layer_types = config.get("layer_types")
        if layer_types and not all(isinstance(kind, str) for kind in _list(config, "layer_types")):
            raise ValueError(f"layer_types is {_short(layer_types)}, not a list of words")
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=layers,
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab_size=config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"],
            block_size=dflash["block_size"] if "block_size" in dflash else config["block_size"],
            mask_token_id=dflash["mask_token_id"] if "mask_token_id" in dflash else config["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            num_target_layers=config.get("num_target_layers"),
            layer_types=tuple(layer_types or ["full_attention"] * layers),
            sliding_window=config.get("sliding_window"),
            is_causal=config.get("is_causal", dflash.get("causal")),
        )

    def masks(self, context: int, block: int, device: torch.device) -> list[Tensor | None]:
        """Return each layer's mask for a block of ``block`` slots right behind ``context`` positions.

        Boolean [block, context + block], True where a slot may look; None where it may look everywhere. A layer is
        causal if ``is_causal`` says so, and, where it says nothing, if it is a sliding one. A window of W positions
        counts the slot's own; where the layer is not causal it reaches as far forward as back.
        """
        query = torch.arange(context, context + block, device=device)[:, None]
        key = torch.arange(context + block, device=device)
        kinds: dict[str, Tensor | None] = {}
        for kind in set(self.layer_types):
            sliding = kind == "sliding_attention"
            causal = sliding if self.is_causal is None else self.is_causal
            mask = key <= query if causal else None
            if sliding and self.sliding_window is not None:
                near = (query - key).abs() < self.sliding_window
                mask = near if mask is None else mask & near
            kinds[kind] = mask
        return [kinds[kind] for kind in self.layer_types]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def _short(value: Any) -> str:
    text = repr(value) if type(value) is not int or abs(value) <= _LARGEST else "a number of many digits"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _object(config: Mapping[str, Any], key: str, *, required: bool = False) -> Mapping[str, Any]:
    value = config[key] if required else config.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {_short(value)}, not an object")
    return value


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config[key]
    if not isinstance(value, list):
        raise ValueError(f"{key} is {_short(value)}, not a list")
    return value


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
