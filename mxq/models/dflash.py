"""What the config.json of a DFlash drafter says, in z-lab's checkpoints and for vLLM's ``qwen3_dflash.py``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
