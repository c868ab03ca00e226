"""Tensors of a dump by the names that engines have for them, and what they are made of.

vLLM's experts are ``language_model.model.layers.N.mlp.experts.routed_experts.w13_weight``. Its dense layers are merged
of the checkpoint's (:data:`mxq.models.qwen35.FUSED`): ``qkv_proj`` is a GPU's part of query, of key and of value.
"""

from collections.abc import Collection

from mxq.checkpoint import Checkpoint
from mxq.convert.layout_parts import Operand, Rank, operands
from mxq.layouts.kernels import EXPERTS, LINEAR
from mxq.models import qwen35

_TENSORS = {
    "w13_weight_scale": "w13_scale",
    "w2_weight_scale": "w2_scale",
    "w13_weight": "w13",
    "w2_weight": "w2",
}
_PREFIXES = ("model.language_model.", "language_model.model.")


def split(name: str) -> tuple[str, str] | None:
    """Return the operand that a tensor belongs to, a name that :func:`found` takes, and which of its tensors it is.

    None for what is no operand's by its name.
    """
    operand, _, tensor = name.rpartition(".")
    tensor = _TENSORS.get(tensor, tensor)
    return (plain(operand), tensor) if operand and tensor in (*EXPERTS, *LINEAR) else None


def plain(module: str) -> str:
    """Return a name that is the same whatever calls it so: the checkpoint's, without what only some put in it."""
    for prefix in _PREFIXES:
        if module.startswith(prefix):
            module = f"model.{module.removeprefix(prefix)}"
    return module.removesuffix(".routed_experts")


def found(checkpoint: Checkpoint, rank: Rank, names: Collection[str]) -> dict[str, Operand]:
    """Return by their :func:`plain` names those operands ``names`` that a checkpoint has, as one GPU has them.

    Raises:
        UsageError: they cannot be shared like that.
        MxqError: a layer of experts is not whole.
    """
    members = {name: _members(name) for name in names}
    wanted = {*names, *(member for merged in members.values() for member in merged)}
    parts: dict[str, Operand] = {}
    for moe in (True, False):
        parts |= {plain(one.name): one for one in operands(checkpoint, moe, rank, lambda name: plain(name) in wanted)}
    for name, merged in members.items():
        if merged and all(member in parts for member in merged):
            parts[name] = _merged(name, [parts[member] for member in merged])
    return parts


def _members(name: str) -> list[str]:
    prefix, _, last = name.rpartition(".")
    return [f"{prefix}.{member}" for member in qwen35.FUSED.get(last, ())]


def _merged(name: str, members: list[Operand]) -> Operand:
    def stacked(sizes: list[tuple[int, ...]]) -> tuple[int, ...]:
        return sum(n for n, _ in sizes), sizes[0][1]

    return Operand(
        name,
        stacked([one.before for one in members]),
        stacked([one.sizes for one in members]),
        (0, 0),
        tuple(module for one in members for module in one.source),
        members[0].rank,
        tuple(part for one in members for part in one.parts),
    )
