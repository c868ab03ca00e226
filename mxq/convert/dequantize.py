"""Make an MXFP4 checkpoint into a bf16 one of the same numbers, for engines that have no MXFP4.

Every packed weight becomes what its codes and scales mean, which bfloat16 holds exactly (:mod:`mxq.formats.tables`);
all else is copied byte for byte, and config.json loses its ``quantization_config``. So an engine that loads the result
computes what one with MXFP4 weights computes, up to the order of sums. Activations stay as they are: where the
checkpoint quantizes them too (W4A4), that is not simulated.

Whatever tool made the checkpoint, it is read as :mod:`mxq.convert.opening` reads it, and refused if anything is wrong
with it that headers and config show.
"""

import contextlib
import shutil
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.headers import parse_json
from mxq.checkpoint.reader import INDEX, inside, read_config
from mxq.checkpoint.writer import Shard, ShardWriter, TensorSpec, index, layout
from mxq.convert import simulated, structure
from mxq.convert.beside import CARD, DEQUANTIZED, copied_files, left_files
from mxq.convert.claims import claims_of
from mxq.convert.declared import contradictions
from mxq.convert.findings import CONVERT_AGAIN, Report
from mxq.convert.manifest import checksum
from mxq.convert.opening import open_checked
from mxq.convert.origin import changes, files
from mxq.convert.partial import Partial, SpoiledError, held
from mxq.convert.plan import DEFAULT_SHARD_SIZE
from mxq.convert.structure import Module
from mxq.errors import MxqError, UsageError
from mxq.files import write_json
from mxq.formats import tables
from mxq.models import qwen35
from mxq.progress import Advance, note, progress

EXPERTS = ("published", "fused", "per-expert")
_ELEMENTS_AT_ONCE = 1 << 20  # few enough for a chunk to stay in the processor's cache from reading to writing
_BYTES_AT_ONCE = 16 << 20
_BF16_BYTES = 2
# What other tools say of the quantization in files of their own, some of which engines read.
_OF_QUANTIZATION = ("quantization_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")


@dataclass(frozen=True)
class Plan:
    """What will be written.

    Attributes:
        source: the checkpoint as its files have it.
        renamed: the same with packed weights under Quark's names; tensors are read from here.
        weight_only: the source quantizes no activations.
        experts: how packed routed experts are written, one of :data:`EXPERTS`.
        max_shard_size: of the files written, in bytes.
        packed: tensors to be written -> the matrices whose rows they are, in order; tensors without are copied.
        shards: the files.
    """

    source: Checkpoint
    renamed: Checkpoint
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
    config = read_config(path)
    qwen35.family(config, str(path))
    if claims_of(config, str(path)) is None:
        raise UsageError(f"{path} is not quantized, so there is nothing to dequantize", "give an MXFP4 checkpoint")
    report = Report()
    opened = open_checked(path, report)
    if opened is not None:
        structure.check(opened, report)
    if report.problems or opened is None:
        raise _broken(path, report)
    copied_files(path)  # raises for one that could not be copied, long before its turn
    outputs = _outputs(opened.checkpoint, experts)
    specs = [_spec(opened.checkpoint, name, modules) for name, modules in outputs.items()]
    return Plan(
        source=Checkpoint.open(path),
        renamed=opened.checkpoint,
        weight_only=not simulated.quantizes_activations(config["quantization_config"]),
        experts=experts,
        max_shard_size=max_shard_size,
        packed={name: modules for name, modules in outputs.items() if modules},
        shards=layout([(spec,) for spec in specs], max_shard_size),
    )


def _broken(path: Path, report: Report) -> MxqError:
    problems = report.problems
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    fix = problems[0].fix
    if all(problem.rewritable for problem in problems):
        fix = f"mxq verify {path} --fix OUT writes a copy without"
    return MxqError(f"{path}: {problems[0].what}{more}", fix)


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
    return (
        f"{block}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}",
        int(expert),
        projection == "up_proj",
    )


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


