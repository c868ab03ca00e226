"""What headers, index and config show of a converted checkpoint: is it complete, and will engines read it as it is?

Nothing here relies on the plan that made the checkpoint: what is quantized is read from the tensors, and the config is
held against them by the rules by which vLLM reads it.
"""

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint, QuantizationConfig, TensorInfo
from mxq.checkpoint.reader import INDEX
from mxq.convert.decide import check_complete
from mxq.convert.declared import contradictions
from mxq.errors import MxqError, UsageError
from mxq.formats.mxfp4 import BLOCK
from mxq.models import qwen35
from mxq.models.qwen35 import Piece


@dataclass(frozen=True)
class Problem:
    """Something wrong with a checkpoint, in words, and what to do about it."""

    what: str
    fix: str = "convert it again"


@dataclass(frozen=True)
class Module:
    """A matrix of the checkpoint: its rows, and the tensor of its scales if it is packed."""

    piece: Piece
    scale: str | None


@dataclass(frozen=True)
class Check:
    """One check: its name, what it covered, what it found; or why it was not done."""

    name: str
    covered: str
    problems: list[Problem]
    done: bool = True


@dataclass
class Report:
    """What was checked, in the order of checking, and what was found wrong."""

    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, covered: str, problems: list[Problem]) -> None:
        """Note the outcome of a check: its name, what it covered, what it found."""
        self.checks.append(Check(name, covered, problems))

    def skip(self, name: str, reason: str) -> None:
        """Note that a check was not done."""
        self.checks.append(Check(name, reason, [], done=False))

    @property
    def problems(self) -> list[Problem]:
        """Everything found wrong."""
        return [problem for check in self.checks for problem in check.problems]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        return {
            "ok": not self.problems,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def problems_of(path: Path) -> list[Problem]:
    """Return what is wrong with a checkpoint as far as headers, index and config show it."""
    report = Report()
    checkpoint = open_checked(path, report)
    if checkpoint is not None:
        check(checkpoint, report)
    return report.problems


def modules(checkpoint: Checkpoint) -> dict[str, Module]:
    """Return every matrix of a checkpoint by its module's name.

    Raises:
        MxqError: experts stored fused have an odd number of rows.
    """
    found = {}
    for name, tensor in checkpoint.tensors.items():
        scale = qwen35.scale_name(name)
        packed = tensor.dtype == "U8" and scale in checkpoint.tensors
        try:
            pieces = qwen35.pieces(name, tensor.shape)
        except ValueError as error:
            raise MxqError(f"{checkpoint.path}: {error}", "the checkpoint is damaged: get it again") from None
        for piece in pieces:
            found[piece.module] = Module(piece, scale if packed else None)
    return found


def scales_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the tensors that hold scales, and the name of the weight that each belongs to."""
    return {name: name.removesuffix("_scale") for name in checkpoint.tensors if name.endswith("_scale")}


def open_checked(path: Path, report: Report) -> Checkpoint | None:
    """Open a checkpoint; a broken one goes into ``report``, and a directory that is none raises UsageError."""
    try:
        checkpoint = Checkpoint.open(path)
        modules(checkpoint)
    except MxqError as error:
        if error.exit_code == 2:
            raise
        report.add("files", "headers and index", [Problem(error.message, error.hint or "convert it again")])
        return None
    return checkpoint


def check(checkpoint: Checkpoint, report: Report) -> None:
    """Add to ``report`` what headers, index and config show."""
    report.add("files", *_files(checkpoint))
    report.add("tensors", *_tensors(checkpoint))
    covered, problems = _config(checkpoint)
    problems += [
        Problem(what, "put the config.json back that belongs to these weights") for what in contradictions(checkpoint)
    ]
    if not problems:  # a config.json that cannot be read, or is another model's, makes nonsense of these numbers
        try:
            check_complete(
                checkpoint, {name: qwen35.pieces(name, tensor.shape) for name, tensor in checkpoint.tensors.items()}
            )
        except UsageError as error:
            problems.append(Problem(error.message, error.hint or "convert it again"))
    report.add("config", covered, problems)


def _files(checkpoint: Checkpoint) -> tuple[str, list[Problem]]:
    problems = [
        Problem(f"{file} lacks the metadata format: pt, and transformers refuses to load such a file")
        for file, metadata in checkpoint.metadata.items()
        if metadata.get("format") != "pt"
    ]
    problems += [
        Problem(f"{file.name} is not in the index", "remove it: engines may load it all the same")
        for file in sorted(checkpoint.path.glob("*.safetensors"))
        if file.name not in checkpoint.metadata
    ]
    if checkpoint.index is not None:
        metadata = checkpoint.index.get("metadata")
        claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        if claimed != total:
            problems.append(Problem(f"{INDEX} claims a total_size of {claimed}, the tensors have {total} bytes"))
    return f"{len(checkpoint.metadata)} safetensors files, {len(checkpoint.tensors)} tensors", problems


def _tensors(checkpoint: Checkpoint) -> tuple[str, list[Problem]]:
    problems = []
    scales = scales_of(checkpoint)
    for name, weight in scales.items():
        tensor, packed = checkpoint.tensors[name], checkpoint.tensors.get(weight)
        if tensor.dtype != "U8":
            problems.append(Problem(f"{name} is stored as {tensor.dtype}; vLLM reads scales right only as U8"))
        if packed is None:
            problems.append(Problem(f"{name} are the scales of {weight}, which is not there"))
        elif packed.dtype != "U8":
            problems.append(Problem(f"{weight} has scales but is {packed.dtype}, not packed"))
        elif not _fit(packed, tensor):
            what = f"{weight} {list(packed.shape)} and {name} {list(tensor.shape)}"
            problems.append(Problem(f"{what} are not codes and scales of one weight"))
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype == "U8" and name not in scales and qwen35.scale_name(name) not in checkpoint.tensors:
            problems.append(Problem(f"{name} is packed but {qwen35.scale_name(name)} is missing"))
    return f"{len(scales)} packed weights with their scales", problems


def _fit(packed: TensorInfo, scale: TensorInfo) -> bool:
    return (
        len(packed.shape) > 1
        and packed.shape[:-1] == scale.shape[:-1]
        and packed.shape[-1] * 2 == scale.shape[-1] * BLOCK
    )


def _config(checkpoint: Checkpoint) -> tuple[str, list[Problem]]:
    covered = "config.json against tensors, by vLLM's rules"
    try:
        config = checkpoint.quantization
    except MxqError as error:
        return covered, [Problem(error.message, error.hint or "convert it again")]
    if config is None:
        return covered, [Problem("config.json has no quantization_config, so engines take the weights for bf16")]
    raw = checkpoint.config["quantization_config"]
    problems = [
        Problem(f"quantization_config has no {key}, without which vLLM does not load", "add it as Quark writes it")
        for key in ("export", "layer_type_quant_config")
        if not isinstance(raw.get(key), dict)
    ]
    problems += [
        Problem(
            f"the exclude entry {entry!r} is a glob; vLLM matches exact names and re: patterns only", "name modules"
        )
        for entry in config.exclude
        if "*" in entry and not entry.startswith("re:")
    ]
    found = modules(checkpoint)
    if not any(module.scale for module in found.values()):
        problems.append(Problem("quantization_config claims MXFP4, but no weight is quantized"))
    problems += _contradictions(found, config)
    return f"{covered}: {len(found)} matrices, {len(config.exclude)} exclude entries", problems


def _contradictions(found: dict[str, Module], config: QuantizationConfig) -> list[Problem]:
    """Hold what is packed against what an engine will take for packed, and find groups that it cannot merge."""
    problems = []
    stored: dict[str, set[bool]] = defaultdict(set)
    claimed: dict[str, set[bool]] = defaultdict(set)
    for name, module in found.items():
        role = qwen35.role(module.piece.tensor)
        if role not in qwen35.LINEAR:
            if module.scale:
                problems.append(Problem(f"{name} ({role}) is quantized, and engines load that kind only unquantized"))
            continue
        packed, expected = module.scale is not None, config.is_quantized(name)
        if expected and not packed:
            problems.append(
                Problem(
                    f"{name} is not quantized, but no exclude entry says so: vLLM builds it as MXFP4",
                    f"add {name} to quantization_config.exclude",
                )
            )
        if packed and not expected:
            entry = qwen35.engine_name(name)
            problems.append(Problem(f"{name} is quantized, but exclude tells vLLM that {entry} is not"))
        whole = qwen35.experts_module(name) or qwen35.fused_module(name)
        if whole is not None:
            stored[whole].add(packed)
            claimed[whole].add(expected)
    problems += [
        Problem(f"{whole} is quantized in part; vLLM merges it and refuses", "give all of it the same rule")
        for whole in stored
        if len(stored[whole]) > 1 or len(claimed[whole]) > 1
    ]
    return problems
