"""What converting did to each matrix: the layers.jsonl that a run keeps of its MXFP4 target."""

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mxq.errors import MxqError
from mxq.evaluate import Run
from mxq.evaluate.kept import layers_of

_PLACE = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class MatrixError:
    """The error of one quantized matrix, as ``mxq quantize`` measured it; see :mod:`mxq.convert.error`.

    ``kind`` is its name without the numbers of layer and expert, as ``mlp.experts.down_proj``; ``layer`` None for what
    is in no layer. ``relative_error``: norm of the error over that of the matrix. ``sqnr_db``: the same in decibels.
    ``saturated``: share of elements beyond what their block's scale reaches. ``zero_blocks``: share of blocks of zeros.
    """

    module: str
    kind: str
    layer: int | None
    relative_error: float
    sqnr_db: float
    saturated: float
    zero_blocks: float


@dataclass(frozen=True)
class KindErrors:
    """The matrices of one kind in one layer: how many, and the range of their errors."""

    layer: int
    matrices: int
    median: float
    lowest: float
    highest: float


def matrix_errors(run: Run, target: str = "mxfp4") -> tuple[MatrixError, ...]:
    """Return the errors of a target's matrices in the order of the file; empty where the run keeps none.

    A matrix that is all zeros, or became exact, has no SQNR and is left out. Raises MxqError naming file and line for
    one that mxq did not write.
    """
    path = layers_of(run.path, target)
    if not path.is_file():
        return ()
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            if (error := _parsed(json.loads(line))) is not None:
                found.append(error)
        except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as wrong:
            raise MxqError(
                f"{path}, line {number}: not the error of a matrix ({wrong!r:.200})",
                "copy layers.jsonl from the converted model again, or remove the file to do without",
            ) from None
    return tuple(found)


def by_layer(errors: Sequence[MatrixError]) -> dict[str, list[KindErrors]]:
    """Return relative errors by kind and, ascending, by layer; what is in no layer is left out."""
    grouped: dict[str, dict[int, list[float]]] = {}
    for error in errors:
        if error.layer is not None:
            grouped.setdefault(error.kind, {}).setdefault(error.layer, []).append(error.relative_error)
    return {
        kind: [
            KindErrors(layer, len(values), statistics.median(values), min(values), max(values))
            for layer, values in sorted(layers.items())
        ]
        for kind, layers in sorted(grouped.items())
    }


def _parsed(value: dict[str, object]) -> MatrixError | None:
    module = value["module"]
    if not isinstance(module, str):
        raise TypeError("a module without a name")
    if value["sqnr_db"] is None or value["relative_error"] is None:
        return None
    numbers = [value[name] for name in ("relative_error", "sqnr_db", "saturated", "zero_blocks", "blocks")]
    known = [float(number) for number in numbers if isinstance(number, int | float)]
    if len(known) < len(numbers) or not all(map(math.isfinite, known)):
        raise ValueError("a measure that is no number")
    relative, sqnr, saturated, zero_blocks, blocks = known
    place = _PLACE.fullmatch(module)
    name = place[2] if place else module
    return MatrixError(
        module, _EXPERT.sub("", name), int(place[1]) if place else None, relative, sqnr, saturated, zero_blocks / blocks
    )
