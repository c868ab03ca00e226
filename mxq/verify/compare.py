"""A quantized checkpoint against its source: nothing lost, nothing added, every kept byte equal, codes made anew."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mxq.checkpoint import Checkpoint, fp8, manifest
from mxq.checkpoint.beside import SCALES, copied_files
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.quantization import Claims
from mxq.errors import MxqError
from mxq.files import sha256_file
from mxq.models import qwen35
from mxq.models.qwen35 import Piece
from mxq.progress import progress
from mxq.verify import calibrated
from mxq.verify.findings import CONVERT_AGAIN, Problem, Report, about
from mxq.verify.requantize import requantize
from mxq.verify.structure import Module, modules, scales_of

_BYTES_AT_ONCE = 16 << 20
_ROWS_AT_ONCE = 4096
# What other tools write anew when they save a config, and what does not change what a model computes.
_VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "quantization_config")


def compare(
    checkpoint: Checkpoint, source: Checkpoint, claims: Claims, report: Report, *, rows: int, seed: int
) -> None:
    """Add to ``report`` how ``checkpoint``, sound in itself, differs from what ``source`` converts to."""
    source = fp8.numbers(source)
    written = fp8.rounded(source)
    ours, theirs = modules(checkpoint), modules(source)
    packed = {name for name, module in ours.items() if module.scale}
    covered, problems = _names(checkpoint, written, ours, theirs)
    report.add("source: names", covered, problems)
    if problems:
        return
    content = manifest.read(checkpoint.path)
    report.add("source: config and files", *_beside(checkpoint, source, content))
    try:
        made = calibrated.calibrated(checkpoint.path, content)
    except MxqError as error:
        report.add("source: scales", SCALES, [Problem(error.message, error.hint or CONVERT_AGAIN)])
        return
    folded = frozenset() if made is None else made.folded
    kept = [name for name in source.tensors if name not in folded and not _holds_packed(source, name, packed)]
    total = sum(written.tensors[name].nbytes for name in kept)
    changed = []
    with progress("comparing copies", total, "B") as advance:
        for name in kept:
            if not _same_bytes(checkpoint, written, ours, name):
                changed.append(name)
            advance(written.tensors[name].nbytes)
    unpacked = {name for name in kept if fp8.scale_of(source, name) is not None}
    problems = about(
        [name for name in changed if name not in unpacked],
        "{}, which is not quantized, is not the same bytes as in the source",
        many="{}, which are not quantized, are not the same bytes as in the source",
    )
    mtp, vision = (sum(qwen35.part(name) == part for name in kept) for part in ("mtp", "vision"))
    covered = f"{len(kept)} tensors byte for byte ({mtp} of MTP, {vision} of vision)"
    if unpacked:
        covered += f", the {len(unpacked)} of them that are FP8 in the source as bf16"
        problems += about(
            [name for name in changed if name in unpacked], "{} is not what the source's FP8 weight is in bf16"
        )
    report.add("source: copies", covered, problems)
    if made is not None and (made.columns or made.rows or made.folded):
        report.add("source: scales", *calibrated.check(made, checkpoint, written))
    rule, strict = _rule(claims, content), content is not None
    report.add(
        "source: codes", *requantize(checkpoint, source, rule, strict=strict, rows=rows, seed=seed, calibrated=made)
    )


def _rule(claims: Claims, content: dict[str, Any] | None) -> str | None:
    """Return the scale rule that made the weights: as the config says or, where it cannot, mxq's manifest."""
    if claims.rule is None and content is not None:
        return str(content["recipe"]["scale_rule"])
    return claims.rule


def _holds_packed(source: Checkpoint, name: str, packed: set[str]) -> bool:
    return any(piece.module in packed for piece in qwen35.pieces(name, source.tensors[name].shape))


