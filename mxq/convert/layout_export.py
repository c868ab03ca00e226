"""Packed layers of an MXFP4 checkpoint, written as a kernel of AITER reads them, for one GPU; one operand at a time."""

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.quantization import Claims
from mxq.checkpoint.reader import INDEX
from mxq.checkpoint.resolve import commit, hub_id
from mxq.checkpoint.staging import staged
from mxq.checkpoint.writer import Shard, ShardWriter, TensorSpec, index, layout
from mxq.convert.layout_parts import Operand, Rank, check_fits, operands
from mxq.convert.manifest import source_name
from mxq.convert.packed import check_bytes, open_packed
from mxq.convert.plan import DEFAULT_SHARD_SIZE
from mxq.errors import MxqError, UsageError
from mxq.files import versions, write_json
from mxq.formats.rules import NAN_BYTE
from mxq.layouts.kernels import PADDING, Arrays, Kernel
from mxq.progress import progress

DESCRIPTION = "mxq_layout.json"
FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """What will be written: operands of a kernel, and the files that they go to."""

    source: Checkpoint
    claims: Claims
    kernel: Kernel
    rank: Rank
    operands: list[Operand]
    shards: list[Shard]

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors written."""
        return sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)


def plan(path: Path, kernel: Kernel, rank: Rank, only: str = "*", max_shard_size: int = DEFAULT_SHARD_SIZE) -> Plan:
    """Plan an export; no weights are read.

    Raises:
        UsageError: it has no such layers, they cannot be shared like that, or the kernel does not take them.
        MxqError: the checkpoint is broken.
    """
    source, claims = open_packed(path, "lay out")
    if rank.ep > 1 and not kernel.is_moe:
        raise UsageError(
            f"{kernel.name} is for dense layers, which expert parallelism does not share", "leave out --ep"
        )
    found = operands(source, kernel.is_moe, rank, lambda name: fnmatch.fnmatchcase(name, only))
    if not found:
        what = "routed experts" if kernel.is_moe else "dense modules"
        raise UsageError(
            f"{path} has no MXFP4 {what}" + ("" if only == "*" else f" named {only}"),
            "kernels are for experts (moe-...) or for the rest (dense-...); mxq inspect MODEL lists what is quantized",
        )
    for one in found:
        check_fits(one, kernel)
    groups = [
        [TensorSpec(f"{one.name}.{name}", "U8", shape) for name, shape in kernel.shapes(one.sizes).items()]
        for one in found
    ]
    return Plan(source, claims, kernel, rank, found, layout(groups, max_shard_size))


def run(plan: Plan, out: Path, spec: str) -> None:
    """Write it to the new directory ``out``; ``spec`` names the source.

    Raises:
        UsageError: ``out`` is not to be written to.
        MxqError: reading or writing failed, a scale is NaN, or a file is not the one that mxq wrote.
    """
    modules = [module for one in plan.operands for module in one.source]
    check_bytes(plan.source, [name for module in modules for name in (module.piece.tensor, module.scale) if name])
    waiting = iter(plan.operands)
    with staged(out, plan.bytes_after) as work, progress("laying out", plan.bytes_after, "B") as advance:
        files = {}
        for shard in plan.shards:
            with ShardWriter(work, shard) as writer:
                for _ in shard.groups:
                    one = next(waiting)  # of one type all, so that groups are in the order of the operands
                    for e in range(one.count):
                        for name, array in plan.kernel.stored(_plain(plan, one, e)).items():
                            writer.write(f"{one.name}.{name}", e * array.size, array.data.cast("B"))
                            advance(array.size)
                    writer.hash()
            files[shard.file] = writer.checksum
        if (content := index(plan.shards)) is not None:
            write_json(work / INDEX, content)
        write_json(work / DESCRIPTION, _description(plan, spec, files))


def _plain(plan: Plan, operand: Operand, e: int) -> Arrays:
    """Return the plain matrices of expert ``e``, of a batch of one; or those of a dense module."""
    plain = operand.read_one(plan.source, e)
    if any((array == NAN_BYTE).any() for name, array in plain.items() if name.endswith("_scale")):
        raise MxqError(
            f"{plan.source.path}: {operand.name} holds scales that mean NaN",
            "the source of the checkpoint held NaN or infinity: look there",
        )
    return {name: array[None] for name, array in plain.items()} if plan.kernel.is_moe else plain


def _description(plan: Plan, spec: str, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the content of mxq_layout.json."""
    kernel, rank = plan.kernel, plan.rank
    return {
        "format": FORMAT,
        "kernel": kernel.name,
        "read_by": kernel.read_by,
        "aiter": kernel.versions,
        **form(kernel),
        "tp": rank.tp,
        "ep": rank.ep,
        "rank": rank.rank,
        "scales": {"block": 32, "stored": "E8M0 bytes: 2 ** (byte - 127)", "rule": plan.claims.rule},
        "activations": "unquantized" if plan.claims.weight_only else "mxfp4",
        "source": {
            "name": source_name(spec),
            "commit": None if hub_id(spec) is None else commit(plan.source.path),
            "fingerprint": fingerprint(plan.source),
            "method": plan.claims.method,
        },
        "operands": {
            one.name: entry(kernel, one.name, one.before, one.sizes, rank.of_ep) | where(one) for one in plan.operands
        },
        "files": files,
        "versions": versions("numpy"),
    }


def form(kernel: Kernel) -> dict[str, Any]:
    """Return what mxq_layout.json says of the bytes that a kernel reads, whatever they are of."""
    padding = {**PADDING, "scales in columns up to a multiple of 8": kernel.column_fill}
    return {
        "layouts": kernel.orders,
        "stored": "transposes of what the kernel takes" if kernel.transposed else "as the kernel takes them",
        "padding": padding if kernel.is_moe else None,
    }


def where(operand: Operand) -> dict[str, Any]:
    """Return what mxq_layout.json says of where in its source a dense module's part is; nothing of experts."""
    if not operand.parts:
        return {}
    (part,) = operand.parts
    return {"rows": [list(rows) for rows in part.rows], "columns": list(part.columns)}


def entry(kernel: Kernel, name: str, before: tuple[int, ...], sizes: tuple[int, ...], of_ep: int) -> dict[str, Any]:
    """Return what mxq_layout.json says of an operand.

    Args:
        kernel: for which it is.
        name: of the block of experts, or of the module.
        before: (E, H, I) or (N, K) of the whole.
        sizes: the same of the GPU's part.
        of_ep: the GPU's EP rank.
    """
    letters = "EHI" if kernel.is_moe else "NK"
    found: dict[str, Any] = {
        "source": dict(zip(letters, before, strict=True)),
        "part": dict(zip(letters, sizes, strict=True)),
        "modules": [name],
        "tensors": {tensor: list(shape) for tensor, shape in kernel.shapes(sizes).items()},
    }
    if kernel.is_moe:
        e, h, i = sizes
        found["padded"] = dict(zip(letters, (e, *kernel.padded(h, i)), strict=True))
        found["experts"] = [e * of_ep, e * (of_ep + 1)]
        found["modules"] = [f"{name}.{{expert}}.{projection}" for projection in ("gate_proj", "up_proj", "down_proj")]
    return found
