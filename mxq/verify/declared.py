"""What config.json says of a checkpoint against what its tensors are: sizes, layers, whether embeddings are tied."""

import math
import re
from collections.abc import Iterator
from typing import Any

from mxq.checkpoint import Checkpoint
from mxq.models import qwen35

_BYTES_AT_ONCE = 16 << 20
_LAYER = re.compile(r"(?:model\.(?:language_model\.)?|mtp\.)layers\.(\d{1,6})\.(self_attn|linear_attn)\.")


def is_qwen35(checkpoint: Checkpoint) -> bool:
    """Tell by its tensors whether a checkpoint is of Qwen3.5, of which every model has linear attention."""
    return any(".linear_attn." in name for name in checkpoint.tensors)


def contradictions(checkpoint: Checkpoint) -> list[str]:
    """Return, in words, where config.json and the tensors, packed or not, disagree; one line for each kind of tensor.

    Weights are read only where embeddings are said to be tied and both are stored.
    """
    config = checkpoint.config
    if not isinstance(config.get("text_config", {}), dict):
        return ["text_config in config.json is not an object"]
    text = qwen35.text_config(config)
    return [*_model(checkpoint), *_sizes(checkpoint, text), *_layers(checkpoint, text), *_tied(checkpoint)]


def _model(checkpoint: Checkpoint) -> Iterator[str]:
    """Which model it is: engines take architectures, and transformers model_type, at its word."""
    if not is_qwen35(checkpoint):
        return
    there = "qwen3_5_moe" if any(".mlp.experts." in name for name in checkpoint.tensors) else "qwen3_5"
    fitting = [name for name, family in qwen35.FAMILIES.items() if family == there]
    said, kind = checkpoint.config.get("architectures"), checkpoint.config.get("model_type")
    if not isinstance(said, list) or not set(map(str, said)) & set(fitting):
        yield f"architectures in config.json is {said!r:.80}, the tensors are of {' or '.join(fitting)}"
    elif kind not in (there, f"{there}_text"):
        yield f"model_type in config.json is {kind!r:.40}, the tensors are of {there}"


def _tied(checkpoint: Checkpoint) -> Iterator[str]:
    config = checkpoint.config
    if not config.get("tie_word_embeddings", qwen35.text_config(config).get("tie_word_embeddings")):
        return
    embedding = next((name for name in checkpoint.tensors if qwen35.role(name) == qwen35.Role.EMBEDDING), None)
    if embedding is None or "lm_head.weight" not in checkpoint.tensors:
        return
    a, b = checkpoint.tensors[embedding], checkpoint.tensors["lm_head.weight"]
    if (a.dtype, a.shape) == (b.dtype, b.shape):
        import torch

        chunks = (checkpoint.read_bytes(tensor.name, _BYTES_AT_ONCE) for tensor in (a, b))
        if all(torch.equal(*pair) for pair in zip(*chunks, strict=True)):
            return
    yield (
        f"config.json says tie_word_embeddings, but lm_head.weight is stored and differs from {embedding}: "
        "engines would ignore it"
    )


def _layers(checkpoint: Checkpoint, config: dict[str, Any]) -> Iterator[str]:
    """Which layers there are, and of what kind: engines build them as config.json says."""
    kinds: dict[str, dict[int, str]] = {"text": {}, "mtp": {}}
    for name in checkpoint.tensors:
        found = _LAYER.match(name)
        if found:
            kind = "full_attention" if found[2] == "self_attn" else "linear_attention"
            kinds["mtp" if found[0].startswith("mtp.") else "text"][int(found[1])] = kind
    said = config.get("layer_types")
    there = [kind for _, kind in sorted(kinds["text"].items())]
    if said is not None and there and said != there:
        if not isinstance(said, list):
            yield f"layer_types in config.json is {said!r:.40}, which is no list"
        elif len(said) != len(there):
            yield f"layer_types in config.json is of {len(said)} layers, the tensors are of {len(there)}"
        else:
            at = next(at for at, kind in enumerate(there) if said[at] != kind)
            yield f"layer {at} is of {there[at]}, by layer_types in config.json of {said[at]!r:.40}"
    said = config.get("mtp_num_hidden_layers")
    if said is not None and kinds["mtp"] and said != len(kinds["mtp"]):
        yield f"mtp_num_hidden_layers in config.json is {said!r:.40}, the tensors of MTP are of {len(kinds['mtp'])}"