def _names(
    checkpoint: Checkpoint, source: Checkpoint, ours: dict[str, Module], theirs: dict[str, Module]
) -> tuple[str, list[Problem]]:
    """Every tensor of the source is there, kept in its type or packed in its shape, and nothing else is.

    Experts may be stored one by one here and together there, or the other way round.
    """
    missing, other, parts, shapes = [], [], [], []
    accounted = set(scales_of(checkpoint))
    for name, tensor in source.tensors.items():
        pieces = qwen35.pieces(name, tensor.shape)
        if any(piece.module in ours and ours[piece.module].scale for piece in pieces):
            for piece in pieces:
                module = ours.get(piece.module)
                if module is None or module.scale is None:
                    parts.append(f"{piece.module} of {name}")
                    continue
                accounted.add(module.piece.tensor)
                shape = (module.piece.stop - module.piece.start, checkpoint.tensors[module.piece.tensor].shape[-1] * 2)
                expected = (piece.stop - piece.start, tensor.shape[-1])
                if shape != expected:
                    shapes.append(f"{piece.module} is {list(shape)}, in the source {list(expected)}")
            continue
        kept = checkpoint.tensors.get(name)
        if kept is None and _regrouped(pieces, ours):
            accounted.update(ours[piece.module].piece.tensor for piece in pieces)
            other += [
                f"{piece.module} is {mine}, in the source {wanted}"
                for piece in pieces
                if (mine := _form(checkpoint, ours[piece.module].piece)) != (wanted := _form(source, piece))
            ]
            continue
        accounted.add(name)
        if kept is None:
            missing.append(name)
        elif (kept.dtype, kept.shape) != (tensor.dtype, tensor.shape):
            what = f"{kept.dtype} {list(kept.shape)}, in the source {tensor.dtype} {list(tensor.shape)}"
            other.append(f"{name} is {what}")
    extra = sorted(checkpoint.tensors.keys() - accounted)
    extra += sorted(name for name in ours.keys() - theirs.keys() if f"{name}.weight" not in extra)
    # Both at once is what another model looks like, and not what a conversion does wrong.
    another = f"is {source.path} what it was made from? If so, {CONVERT_AGAIN}" if missing and extra else None
    problems = [
        *about(missing, "{} of the source is missing", another or CONVERT_AGAIN, many="{} of the source are missing"),
        *about(other, "{}"),
        *about(parts, "{} is not quantized, and the rest is"),
        *about(shapes, "{}"),
        *about(
            extra,
            "{} is not in the source",
            another or "remove what the source has not",
            many="{} are not in the source",
        ),
    ]
    return f"{len(source.tensors)} tensors, {len(theirs)} matrices", problems


def _regrouped(pieces: list[Piece], ours: dict[str, Module]) -> bool:
    """Tell whether routed experts of the source are here, under other tensors' names."""
    return bool(pieces) and all(
        piece.module in ours and qwen35.experts_module(piece.module) is not None for piece in pieces
    )


def _form(checkpoint: Checkpoint, piece: Piece) -> str:
    tensor = checkpoint.tensors[piece.tensor]
    return f"{tensor.dtype} {[piece.stop - piece.start, tensor.shape[-1]]}"


def _beside(checkpoint: Checkpoint, source: Checkpoint, content: dict[str, Any] | None) -> tuple[str, list[Problem]]:
    """Compare config and tokenizer: as a whole if mxq copied them, else what both have."""
    exact = content is not None
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    problems = []
    if exact:
        keys = sorted(key for key in config.keys() | source.config.keys() if config.get(key) != source.config.get(key))
    else:
        keys = list(_changed(config, source.config))
    if keys:
        problems.append(Problem(f"config.json differs from the source's in {', '.join(keys)}", places=tuple(keys)))
    names = copied_files(source.path)
    problems += about(
        [name for name in names if not _same_file(checkpoint.path / name, source.path / name, exact)],
        "{} is not the same as in the source",
        "copy it from the source",
        many="{} are not the same as in the source",
    )
    if content is not None and content["source"]["fingerprint"] != fingerprint(source):
        problems.append(Problem("the manifest names another source", "verify against the checkpoint it was made from"))
    return f"config.json and {len(names)} files{'' if exact else ', in what both say'}", problems


def _changed(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(ours.keys() & theirs.keys() - set(_VOLATILE)):
        a, b = ours[key], theirs[key]
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _changed(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}"


def _same_file(ours: Path, theirs: Path, exact: bool) -> bool:
    if not ours.is_file():
        return False
    if sha256_file(ours) == sha256_file(theirs):
        return True
    if exact or ours.suffix != ".json":
        return False
    try:  # other tools write JSON anew
        a, b = (json.loads(file.read_text(encoding="utf-8")) for file in (ours, theirs))
        return not any(_changed(a, b)) if isinstance(a, dict) and isinstance(b, dict) else bool(a == b)
    except (ValueError, RecursionError):
        return False


def _same_bytes(checkpoint: Checkpoint, source: Checkpoint, ours: dict[str, Module], name: str) -> bool:
    if name in checkpoint.tensors:
        pairs = zip(checkpoint.read_bytes(name, _BYTES_AT_ONCE), source.read_bytes(name, _BYTES_AT_ONCE), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)
    return all(
        _same_rows(checkpoint, ours[piece.module].piece, source, piece)
        for piece in qwen35.pieces(name, source.tensors[name].shape)
    )


def _same_rows(checkpoint: Checkpoint, ours: Piece, source: Checkpoint, theirs: Piece) -> bool:
    for start in range(0, theirs.stop - theirs.start, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, theirs.stop - theirs.start - start)
        a = checkpoint.read_rows(ours.tensor, ours.start + start, ours.start + start + count)
        b = source.read_rows(theirs.tensor, theirs.start + start, theirs.start + start + count)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return False
    return True
