"""Carry out a plan: read, quantize and write piece by piece, then everything beside the weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.headers import nbytes
from mxq.checkpoint.quantization import quark_config
from mxq.checkpoint.reader import INDEX, inside
from mxq.checkpoint.writer import Shard, ShardWriter, index
from mxq.convert import manifest, structure
from mxq.convert.beside import CARD, LAYERS, MANIFEST, copied_files, left_files
from mxq.convert.card import card
from mxq.convert.error import ErrorMeter
from mxq.convert.origin import changes, conversion
from mxq.convert.partial import Partial, SpoiledError, held
from mxq.convert.plan import Group, Plan
from mxq.errors import MxqError
from mxq.files import write_json
from mxq.formats import cpu
from mxq.models.qwen35 import Piece
from mxq.progress import Advance, note, progress

_ELEMENTS_AT_ONCE = 1 << 20  # few enough for a chunk to stay in the processor's cache from reading to writing
_BYTES_AT_ONCE = 16 << 20


def run(plan: Plan, out: Path, spec: str) -> dict[str, Any]:
    """Convert as planned into ``out``, which appears when all of it is written and checked; returns the manifest.

    What is complete when it is stopped, however that is done, is kept, and the same call continues from there.

    Args:
        plan: from :func:`mxq.convert.plan.plan`.
        out: must not exist or be empty.
        spec: what the user called the source, for manifest and card.

    Raises:
        UsageError, InterruptedRunError: as :func:`mxq.convert.partial.held`.
        MxqError: a weight holds NaN or infinity, the source changed meanwhile, a file cannot be read or written.
    """
    for name in left_files(plan.source.path):
        note(f"not copied: {name}")
    made = conversion(plan, spec)
    beside = [INDEX, LAYERS, "config.json", *copied_files(plan.source.path), CARD, MANIFEST]
    with held(out, made, plan.bytes_after, [shard.file for shard in plan.shards], beside) as partial:
        if not partial.published:
            try:
                _write_tensors(plan, partial)
                _write_beside(plan, spec, partial)
            except (MxqError, OSError):
                _check_source(plan, made)  # which may be why
                raise
            _check_source(plan, made)
            partial.publish()
        facts = manifest.read(partial.out)
    assert facts is not None
    return facts


def _write_beside(plan: Plan, spec: str, partial: Partial) -> None:
    directory = partial.directory
    names = index(plan.shards)
    if names is not None:
        write_json(directory / INDEX, names)
    shards = partial.journal.shards
    layers = [layer for shard in plan.shards for layer in shards[shard.file]["layers"]]
    _write_layers(directory, layers)
    write_json(directory / "config.json", _config(plan))
    for name in copied_files(plan.source.path):
        shutil.copyfile(inside(plan.source.path, name), directory / name)
    known = {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in shards.items()}
    facts = manifest.build(plan, spec, directory, known)
    written = directory / CARD
    written.write_text(card(facts, layers), encoding="utf-8")  # from the manifest, and then itself a file of it
    facts["files"][written.name] = manifest.checksum(written)
    write_json(directory / MANIFEST, facts)
    problems = structure.problems_of(directory)
    if problems:
        raise SpoiledError(f"the checkpoint written is wrong, which is a defect of mxq: {problems[0].what}")


def _check_source(plan: Plan, made: dict[str, Any]) -> None:
    changed = changes(plan.source, made["source_files"])
    if changed:
        raise SpoiledError(
            f"{plan.source.path} changed while it was converted: {'; '.join(changed)}",
            "nothing was left behind: run the same command again when nothing writes to it",
        )


def _config(plan: Plan) -> dict[str, Any]:
    recipe = plan.recipe
    quantization = quark_config(plan.exclude, weight_only=recipe.weight_only, rule=recipe.scale_rule)
    return plan.source.config | {"quantization_config": quantization}


def _write_layers(directory: Path, layers: list[dict[str, Any]]) -> None:
    with (directory / LAYERS).open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(layer) + "\n" for layer in layers)


def _write_tensors(plan: Plan, partial: Partial) -> None:
    """Write the shards that are not complete yet."""
    shards = [shard for shard in plan.shards if shard.file not in partial.journal.shards]
    with progress("converting", sum(_bytes_before(plan, shard) for shard in shards), "B") as advance:
        for shard in shards:
            layers = []
            with ShardWriter(partial.directory, shard) as writer:
                for outputs in shard.groups:
                    group = plan.groups[outputs[0].name]
                    if group.pieces:
                        layers += [_quantize(plan, piece, group, writer, advance) for piece in group.pieces]
                    else:
                        _copy(plan.source, outputs[0].name, writer, advance)
            partial.complete(shard.file, layers)


def _bytes_before(plan: Plan, shard: Shard) -> int:
    """Return the bytes of the source that a shard is made from."""
    return sum(_group_bytes(plan, plan.groups[outputs[0].name]) for outputs in shard.groups)


def _group_bytes(plan: Plan, group: Group) -> int:
    if not group.pieces:
        return group.outputs[0].nbytes
    tensors = ((piece, plan.source.tensors[piece.tensor]) for piece in group.pieces)
    return sum((piece.stop - piece.start) * nbytes(tensor.dtype, tensor.shape[-1:]) for piece, tensor in tensors)


def _copy(source: Checkpoint, name: str, writer: ShardWriter, advance: Advance) -> None:
    for chunk in source.read_bytes(name, _BYTES_AT_ONCE):
        writer.append(name, chunk)
        advance(len(chunk))


def _quantize(plan: Plan, piece: Piece, group: Group, writer: ShardWriter, advance: Advance) -> dict[str, Any]:
    weight, scales = group.outputs
    columns = plan.source.tensors[piece.tensor].shape[-1]
    rows = max(1, _ELEMENTS_AT_ONCE // columns)
    meter = ErrorMeter()
    for start in range(piece.start, piece.stop, rows):
        x = plan.source.read_rows(piece.tensor, start, min(start + rows, piece.stop))
        packed, scale, measures = cpu.quantize_measured(x, plan.recipe.scale_rule, threads=torch.get_num_threads())
        if measures.bad_blocks:
            raise _not_finite(plan.source, piece)
        writer.append(weight.name, packed)
        writer.append(scales.name, scale)
        meter.add(measures, x.numel())
        advance(x.nbytes)
    return {
        "module": piece.module,
        "tensor": piece.tensor,
        "shape": [piece.stop - piece.start, columns],
        **meter.as_dict(),
    }


def _not_finite(source: Checkpoint, piece: Piece) -> MxqError:
    bad = ~torch.isfinite(source.read_rows(piece.tensor, piece.start, piece.stop))
    row = int(bad.any(dim=-1).nonzero()[0])
    where = "" if piece.tensor == f"{piece.module}.weight" else f" ({piece.module})"
    return SpoiledError(
        f"tensor {piece.tensor}{where} holds {int(bad.sum())} values that are NaN or infinite, the first in row {row}",
        "the source is damaged: MXFP4 cannot hold such values, and nothing was left behind",
    )
