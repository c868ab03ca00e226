"""What a Qwen3.5 checkpoint is: the role of every tensor, what engines fuse, and how they name it.

The layout (multimodal; a text-only checkpoint has ``model.`` in place of ``model.language_model.`` and no vision)::

    lm_head, model.language_model.{embed_tokens, norm, layers.N.*}, model.visual.*, mtp.*

Everything here works on names and shapes alone. A *module* is a tensor's name without ``.weight``; for routed experts
stored fused (``mlp.experts.gate_up_proj`` [E, 2I, H] with the gate rows first, and ``mlp.experts.down_proj`` [E, H, I],
both without ``.weight``) every expert's projection is a module of its own, as if it were stored per expert:
``mlp.experts.E.gate_proj``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mxq.errors import UsageError

FAMILIES = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
}
"""Architecture in config.json -> family, the name under which recipes give its rules."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Linears that engines merge into one -> the modules they merge, which must all be quantized or none."""

_FUSED_OF = {member: fused for fused, members in FUSED.items() for member in members}


class Role(StrEnum):
    """What a tensor does in the model."""

    ATTENTION = "attention"
    GDN = "gated delta net"
    GDN_GATE = "gated delta net gate"  # in_proj_a and in_proj_b: few rows, and they set how fast the state decays
    GDN_STATE = "gated delta net state"  # A_log, dt_bias, conv1d
    MLP = "mlp"
    EXPERT = "routed expert"
    SHARED_EXPERT = "shared expert"
    ROUTER = "router"
    NORM = "norm"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    MTP_FC = "mtp fc"
    VISION_LINEAR = "vision linear"
    VISION = "vision"
    OTHER = "other"


LINEAR = frozenset(
    {
        Role.ATTENTION,
        Role.GDN,
        Role.GDN_GATE,
        Role.MLP,
        Role.EXPERT,
        Role.SHARED_EXPERT,
        Role.ROUTER,
        Role.LM_HEAD,
        Role.MTP_FC,
        Role.VISION_LINEAR,
    }
)
"""Roles for whose weights an engine asks quantization_config how they are stored."""

QUANTIZABLE = frozenset({Role.ATTENTION, Role.GDN, Role.GDN_GATE, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT})
"""Roles that engines can load as MXFP4."""

