"""Carry out the dequantization of a checkpoint: files of weights, by threads, then everything beside them."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.beside import CARD, DEQUANTIZED, copied_files, left_files
from mxq.checkpoint.headers import parse_json
from mxq.checkpoint.manifest import checksum
from mxq.checkpoint.quantization import without
from mxq.checkpoint.reader import INDEX, inside
from mxq.checkpoint.writer import ShardWriter, TensorSpec, index
from mxq.convert import dequantize_facts
from mxq.convert.dequantize import Plan
from mxq.convert.fill import Copy, copies, fill
from mxq.convert.origin import files, refuse_changed
from mxq.convert.partial import Partial, SpoiledError, held
from mxq.errors import MxqError
from mxq.files import write_json
from mxq.formats import tables
from mxq.progress import note, progress
from mxq.verify.declared import contradictions
from mxq.verify.structure import Module

_ELEMENTS_AT_ONCE = 1 << 20  # few enough for a chunk to stay in the processor's cache from reading to writing
_BF16_BYTES = 2
# What other tools say of the quantization in files of their own, some of which engines read.
_OF_QUANTIZATION = ("quantization_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")


def run(plan: Plan, out: Path, spec: str, *, jobs: int = 1) -> dict[str, Any]:
    """Carry out ``plan`` into ``out``, which appears when all of it is written; returns mxq_dequantized.json.

    What is complete when it is stopped, however that is done, is kept, and the same call continues from there.

    Args:
        plan: from :func:`mxq.convert.dequantize.plan`.
        out: must not exist or be empty.
        spec: what the user called the source.
        jobs: how many threads work.

    Raises:
        UsageError, InterruptedRunError: as :func:`mxq.convert.partial.held`.
        MxqError: a weight holds NaN or what bfloat16 cannot hold, the source changed meanwhile, a file cannot be read
            or written.
    """
    path = plan.source.path
    beside = _beside(path)
    for name in (*left_files(path), *(name for name in copied_files(path) if name not in beside)):
        note(f"not copied: {name}")
    made = dequantize_facts.origin(plan.source, spec, plan.experts) | {
        "max_shard_size": plan.max_shard_size,
        "source_files": files(plan.source),
    }
    names = [INDEX, "config.json", *beside, CARD, DEQUANTIZED]
    with held(out, made, plan.bytes_after, [shard.file for shard in plan.shards], names) as partial:
        if not partial.published:
            try:
                _write_tensors(plan, partial, jobs)
                _write_beside(plan, spec, partial)
            except (MxqError, OSError):
                refuse_changed(plan.source, made["source_files"], "read")  # which may be why
                raise
            refuse_changed(plan.source, made["source_files"], "read")
            partial.publish()
        return parse_json((partial.out / DEQUANTIZED).read_bytes(), DEQUANTIZED)


def _beside(path: Path) -> list[str]:
    return [name for name in copied_files(path) if name not in _OF_QUANTIZATION]


def _write_beside(plan: Plan, spec: str, partial: Partial) -> None:
    directory = partial.directory
    names = index(plan.shards)
    if names is not None:
        write_json(directory / INDEX, names)
    write_json(directory / "config.json", without(plan.source.config, ("quantization_config",)))
    for name in _beside(plan.source.path):
        shutil.copyfile(inside(plan.source.path, name), directory / name)
    facts = dequantize_facts.facts(plan, spec, directory, partial.journal.shards)
    written = directory / CARD
    written.write_text(dequantize_facts.card(facts), encoding="utf-8")
    facts["files"][written.name] = checksum(written)
    write_json(directory / DEQUANTIZED, facts)
    result = Checkpoint.open(directory)
    if result.quantization is not None or contradictions(result):
        raise SpoiledError("the checkpoint written is wrong, which is a defect of mxq")


def _write_tensors(plan: Plan, partial: Partial, jobs: int) -> None:
    """Write the shards that are not complete yet."""
    shards = [shard for shard in plan.shards if shard.file not in partial.journal.shards]
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    with _single_threaded(), progress("dequantizing", total, "B") as advance:
        for shard in shards:
            tasks = [task for tensor in shard.tensors for task in _tasks(plan, tensor)]
            checksum, _ = fill(partial.directory, shard, [tasks], jobs, advance)
            partial.complete(shard.file, checksum, [])


@dataclass(frozen=True, slots=True)
class _Dequantize:
    """Rows ``start`` to ``stop`` of a packed matrix's tensor; ``place`` is where in ``name`` they go, in bytes."""

    source: Checkpoint
    name: str
    module: Module
    start: int
    stop: int
    place: int
    nbytes: int

    def __call__(self, writer: ShardWriter) -> None:
        values = _values(self.source, self.module, self.start, self.stop)
        writer.write(self.name, self.place, values.view(torch.uint8).numpy().data)


def _tasks(plan: Plan, tensor: TensorSpec) -> Iterator[Copy | _Dequantize]:
    modules = plan.packed.get(tensor.name)
    if modules is None:
        yield from copies(plan.source, tensor.name)
        return
    row_bytes = tensor.shape[-1] * _BF16_BYTES
    rows = max(1, _ELEMENTS_AT_ONCE // tensor.shape[-1])
    place = 0
    for module in modules:
        for start in range(module.piece.start, module.piece.stop, rows):
            nbytes = (min(start + rows, module.piece.stop) - start) * row_bytes
            yield _Dequantize(plan.source, tensor.name, module, start, start + nbytes // row_bytes, place, nbytes)
            place += nbytes


def _values(checkpoint: Checkpoint, module: Module, start: int, stop: int) -> torch.Tensor:
    """Return rows of a packed matrix's tensor.

    Raises:
        SpoiledError: a scale is NaN, or a value of 2^128 or more.
    """
    assert module.scale is not None
    scale = checkpoint.read_rows(module.scale, start, stop)
    values = tables.dequantize(checkpoint.read_rows(module.piece.tensor, start, stop), scale)
    if int(scale.max()) > tables.SAFE_BYTE and not (finite := values.isfinite().all(dim=-1)).all():
        row = start - module.piece.start + int(finite.int().argmin())
        nan = bool(values.isnan().any())
        what = "a scale that means NaN (byte 255)" if nan else "values of 2^128 or more, which bfloat16 cannot hold"
        raise SpoiledError(
            f"{checkpoint.path}: {module.piece.module} holds {what}, the first in row {row}",
            "the checkpoint is damaged, or its source held NaN or infinity: look there; nothing was left behind",
        )
    return values


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Keep PyTorch from using threads of its own inside each of ours, where they would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
