"""What becomes of an MXFP4 checkpoint that is made into a bf16 one of the same numbers, for engines without MXFP4.

Every packed weight becomes what its codes and scales mean, which bfloat16 holds exactly (:mod:`mxq.formats.tables`);
all else is copied byte for byte, and config.json loses its ``quantization_config``. So an engine that loads the result
computes what one with MXFP4 weights computes, up to the order of sums. Activations stay as they are: where the
checkpoint quantizes them too (W4A4), that is not simulated.

Whatever tool made the checkpoint, it is read as :mod:`mxq.verify.opening` reads it, and refused if anything is wrong
with it that headers and config show.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.beside import copied_files
from mxq.checkpoint.writer import Shard, TensorSpec, layout
from mxq.convert.packed import open_packed
from mxq.convert.plan import DEFAULT_SHARD_SIZE
from mxq.errors import MxqError
from mxq.models import qwen35
from mxq.verify import structure
from mxq.verify.findings import CONVERT_AGAIN
from mxq.verify.structure import Module

EXPERTS = ("published", "fused", "per-expert")
"""How routed experts that are packed can be written."""


@dataclass(frozen=True)
class Plan:
    """What will be written.

    Attributes:
        source: the checkpoint, packed weights by Quark's names.
        weight_only: the source quantizes no activations.
        experts: how packed routed experts are written, one of :data:`EXPERTS`.
        max_shard_size: of the files written, in bytes.
        packed: tensors to be written -> the matrices whose rows they are, in order; tensors without are copied.
        shards: the files.
    """

    source: Checkpoint
    weight_only: bool
    experts: str
    max_shard_size: int
    packed: dict[str, list[Module]]
    shards: list[Shard]

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors written."""
        return sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)

    @property
    def matrices(self) -> int:
        """How many matrices are dequantized."""
        return sum(map(len, self.packed.values()))

    @property
    def copies(self) -> int:
        """How many tensors are copied."""
        return sum(len(shard.groups) for shard in self.shards) - len(self.packed)


def plan(path: Path, *, experts: str = "published", max_shard_size: int = DEFAULT_SHARD_SIZE) -> Plan:
    """Plan what becomes of the MXFP4 checkpoint in ``path``; no weights are read.

    Args:
        path: the checkpoint, of mxq or another tool.
        experts: how routed experts that are packed are written: all ``fused``, all ``per-expert``, or as in the
            ``published`` checkpoints, which have the language model's fused; the MTP head's then stay as they are.
        max_shard_size: of the files written, in bytes.

    Raises:
        UsageError: it is not quantized, of another architecture, or no checkpoint at all.
        MxqError: it is quantized in another way, or broken.
    """
    source, claims = open_packed(path, "dequantize")
    copied_files(path)  # raises for one that could not be copied, long before its turn
    outputs = _outputs(source, experts)
    specs = [_spec(source, name, modules) for name, modules in outputs.items()]
    return Plan(
        source=source,
        weight_only=claims.weight_only,
        experts=experts,
        max_shard_size=max_shard_size,
        packed={name: modules for name, modules in outputs.items() if modules},
        shards=layout([(spec,) for spec in specs], max_shard_size),
    )


def _outputs(checkpoint: Checkpoint, experts: str) -> dict[str, list[Module]]:
    """Return the tensors to be written, in the source's order, with the packed matrices that they are made of."""
    found: dict[str, list[Module]] = defaultdict(list)
    for module in structure.modules(checkpoint).values():
        if module.scale is not None:
            found[module.piece.tensor].append(module)
    scales = {module.scale for modules in found.values() for module in modules}
    if lost := structure.scales_of(checkpoint).keys() - scales:
        raise MxqError(f"{checkpoint.path}: {min(lost)} are scales of no matrix", CONVERT_AGAIN)
    outputs: dict[str, list[tuple[int, bool, Module]]] = {}
    for name in checkpoint.tensors:
        if name in scales:
            continue
        parts = [(_target(module, experts), module) for module in found.get(name, ())]
        for (target, expert, is_up), module in parts:
            if target in checkpoint.tensors and target not in found:
                raise MxqError(f"{checkpoint.path}: {target} is there, and {name} is a part of it", CONVERT_AGAIN)
            outputs.setdefault(target, []).append((expert, is_up, module))
        if not parts:
            outputs[name] = []
    return {name: [module for *_, module in sorted(parts, key=lambda p: p[:2])] for name, parts in outputs.items()}


def _target(module: Module, experts: str) -> tuple[str, int, bool]:
    """Return the tensor that a matrix is written to, the expert that it is, and whether it follows the gate's rows."""
    name, block = module.piece.module, qwen35.experts_module(module.piece.module)
    is_stored_fused = not module.piece.tensor.endswith(".weight")
    as_published = is_stored_fused or qwen35.part(name) == "text"
    if block is None or not (as_published if experts == "published" else experts == "fused"):
        return f"{name}.weight", 0, False
    expert, projection = name.removeprefix(f"{block}.").split(".")
    fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
    return f"{block}.{fused}", int(expert), projection == "up_proj"


def _spec(checkpoint: Checkpoint, name: str, modules: list[Module]) -> TensorSpec:
    """Return what a tensor to be written looks like.

    Raises:
        MxqError: matrices that would be stored as one have different sizes.
    """
    if not modules:
        tensor = checkpoint.tensors[name]
        return TensorSpec(name, tensor.dtype, tensor.shape)
    sizes = {(m.piece.stop - m.piece.start, checkpoint.tensors[m.piece.tensor].shape[-1] * 2) for m in modules}
    if len(sizes) > 1:
        raise MxqError(f"{checkpoint.path}: the matrices of {name} differ in size", CONVERT_AGAIN)
    ((rows, columns),) = sizes
    if name.endswith(".weight"):
        return TensorSpec(name, "BF16", (rows, columns))
    count = len(modules) // (2 if name.endswith("gate_up_proj") else 1)
    return TensorSpec(name, "BF16", (count, len(modules) * rows // count, columns))