def _sizes(checkpoint: Checkpoint, config: dict[str, Any]) -> Iterator[str]:
    bad = [key for key in _KEYS if key in config and not _is_size(config[key])]
    for key in bad:
        yield f"{key} in config.json is {config[key]!r:.40}, which is no size"
    if bad:
        return
    said: set[str] = set()
    known: dict[str, tuple[int, ...] | None] = {}
    for name, tensor in checkpoint.tensors.items():
        if qwen35.part(name) == "vision":
            continue
        packed = 2 if tensor.dtype == "U8" and qwen35.scale_name(name) in checkpoint.tensors else 1
        shapes: list[tuple[str, tuple[int, ...]]] = [
            (piece.module, (piece.stop - piece.start, tensor.shape[-1] * packed))
            for piece in qwen35.pieces(name, tensor.shape)[:2]  # fused: gate and up, and so on for every expert
        ] or [(name.removesuffix(".weight"), (math.prod(tensor.shape),))]
        for module, shape in shapes:
            kind = _kind(module)
            if kind not in known:
                known[kind] = _wanted(kind, config)
            wanted = known[kind]
            if wanted is None or wanted == shape or kind in said:
                continue
            said.add(kind)  # the other layers' would be the same line again
            keys = ", ".join(f"{key} {config[key]}" for key in _named(kind))
            yield f"{module} is {list(shape)}, by config.json ({keys}) it would be {list(wanted)}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40


# A size is a sum of products of keys of config.json: ((factor, key, ...), ...).
_HIDDEN = ((1, "hidden_size"),)
_HEADS = ((1, "num_attention_heads", "head_dim"),)
_KV_HEADS = ((1, "num_key_value_heads", "head_dim"),)
_GDN_VALUES = ((1, "linear_num_value_heads", "linear_value_head_dim"),)
_GDN_ALL = ((2, "linear_num_key_heads", "linear_key_head_dim"), *_GDN_VALUES)
_GDN_HEADS = ((1, "linear_num_value_heads"),)
_ONE = ((1,),)
_SHAPES: dict[str, tuple[tuple[tuple[Any, ...], ...], ...]] = {
    "embed_tokens": (((1, "vocab_size"),), _HIDDEN),
    "lm_head": (((1, "vocab_size"),), _HIDDEN),
    "norm": (_HIDDEN,),
    "input_layernorm": (_HIDDEN,),
    "post_attention_layernorm": (_HIDDEN,),
    "self_attn.k_proj": (_KV_HEADS, _HIDDEN),
    "self_attn.v_proj": (_KV_HEADS, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HEADS),
    "self_attn.q_norm": (((1, "head_dim"),),),
    "self_attn.k_norm": (((1, "head_dim"),),),
    "linear_attn.in_proj_qkv": (_GDN_ALL, _HIDDEN),
    "linear_attn.in_proj_z": (_GDN_VALUES, _HIDDEN),
    "linear_attn.in_proj_a": (_GDN_HEADS, _HIDDEN),
    "linear_attn.in_proj_b": (_GDN_HEADS, _HIDDEN),
    "linear_attn.out_proj": (_HIDDEN, _GDN_VALUES),
    "linear_attn.A_log": (_GDN_HEADS,),
    "linear_attn.dt_bias": (_GDN_HEADS,),
    "mlp.gate": (((1, "num_experts"),), _HIDDEN),
    "mlp.shared_expert_gate": (_ONE, _HIDDEN),
    "mtp.fc": (_HIDDEN, ((2, "hidden_size"),)),
}
for _prefix, _key in (
    ("mlp.", "intermediate_size"),
    ("mlp.experts.", "moe_intermediate_size"),
    ("mlp.shared_expert.", "shared_expert_intermediate_size"),
):
    _SHAPES[f"{_prefix}gate_proj"] = _SHAPES[f"{_prefix}up_proj"] = (((1, _key),), _HIDDEN)
    _SHAPES[f"{_prefix}down_proj"] = (_HIDDEN, ((1, _key),))
_GATED_Q = (((2, "num_attention_heads", "head_dim"),), _HIDDEN)  # queries and, as wide, the gate of the output
_PLAIN_Q = (_HEADS, _HIDDEN)


def _shape(kind: str, gated: bool = True) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    return (_GATED_Q if gated else _PLAIN_Q) if kind == "self_attn.q_proj" else _SHAPES.get(kind, ())


def _named(kind: str) -> list[str]:
    return sorted({key for size in _shape(kind) for _, *keys in size for key in keys})


_KEYS = sorted({key for kind in (*_SHAPES, "self_attn.q_proj") for key in _named(kind)})


def _kind(module: str) -> str:
    """Return a module's name without what stands before it and without its layer and expert."""
    if module == "mtp.fc":
        return module
    for prefix in ("model.language_model.", "model.", "mtp."):
        module = module.removeprefix(prefix)
    if module.startswith("layers."):
        module = module.split(".", 2)[-1]
    return ".".join(word for word in module.split(".") if not word.isdecimal())


def _wanted(kind: str, config: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape that config.json gives a kind of module; None if there is none such or a key is not there."""
    shape = _shape(kind, gated=config.get("attn_output_gate", True) is not False)
    if not shape or any(key not in config for key in _named(kind)):
        return None
    return tuple(sum(math.prod([factor, *(config[key] for key in keys)]) for factor, *keys in size) for size in shape)