_DECODER_ROLES = [
    (re.compile(pattern), role)
    for pattern, role in [
        (r"self_attn\.[qkvo]_proj\.", Role.ATTENTION),
        (r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.", Role.GDN),
        (r"linear_attn\.in_proj_[ab]\.", Role.GDN_GATE),
        (r"linear_attn\.(conv1d\.|A_log$|dt_bias$)", Role.GDN_STATE),
        (r"mlp\.(gate|up|down)_proj\.", Role.MLP),
        (r"mlp\.experts\.(\d+\.(gate|up|down)_proj\.|(gate_up|down)_proj)", Role.EXPERT),
        (r"mlp\.shared_expert\.(gate|up|down)_proj\.", Role.SHARED_EXPERT),
        (r"mlp\.(gate|shared_expert_gate)\.", Role.ROUTER),
        (r"(self_attn\.[qk]_norm|linear_attn\.norm|(input|post_attention)_layernorm)\.", Role.NORM),
    ]
]
_DECODER_LAYER = re.compile(r"(?:model\.language_model\.|model\.|mtp\.)layers\.\d+\.")
_OUTSIDE = [
    (re.compile(pattern), role)
    for pattern, role in [
        (r"lm_head\.", Role.LM_HEAD),
        (r"model\.(language_model\.)?embed_tokens\.", Role.EMBEDDING),
        (r"model\.(language_model\.)?norm\.", Role.NORM),
        (r"mtp\.fc\.", Role.MTP_FC),
        (r"mtp\.(norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.", Role.NORM),
        (r"model\.visual\.(.*\.)?(qkv|proj|linear_fc[12])\.(?<!patch_embed\.proj\.)", Role.VISION_LINEAR),
        (r"model\.visual\.", Role.VISION),
    ]
]
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(?:\d+\.)?(?:gate_proj|up_proj|down_proj|gate_up_proj)$")
_MAX_EXPERTS = 1 << 14  # a shape costs nothing to claim, but every expert is objects here
_ENGINE_PREFIXES = (("model.language_model.", "language_model.model."), ("model.visual.", "visual."))


@dataclass(frozen=True, slots=True)
class Piece:
    """One module's weight [N, K]: rows ``start`` to ``stop`` of ``tensor``, all axes but the last being rows."""

    module: str
    tensor: str
    start: int
    stop: int


def family(config: dict[str, Any], where: str) -> str:
    """Return ``qwen3_5`` or ``qwen3_5_moe``; ``where`` is named in the error.

    Raises:
        UsageError: config.json names no architecture of Qwen3.5.
    """
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if not all(isinstance(architecture, str) and architecture.isprintable() for architecture in named):
        named = []
    for architecture in named:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    what = ", ".join(named) or "no architecture"
    raise UsageError(f"{where}: config.json names {what}", f"mxq converts {', '.join(FAMILIES)}")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of config.json, which a text-only checkpoint has at the top."""
    inner = config.get("text_config", config)
    return inner if isinstance(inner, dict) else {}


def part(name: str) -> str:
    """Return ``mtp``, ``vision`` or ``text``."""
    return "mtp" if name.startswith("mtp.") else "vision" if name.startswith("model.visual.") else "text"


def role(tensor: str) -> Role:
    """Return the role of a tensor from its name in the checkpoint."""
    layer = _DECODER_LAYER.match(tensor)
    rest, rules = (tensor[layer.end() :], _DECODER_ROLES) if layer else (tensor, _OUTSIDE)
    return next((role for pattern, role in rules if pattern.match(rest)), Role.OTHER)


def pieces(tensor: str, shape: Sequence[int]) -> list[Piece]:
    """Return the modules whose weights a tensor of ``shape`` holds: one, all experts', or none if it is no matrix.

    Works alike for packed weights: rows are rows. Raises ValueError if a fused gate_up_proj has an odd number of rows,
    or more experts than any model.
    """
    if 0 in shape:  # whose other axes cost nothing to claim
        return []
    fused = _FUSED_EXPERTS.fullmatch(tensor)
    if fused and len(shape) == 3:
        experts, rows = shape[0], shape[1]
        if experts > _MAX_EXPERTS:
            raise ValueError(f"{tensor} is of {experts} experts, which no model has")
        if fused[2] == "down_proj":
            return [Piece(f"{fused[1]}.{e}.down_proj", tensor, e * rows, (e + 1) * rows) for e in range(experts)]
        if rows % 2:
            raise ValueError(f"{tensor} has {rows} rows per expert; gate and up must have as many each")
        half = rows // 2
        return [
            Piece(f"{fused[1]}.{e}.{projection}", tensor, start, start + half)
            for e in range(experts)
            for projection, start in (("gate_proj", e * rows), ("up_proj", e * rows + half))
        ]
    if tensor.endswith(".weight") and len(shape) == 2:
        return [Piece(tensor.removesuffix(".weight"), tensor, 0, shape[0])]
    return []


def scale_name(weight: str) -> str:
    """Return the name of the scales of a packed weight: X.weight_scale for X.weight, and so for fused experts."""
    return f"{weight}_scale"


def experts_module(module: str) -> str | None:
    """Return the name of the routed experts' block that ``module`` is in; engines quantize such a block whole."""
    found = _EXPERTS.match(module)
    return found[1] if found else None


def fused_module(module: str) -> str | None:
    """Return the name of the linear into which engines merge ``module``, or None."""
    if experts_module(module) is not None:
        return None
    prefix, _, last = module.rpartition(".")
    return f"{prefix}.{_FUSED_OF[last]}" if last in _FUSED_OF else None


def base_name(tensor: str) -> str:
    """Return the name that recipes and ``exclude`` use: the module's, or that of a bare parameter."""
    return tensor.removesuffix(".weight").removesuffix(".bias")


def engine_name(name: str) -> str:
    """Return vLLM's name for a module of the checkpoint (``model.language_model.X`` -> ``language_model.model.X``).

    As vLLM's own mapper does, it leaves ``re:`` patterns and the names of text-only checkpoints and of MTP alone.
    """
    for prefix, engine_prefix in _ENGINE_PREFIXES:
        if name.startswith(prefix):
            return engine_prefix + name[len(prefix) :]
    return "language_model.lm_head" if name == "lm_head" else name
