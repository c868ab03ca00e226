"""A converted checkpoint against its source: nothing lost, nothing added, every kept byte equal, codes made anew."""

import hashlib
import random

import torch

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.identity import fingerprint
from mxq.convert import manifest
from mxq.convert.beside import copied_files
from mxq.convert.structure import Module, Problem, Report, modules, scales_of
from mxq.errors import MxqError
from mxq.files import sha256_file
from mxq.formats import mxfp4
from mxq.models import qwen35
from mxq.progress import progress

_BYTES_AT_ONCE = 16 << 20
_ROWS_AT_ONCE = 1024


def compare(checkpoint: Checkpoint, source: Checkpoint, report: Report, *, rows: int, seed: int) -> None:
    """Add to ``report`` how ``checkpoint``, sound in itself, differs from what ``source`` converts to."""
    ours, theirs = modules(checkpoint), modules(source)
    packed = {name for name, module in ours.items() if module.scale}
    report.add("source: names", *_names(checkpoint, source, ours, theirs))
    if report.problems:
        return
    report.add("source: config and files", *_beside(checkpoint, source))
    kept = [name for name in source.tensors if not _holds_packed(source, name, packed)]
    total = sum(source.tensors[name].nbytes for name in kept)
    with progress("comparing copies", total, "B") as advance:
        problems = []
        for name in kept:
            if not _same_bytes(checkpoint, source, name):
                problems.append(Problem(f"{name}, which is not quantized, is not the same bytes as in the source"))
            advance(source.tensors[name].nbytes)
    mtp, vision = (sum(qwen35.part(name) == part for name in kept) for part in ("mtp", "vision"))
    report.add("source: copies", f"{len(kept)} tensors byte for byte ({mtp} of MTP, {vision} of vision)", problems)
    report.add("source: codes", *_requantize(checkpoint, source, ours, theirs, rows, seed))


def _holds_packed(source: Checkpoint, name: str, packed: set[str]) -> bool:
    return any(piece.module in packed for piece in qwen35.pieces(name, source.tensors[name].shape))


def _names(
    checkpoint: Checkpoint, source: Checkpoint, ours: dict[str, Module], theirs: dict[str, Module]
) -> tuple[str, list[Problem]]:
    """Every tensor of the source is there, kept under its name and type or packed in its shape, and nothing else is."""
    problems = []
    accounted = set(scales_of(checkpoint))
    for name, tensor in source.tensors.items():
        pieces = qwen35.pieces(name, tensor.shape)
        packed = [piece for piece in pieces if piece.module in ours and ours[piece.module].scale]
        if not packed:
            accounted.add(name)
            kept = checkpoint.tensors.get(name)
            if kept is None:
                problems.append(Problem(f"{name} of the source is missing"))
            elif (kept.dtype, kept.shape) != (tensor.dtype, tensor.shape):
                what = f"{kept.dtype} {list(kept.shape)}, in the source {tensor.dtype} {list(tensor.shape)}"
                problems.append(Problem(f"{name} is {what}"))
            continue
        for piece in pieces:
            module = ours.get(piece.module)
            if module is None or module.scale is None:
                problems.append(Problem(f"{piece.module} is not quantized, other parts of {name} are"))
                continue
            accounted.add(module.piece.tensor)
            shape = (module.piece.stop - module.piece.start, checkpoint.tensors[module.piece.tensor].shape[-1] * 2)
            expected = (piece.stop - piece.start, tensor.shape[-1])
            if shape != expected:
                problems.append(Problem(f"{piece.module} is {list(shape)}, in the source {list(expected)}"))
    problems += [Problem(f"{name} is not in the source") for name in sorted(checkpoint.tensors.keys() - accounted)]
    problems += [Problem(f"{name} is not in the source") for name in sorted(ours.keys() - theirs.keys())]
    return f"{len(source.tensors)} tensors, {len(theirs)} matrices", problems


def _beside(checkpoint: Checkpoint, source: Checkpoint) -> tuple[str, list[Problem]]:
    problems = []
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    if config != source.config:
        keys = sorted(key for key in config.keys() | source.config.keys() if config.get(key) != source.config.get(key))
        problems.append(Problem(f"config.json differs from the source's in {', '.join(keys)}"))
    names = copied_files(source.path)
    for name in names:
        copy = checkpoint.path / name
        if not copy.is_file() or sha256_file(copy) != sha256_file(source.path / name):
            problems.append(Problem(f"{name} is not the same as in the source", "copy it from the source"))
    content = manifest.read(checkpoint.path)
    if content is not None and content["source"]["fingerprint"] != fingerprint(source):
        problems.append(Problem("the manifest names another source", "verify against the checkpoint it was made from"))
    return f"config.json and {len(names)} files", problems


def _same_bytes(checkpoint: Checkpoint, source: Checkpoint, name: str) -> bool:
    pairs = zip(checkpoint.read_bytes(name, _BYTES_AT_ONCE), source.read_bytes(name, _BYTES_AT_ONCE), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _requantize(
    checkpoint: Checkpoint,
    source: Checkpoint,
    ours: dict[str, Module],
    theirs: dict[str, Module],
    rows: int,
    seed: int,
) -> tuple[str, list[Problem]]:
    problems: list[Problem] = []
    assert checkpoint.quantization is not None  # verify looked at it before
    rule = checkpoint.quantization.rule
    packed = {name: module for name, module in ours.items() if module.scale}
    done = 0
    with progress("quantizing again", len(packed), "matrices") as advance:
        for name, module in packed.items():
            count = module.piece.stop - module.piece.start
            start, stop = _sample(name, count, rows, seed)
            try:
                row = _first_difference(checkpoint, source, module, theirs[name], (start, stop), rule)
            except (MxqError, ValueError) as error:
                return "codes", [Problem(f"{name} cannot be quantized again: {error}")]
            if row is not None:
                problems.append(Problem(f"{name} row {row} is not what the source's row quantizes to"))
            done += stop - start
            advance(1)
    what = "all" if rows == 0 else "sampled"
    return f"{done} {what} rows of {len(packed)} matrices quantized again", problems


def _sample(name: str, count: int, rows: int, seed: int) -> tuple[int, int]:
    if rows == 0 or rows >= count:
        return 0, count
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    start = random.Random(digest).randrange(count - rows + 1)
    return start, start + rows


def _first_difference(
    checkpoint: Checkpoint, source: Checkpoint, ours: Module, theirs: Module, span: tuple[int, int], rule: str
) -> int | None:
    """Return the first row of a module in ``span`` whose codes or scales differ from the source's, quantized."""
    assert ours.scale is not None
    for start in range(*span, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, span[1])
        x = source.read_rows(theirs.piece.tensor, theirs.piece.start + start, theirs.piece.start + stop)
        expected = mxfp4.quantize(x, rule)
        first, last = ours.piece.start + start, ours.piece.start + stop
        actual = (checkpoint.read_rows(ours.piece.tensor, first, last), checkpoint.read_rows(ours.scale, first, last))
        for a, b in zip(actual, expected, strict=True):
            differs = (a != b).any(dim=-1)
            if differs.any():
                return start + int(differs.nonzero()[0])
    return None
