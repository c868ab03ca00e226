"""What a calibrated recipe did to weights, as a checkpoint of mxq's says, and whether it can be so.

GPTQ chooses other codes than the nearest, under the scales of rounding to the nearest (with its option static_groups,
which is Quark's default; without, it makes scales of weights that it has moved). AWQ and SmoothQuant multiply
columns of linears by a vector s each and divide what makes their input by it, which changes nothing in what the model
computes::

    post_attention_layernorm -> gate_proj, up_proj    (dense) its weight w is centred at 0, so that the new one is
                                                      (1 + w) / s - 1; s is such that its own type holds that
    up_proj -> down_proj                              (dense, routed and shared experts) rows of up_proj

In float32 a weight becomes (w * s) / r, s of its columns and r of its rows, and that is rounded by the recipe's rule.
AWQ clips it first: in each block of 32 what is beyond some share of the largest, at least 11/20, becomes that.
"""

import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.beside import MANIFEST, SCALES
from mxq.checkpoint.reader import inside
from mxq.errors import MxqError
from mxq.models import qwen35
from mxq.verify.findings import CONVERT_AGAIN, Problem, about

_DENSE = re.compile(r"(.*layers\.\d+)\.mlp\.(gate|up)_proj")
_NORM = "post_attention_layernorm.weight"
_LOST = 2.0**-22  # of a norm's gain, by the rounding of a scale in float32


@dataclass(frozen=True)
class Calibrated:
    """What was done.

    Attributes:
        algorithm: ``gptq``, ``awq`` or ``smoothquant``.
        moves_scales: whether scales, too, are others than rounding gives.
        rounded: modules that were rounded to the nearest all the same.
        folded: norms that are not the source's.
        columns: module -> float32 [K], by which its columns were multiplied.
        rows: module -> float32 [N], by which its rows were divided.
    """

    algorithm: str
    moves_scales: bool
    rounded: frozenset[str]
    folded: frozenset[str]
    columns: Mapping[str, torch.Tensor]
    rows: Mapping[str, torch.Tensor]

    def is_tuned(self, module: str) -> bool:
        """Tell whether a module's codes are others than the nearest."""
        return self.algorithm == "gptq" and self._is_calibrated(module)

    def is_clipped(self, module: str) -> bool:
        """Tell whether a module's largest weights may have been made smaller."""
        return self.algorithm == "awq" and self._is_calibrated(module)

    def _is_calibrated(self, module: str) -> bool:
        return qwen35.part(module) == "text" and module not in self.rounded

    def scaled(self, module: str, x: torch.Tensor, start: int) -> torch.Tensor:
        """Return what was rounded in place of ``x``, rows of the source's weight from ``start`` on.

        Raises:
            ValueError: its scales are not of the weight's shape.
        """
        columns, rows = self.columns.get(module), self.rows.get(module)
        if columns is not None:
            if columns.shape != x.shape[-1:]:
                raise ValueError(f"{SCALES} has {list(columns.shape)} scales for {x.shape[-1]} columns")
            x = x.float() * columns
        if rows is not None:
            if rows.ndim != 1 or rows.shape[0] < start + x.shape[0]:
                raise ValueError(f"{SCALES} has {list(rows.shape)} scales for {start + x.shape[0]} rows and more")
            x = x.float() / rows[start : start + x.shape[0], None]
        return x


def calibrated(path: Path, content: Mapping[str, Any] | None) -> Calibrated | None:
    """Read what was done; None where the manifest ``content`` says of no calibration.

    Raises:
        MxqError: what it says is malformed, or the file of scales cannot be read.
    """
    algorithm = None if content is None else content["recipe"].get("algorithm")
    if content is None or algorithm is None:
        return None
    try:
        result = content["calibrated"]
        moves_scales = content["recipe"]["options"].get("static_groups") is False
        rounded, folded = (frozenset(map(str, result[key])) for key in ("rounded_to_nearest", "folded"))
    except KeyError as error:
        raise MxqError(f"{MANIFEST} is malformed: calibrated lacks {error}", CONVERT_AGAIN) from None
    except (TypeError, AttributeError):
        raise MxqError(f"{MANIFEST} is malformed: calibrated, or the recipe's options", CONVERT_AGAIN) from None
    columns: dict[str, torch.Tensor] = {}
    rows: dict[str, torch.Tensor] = {}
    if SCALES in content["files"]:
        for name, values in _arrays(inside(path, SCALES)):
            module, _, axis = name.rpartition(".")
            {"columns": columns, "rows": rows}.get(axis, {})[module] = torch.from_numpy(values)
    return Calibrated(str(algorithm), moves_scales, rounded, folded, columns, rows)


def _arrays(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        # Members are stored as they are, so that no small file holds large arrays.
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED or not member.filename.endswith(".npy"):
                    raise ValueError(f"{member.filename} is no array that is stored as it is")
                with archive.open(member) as stream:
                    values = np.lib.format.read_array(stream, allow_pickle=False)
                if values.dtype != np.float32:
                    raise ValueError(f"{member.filename} is {values.dtype}")
                yield member.filename.removesuffix(".npy"), values
    # RuntimeError: encrypted; the last two: a header with a shape of any size.
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, RuntimeError, OverflowError, MemoryError) as error:
        raise MxqError(f"{SCALES} cannot be read: {error}", CONVERT_AGAIN) from None


def check(made: Calibrated, checkpoint: Checkpoint, source: Checkpoint) -> tuple[str, list[Problem]]:
    """Make sure that whatever was scaled is undone in front of it, and that norms are what that takes."""
    unsound = [
        f"{module}'s {axis}"
        for axis, scales in (("columns", made.columns), ("rows", made.rows))
        for module, values in scales.items()
        if not (torch.isfinite(values).all() and (values > 0).all())
    ]
    norms: dict[str, torch.Tensor] = {}
    apart = []
    for module, scale in made.columns.items():
        prefix, _, last = module.rpartition(".")
        dense = _DENSE.fullmatch(module)
        if last == "down_proj":
            undone = made.rows.get(f"{prefix}.up_proj")
        elif dense is not None:
            undone = made.columns.get(f"{prefix}.{'up' if dense[2] == 'gate' else 'gate'}_proj")
            norms[f"{dense[1]}.{_NORM}"] = scale
        else:
            undone = None
        if undone is None or not torch.equal(undone, scale):
            apart.append(module)
    for module in made.rows:
        prefix, _, last = module.rpartition(".")
        if last != "up_proj" or f"{prefix}.down_proj" not in made.columns:
            apart.append(module)
    wrong = sorted(made.folded - norms.keys())  # one that is there and not folded is the source's: its scales must be 1
    for name, scale in norms.items():
        if name in source.tensors and name in checkpoint.tensors and name not in wrong:
            norm = checkpoint.read(name)
            ours, theirs = 1 + norm.double(), 1 + source.read(name).double()
            if ours.shape != scale.shape:
                wrong.append(name)
                continue
            near = theirs.abs() if norm.dtype != torch.float32 else theirs.abs() + scale.double()  # rounded, then
            if ((ours * scale.double() - theirs).abs() > _LOST * near).any():
                wrong.append(name)
    problems = [
        *about(unsound, "{} in " + SCALES + " are scaled by what is no number above 0"),
        *about(apart, "{} is scaled by what nothing in front of it, or behind it, undoes"),
        *about(wrong, "{} is not the source's with the scales of the linears behind it taken out"),
    ]
    return f"{len(made.columns) + len(made.rows)} scaled matrices, each undone; {len(norms)} norms", problems
