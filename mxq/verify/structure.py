"""What headers, index and config show of a quantized checkpoint: is it complete, and will engines read it as it is?

Nothing here relies on the plan that made the checkpoint, or on mxq having made it: what is quantized is read from the
tensors, and the config is held against them by the rules by which vLLM reads it.
"""

from dataclasses import dataclass
from pathlib import Path

from mxq.checkpoint import Checkpoint, TensorInfo
from mxq.checkpoint.quantization import Claims
from mxq.errors import MxqError, UsageError
from mxq.formats.rules import BLOCK
from mxq.models import qwen35
from mxq.models.qwen35 import Piece
from mxq.verify import defects
from mxq.verify.claims import claims_of
from mxq.verify.complete import check_complete
from mxq.verify.declared import contradictions
from mxq.verify.findings import CONVERT_AGAIN, Problem, Report, about
from mxq.verify.opening import Opened, open_checked

_SCALE = "_scale"
COMPLETE = "complete"
"""The check that nothing is missing."""


@dataclass(frozen=True)
class Module:
    """A matrix of the checkpoint: its rows, and the tensor of its scales if it is packed."""

    piece: Piece
    scale: str | None


def problems_of(path: Path) -> list[Problem]:
    """Return what is wrong with a checkpoint as far as headers, index and config show it."""
    report = Report()
    opened = open_checked(path, report)
    if opened is not None:
        check(opened, report)
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
    return {name: name.removesuffix(_SCALE) for name in checkpoint.tensors if name.endswith(_SCALE)}


def check(opened: Opened, report: Report) -> Claims | None:
    """Add to ``report`` what headers and config show; return what the config claims, None if it cannot be read."""
    checkpoint = opened.checkpoint
    try:
        found = modules(checkpoint)
    except MxqError as error:
        report.add("tensors", "codes and scales", [Problem(error.message, error.hint or CONVERT_AGAIN)])
        return None
    report.add("tensors", *_tensors(opened))
    claims, problems = None, []
    covered = "config.json against tensors, by vLLM's rules"
    try:
        claims = claims_of(checkpoint.config, str(checkpoint.path))
        if claims is None:
            what = "config.json has no quantization_config, so engines take the weights for bf16"
            problems.append(Problem(what))
        else:
            covered = f"{covered}: {len(found)} matrices, {len(claims.entries)} {claims.listing} entries"
            problems += defects.of(opened, claims, found_packed(found), set(found))
    except MxqError as error:
        problems.append(Problem(error.message, error.hint or CONVERT_AGAIN))
    problems += [
        Problem(what, "put the config.json back that belongs to these weights") for what in contradictions(checkpoint)
    ]
    report.add("config", covered, problems)
    if not problems:  # a config.json that cannot be read, or is another model's, makes nonsense of this
        pieces = {name: qwen35.pieces(name, tensor.shape) for name, tensor in checkpoint.tensors.items()}
        lacking = []
        try:
            check_complete(checkpoint, pieces)
        except UsageError as error:
            lacking = [Problem(error.message, error.hint or CONVERT_AGAIN)]
        report.add(
            COMPLETE, "a tensor for each of the model's, of as many layers and experts as config.json says", lacking
        )
    return claims


def found_packed(found: dict[str, Module]) -> set[str]:
    """Return the names of the modules that are packed."""
    return {name for name, module in found.items() if module.scale is not None}


def _tensors(opened: Opened) -> tuple[str, list[Problem]]:
    checkpoint, stored = opened.checkpoint, opened.checkpoint.stored
    scales = scales_of(checkpoint)
    other, alone, unpacked, apart = [], [], [], []
    for name, weight in scales.items():
        tensor, packed = checkpoint.tensors[name], checkpoint.tensors.get(weight)
        if tensor.dtype != "U8":
            other.append(f"{name} {tensor.dtype}")
        if packed is None:
            alone.append(name)
        elif packed.dtype != "U8":
            unpacked.append(f"{stored.get(weight, weight)} {packed.dtype}")
        elif not (len(packed.shape) > 1 and fit(packed, tensor)) and defects.loads_packed(weight):
            apart.append(f"{stored.get(weight, weight)} {list(packed.shape)} with scales {list(tensor.shape)}")
    bare = [
        stored.get(name, name)
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype == "U8" and name not in scales and qwen35.scale_name(name) not in checkpoint.tensors
    ]
    problems = [
        *about(
            opened.relabelled,
            "{}: scales of type F8_E8M0 vLLM converts as numbers instead of taking their bytes, and computes nonsense",
            "label them U8: the bytes stay",
            rewritable=True,
        ),
        *about(other, "{}: scales must be E8M0 bytes stored as U8"),
        *about(alone, "{} belongs to a weight that is not there"),
        *about(unpacked, "{} has scales but is not packed"),
        *about(apart, f"{{}} are not codes [N, K/2] and scales [N, K/{BLOCK}] of one weight"),
        *about(bare, "{} is packed, but its scales are missing"),
    ]
    return f"{len(scales)} packed weights with their scales", problems


def fit(packed: TensorInfo, scale: TensorInfo) -> bool:
    """Tell whether codes [..., K/2] and scales [..., K/32] are of one shape."""
    return (
        min(len(packed.shape), len(scale.shape)) > 0
        and packed.shape[:-1] == scale.shape[:-1]
        and packed.shape[-1] * 2 == scale.shape[-1] * BLOCK
    )
