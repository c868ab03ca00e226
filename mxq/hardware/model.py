"""What of a checkpoint's config.json decides how an engine runs it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from mxq.checkpoint.quantization import FORMS
from mxq.models import qwen35
from mxq.verify.claims import AutoRound, claims_of

AUTOROUND = "auto-round"
"""The form of MXFP4 that mxq does not write, and vLLM runs as it does compressed-tensors."""


@dataclass(frozen=True)
class ModelFacts:
    """What rules look at.

    Attributes:
        name: as it was given.
        moe: it has routed experts.
        text_only: its architecture is the language model's alone.
        mrope: its rope parameters have mrope_section or mrope_interleaved.
        form: the form of its MXFP4, one of ``mxq.checkpoint.quantization.FORMS`` or :data:`AUTOROUND`; None if it is
            not MXFP4.
        weight_only: of MXFP4: activations stay as they are.
        experts_quantized: routed experts are MXFP4.
        shared_quantized: shared experts are.
        linears_quantized: other linears of the language model are.
        mtp_quantized: the layer of its MTP head is, as far as those of the language model are.
        gates_quantized: in_proj_a or in_proj_b of its gated DeltaNet is.
        hidden: the width of its layers, H.
        experts: how many routed experts a layer has, E.
        expert_intermediate: their inner width, I.
        key_head_dim, value_head_dim: of its gated DeltaNet.
    """

    name: str
    moe: bool = False
    text_only: bool = False
    mrope: bool = False
    form: str | None = None
    weight_only: bool = False
    experts_quantized: bool = False
    shared_quantized: bool = False
    linears_quantized: bool = False
    mtp_quantized: bool = False
    gates_quantized: bool = False
    hidden: int | None = None
    experts: int | None = None
    expert_intermediate: int | None = None
    key_head_dim: int | None = None
    value_head_dim: int | None = None

    @classmethod
    def of(cls, raw: Any) -> "ModelFacts":
        """Read it from a recorded environment; raises ValueError where it is something else."""
        kinds = {one.name: one.type for one in dataclasses.fields(cls)}
        if not isinstance(raw, dict) or "name" not in raw or not raw.keys() <= kinds.keys():
            raise ValueError("model has no name, or what no model has")
        for key, value in raw.items():
            if not (value is None and kinds[key] in (str | None, int | None)) and not _is(kinds[key], value):
                raise ValueError(f"model.{key} is {value!r:.60}")
        if raw.get("form") not in (None, *FORMS, AUTOROUND):
            raise ValueError(f"model.form is {raw['form']!r:.60}")
        return cls(**raw)


def _is(kind: Any, value: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if kind in (int | None, int):
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 32
    return isinstance(value, str) and value.isprintable() and len(value) < 4096


def facts_of(name: str, config: dict[str, Any], where: str) -> ModelFacts:
    """Return the facts in a config.json.

    Args:
        name: of the model, as it was given.
        config: of the checkpoint.
        where: is named in errors.

    Raises:
        UsageError: it is no Qwen3.5.
        MxqError: its quantization_config is of Quark, compressed-tensors or AutoRound and not MXFP4.
    """
    moe = qwen35.family(config, where) == "qwen3_5_moe"
    text = qwen35.text_config(config)
    text_only = "text_config" not in config
    rope = text.get("rope_parameters")
    raw = config.get("quantization_config")
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    claims = claims_of(config, where) if method in (*FORMS, AUTOROUND) else None
    prefix = "model." if text_only else "model.language_model."

    def quantized(*modules: str, of: str = prefix) -> bool:
        return claims is not None and any(claims.is_quantized(f"{of}layers.{module}") for module in modules)

    kinds = text.get("layer_types")
    attention = kinds.index("full_attention") if isinstance(kinds, list) and "full_attention" in kinds else 3
    inner = () if moe else ("0.mlp.down_proj",)
    return ModelFacts(
        name=name,
        moe=moe,
        text_only=text_only,
        mrope=isinstance(rope, dict) and bool({"mrope_section", "mrope_interleaved"} & rope.keys()),
        form=AUTOROUND if isinstance(claims, AutoRound) else method if claims is not None else None,
        weight_only=claims is not None and claims.weight_only,
        experts_quantized=moe and quantized("0.mlp.experts.0.down_proj"),
        shared_quantized=moe and quantized("0.mlp.shared_expert.down_proj"),
        linears_quantized=quantized("0.linear_attn.out_proj", f"{attention}.self_attn.o_proj", *inner),
        mtp_quantized=quantized("0.mlp.experts.0.down_proj" if moe else "0.mlp.down_proj", of="mtp."),
        gates_quantized=quantized("0.linear_attn.in_proj_a", "0.linear_attn.in_proj_b"),
        hidden=_size(text, "hidden_size"),
        experts=_size(text, "num_experts") if moe else None,
        expert_intermediate=_size(text, "moe_intermediate_size") if moe else None,
        key_head_dim=_size(text, "linear_key_head_dim"),
        value_head_dim=_size(text, "linear_value_head_dim"),
    )


def _size(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if _is(int, value) else None
