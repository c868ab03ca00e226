"""Are a checkpoint's tensors all that a Qwen3.5 model has, of as many layers and experts as its config.json says?"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator

from mxq.checkpoint import Checkpoint
from mxq.errors import UsageError
from mxq.models import qwen35
from mxq.models.qwen35 import Piece

_LAYER = re.compile(r"((?:model\.language_model|model|mtp)\.layers\.\d+\.)(.+)")
_ALWAYS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_ATTENTION = tuple(f"self_attn.{name}.weight" for name in "q_proj k_proj v_proj o_proj q_norm k_norm".split())
_GDN = (
    *(f"linear_attn.{name}.weight" for name in "in_proj_qkv in_proj_z in_proj_b in_proj_a conv1d".split()),
    *("linear_attn.norm.weight", "linear_attn.out_proj.weight", "linear_attn.A_log", "linear_attn.dt_bias"),
)
_MLP = tuple(f"{name}_proj.weight" for name in ("gate", "up", "down"))
_DENSE = tuple(f"mlp.{name}" for name in _MLP)
_MOE = ("mlp.gate.weight", "mlp.shared_expert_gate.weight", *(f"mlp.shared_expert.{name}" for name in _MLP))
_EXPERTS = "mlp.experts."
_MTP = tuple(f"mtp.{name}.weight" for name in "fc norm pre_fc_norm_embedding pre_fc_norm_hidden".split())


def check_complete(source: Checkpoint, held: dict[str, list[Piece]]) -> None:
    """Make sure that no tensor is missing, and that layers and experts are as many as config.json says.

    The vision tower may be left out, and MTP as a whole; see :func:`lacks_mtp`.

    Args:
        source: the checkpoint, packed or not.
        held: its tensors -> the modules they hold, from :func:`mxq.models.qwen35.pieces`.

    Raises:
        UsageError: some are missing or too many.
    """
    config = qwen35.text_config(source.config)
    numbers: set[str] = set()
    experts: dict[str, set[str]] = defaultdict(set)
    for name, pieces in held.items():
        layer = name.partition("layers.")[2].partition(".")[0]
        if qwen35.part(name) == "text" and layer.isdecimal():
            numbers.add(layer)
        for piece in pieces:
            block = qwen35.experts_module(piece.module)
            if block is not None:
                experts[block].add(piece.module.removeprefix(block + "."))
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or len(numbers) != layers or numbers != set(map(str, range(layers))):
        raise UsageError(
            f"{source.path}: config.json says {layers} layers, the tensors are of {len(numbers)}",
            "the checkpoint is incomplete or its config.json is of another model",
        )
    for block, found in experts.items():
        count = config.get("num_experts")
        present = {module.partition(".")[0] for module in found}
        if len(present) != count:
            raise UsageError(f"{source.path}: config.json says {count} experts, but {block} has {len(present)}")
        wanted = {f"{expert}.{part}_proj" for expert in range(len(present)) for part in ("gate", "up", "down")}
        if missing := wanted - found:
            raise UsageError(f"{source.path}: {block}.{min(missing)} is missing", "the checkpoint is incomplete")
    lacking = list(_lacking(source, held))
    if lacking:
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise UsageError(f"{source.path}: {lacking[0]} is missing{more}", "the checkpoint is incomplete: get it again")


def lacks_mtp(checkpoint: Checkpoint) -> bool:
    """Tell whether config.json says that there is an MTP head, and there is none: some tools drop it."""
    layers = qwen35.text_config(checkpoint.config).get("mtp_num_hidden_layers")
    return bool(layers) and not any(qwen35.part(name) == "mtp" for name in checkpoint.tensors)


def _lacking(source: Checkpoint, names: Collection[str]) -> Iterator[str]:
    """Yield the tensors that a model with these has, and that are not there."""
    layers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if found := _LAYER.fullmatch(name):
            layers[found[1]].add(found[2] if not found[2].startswith(_EXPERTS) else _EXPERTS)
    for prefix, held in layers.items():
        attention = any(name.startswith("self_attn.") for name in held)
        dense = not held & {_EXPERTS, *_MOE}
        wanted = {*_ALWAYS, *(_ATTENTION if attention else _GDN), *(_DENSE if dense else (*_MOE, _EXPERTS))}
        yield from (f"{prefix}{name}".rstrip(".") for name in sorted(wanted - held))
    base = "model.language_model." if any(name.startswith("model.language_model.") for name in names) else "model."
    config = source.config
    tied = config.get("tie_word_embeddings", qwen35.text_config(config).get("tie_word_embeddings"))
    outside = [f"{base}embed_tokens.weight", f"{base}norm.weight", *(["lm_head.weight"] if tied is False else [])]
    if any(qwen35.part(name) == "mtp" for name in names):
        outside += _MTP
    yield from (name for name in outside if name not in names)