def dequantize(plan: Plan, out: Path, spec: str, *, jobs: int = 1) -> dict[str, Any]:
    """Carry out ``plan`` into ``out``, which appears when all of it is written; returns mxq_dequantized.json.

    What is complete when it is stopped, however that is done, is kept, and the same call continues from there.

    Args:
        plan: from :func:`plan`.
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
    made = simulated.origin(plan.source, spec, plan.experts) | {
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
                _check_source(plan, made)  # which may be why
                raise
            _check_source(plan, made)
            partial.publish()
        return parse_json((partial.out / DEQUANTIZED).read_bytes(), DEQUANTIZED)


def _beside(path: Path) -> list[str]:
    return [name for name in copied_files(path) if name not in _OF_QUANTIZATION]


def _check_source(plan: Plan, made: dict[str, Any]) -> None:
    changed = changes(plan.source, made["source_files"])
    if changed:
        raise SpoiledError(
            f"{plan.source.path} changed while it was read: {'; '.join(changed)}",
            "nothing was left behind: run the same command again when nothing writes to it",
        )


def _write_beside(plan: Plan, spec: str, partial: Partial) -> None:
    directory = partial.directory
    names = index(plan.shards)
    if names is not None:
        write_json(directory / INDEX, names)
    write_json(directory / "config.json", _config(plan.source.config))
    for name in _beside(plan.source.path):
        shutil.copyfile(inside(plan.source.path, name), directory / name)
    facts = simulated.facts(plan, spec, directory, partial.journal.shards)
    written = directory / CARD
    written.write_text(simulated.card(facts), encoding="utf-8")
    facts["files"][written.name] = checksum(written)
    write_json(directory / DEQUANTIZED, facts)
    result = Checkpoint.open(directory)
    if result.quantization is not None or contradictions(result):
        raise SpoiledError("the checkpoint written is wrong, which is a defect of mxq")


def _config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without its ``quantization_config``, which some tools repeat for the language model."""
    left = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := left.get("text_config"), dict):
        left["text_config"] = {key: value for key, value in text.items() if key != "quantization_config"}
    return left


@dataclass(frozen=True, slots=True)
class _Task:
    """Rows ``start`` to ``stop`` of a packed matrix's tensor, or those bytes of one that is copied, and their place.

    ``place`` is the byte of the tensor ``name`` at which they are written.
    """

    name: str
    module: Module | None
    start: int
    stop: int
    place: int
    nbytes: int


def _write_tensors(plan: Plan, partial: Partial, jobs: int) -> None:
    """Write the shards that are not complete yet."""
    shards = [shard for shard in plan.shards if shard.file not in partial.journal.shards]
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    with _single_threaded(), progress("dequantizing", total, "B") as advance:
        for shard in shards:
            written = _write_shard(plan, shard, partial.directory, jobs, advance)
            partial.complete(shard.file, written, [])


def _write_shard(plan: Plan, shard: Shard, directory: Path, jobs: int, advance: Advance) -> dict[str, Any]:
    """Write a file and return its size and checksum, which this thread takes while others write."""
    tasks = [task for tensor in shard.tensors for task in _tasks(plan, tensor)]
    with ShardWriter(directory, shard) as writer, ThreadPoolExecutor(jobs, "dequantize") as pool:
        try:
            for task in pool.map(lambda task: _carry_out(plan, task, writer), tasks):
                writer.hash()
                advance(task.nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return writer.checksum


def _tasks(plan: Plan, tensor: TensorSpec) -> Iterator[_Task]:
    modules = plan.packed.get(tensor.name)
    if modules is None:
        for start in range(0, tensor.nbytes, _BYTES_AT_ONCE):
            stop = min(start + _BYTES_AT_ONCE, tensor.nbytes)
            yield _Task(tensor.name, None, start, stop, start, stop - start)
        return
    row_bytes = tensor.shape[-1] * _BF16_BYTES
    rows = max(1, _ELEMENTS_AT_ONCE // tensor.shape[-1])
    place = 0
    for module in modules:
        for start in range(module.piece.start, module.piece.stop, rows):
            stop = min(start + rows, module.piece.stop)
            yield _Task(tensor.name, module, start, stop, place, (stop - start) * row_bytes)
            place += (stop - start) * row_bytes


def _carry_out(plan: Plan, task: _Task, writer: ShardWriter) -> _Task:
    if task.module is None:
        writer.write(task.name, task.place, plan.renamed.read_part(task.name, task.start, task.stop))
    else:
        writer.write(task.name, task.place, _values(plan.renamed, task.module, task.start, task.stop))
    return task


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
