"""Why a matrix is nothing like its source: nibbles swapped, scales shifted, layouts of a kernel, the wrong matrix.

Each explanation is tried: what it says went wrong is undone, and it holds if the matrix then is like its source.
"""

import math
import re
from collections.abc import Iterator

import torch

from mxq.checkpoint import Checkpoint
from mxq.formats import mxfp4
from mxq.layouts import aiter as orders
from mxq.models import qwen35
from mxq.verify.structure import Module

_ROWS = 256  # enough to know a matrix again, and whole tiles of AITER's layouts
_BETTER_DB = 3.0  # what an explanation has to gain
_BIAS = 127
_SHIFTS = (1, -1, 2, -2, 3, -3, _BIAS, -_BIAS)


def diagnose(
    checkpoint: Checkpoint,
    source: Checkpoint,
    ours: dict[str, Module],
    theirs: dict[str, Module],
    name: str,
    floor_db: float,
) -> str | None:
    """Return in words what is wrong with a packed module that is not like its source; None if nothing explains it.

    Args:
        checkpoint: what it is in.
        source: what it was made from.
        ours: modules of ``checkpoint``.
        theirs: modules of ``source``.
        name: the module.
        floor_db: the SQNR from which two matrices are alike.

    Raises:
        MxqError: one of the two cannot be read.
    """
    x = _read(source, theirs[name])
    packed, scale = _packed(checkpoint, ours[name])
    found = [(_sqnr(x, codes, bytes_), cause) for cause, codes, bytes_ in _undone(packed, scale)]
    if x.shape[0] == x.shape[1]:
        found.append((_sqnr(x.T.contiguous(), packed, scale), "it is transposed"))
    best, cause = max(found)
    if best >= max(floor_db, _sqnr(x, packed, scale) + _BETTER_DB):
        return cause
    for other in _others(name, ours):
        y = _read(source, theirs[other])
        if y.shape == x.shape and _sqnr(y, packed, scale) >= floor_db:
            return _taken_for(name, other)
    return None


def _undone(packed: torch.Tensor, scale: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    yield "the two codes of every byte are swapped: the even column belongs in the low half", _swapped(packed), scale
    for shift in _SHIFTS:
        bytes_ = scale.int() - shift
        if bool(((bytes_ < 0) | (bytes_ > 254)).float().mean() < 0.5):
            size = "too high" if shift > 0 else "too low"
            yield f"the scale bytes are {abs(shift)} {size}", packed, bytes_.clamp(0, 254).to(torch.uint8)
    rows, width = packed.shape
    weight = orders.untile16(packed) if rows % 16 == 0 and width % 32 == 0 else None
    scales = orders.unswz(scale) if rows % 32 == 0 and scale.shape[1] % 8 == 0 else None
    kernels = "in AITER's order for its kernels, which engines make when they load, and would make twice"
    if weight is not None:
        yield f"the codes are {kernels}", weight, scale
    if scales is not None:
        yield f"the scales are {kernels}", packed, scales
    if weight is not None and scales is not None:
        yield f"codes and scales are {kernels}", weight, scales


def _swapped(packed: torch.Tensor) -> torch.Tensor:
    return packed << 4 | packed >> 4


def _others(name: str, ours: dict[str, Module]) -> Iterator[str]:
    """Yield the modules that a tool could have taken for ``name``: gate for up, and the other experts'."""
    prefix, _, last = name.rpartition(".")
    partners = {"gate_proj": "up_proj", "up_proj": "gate_proj", "k_proj": "v_proj", "v_proj": "k_proj"}
    if f"{prefix}.{partners.get(last)}" in ours:
        yield f"{prefix}.{partners[last]}"
    block = qwen35.experts_module(name)
    if block is not None:
        siblings = re.compile(rf"{re.escape(block)}\.\d+\.{last}")
        yield from (other for other in ours if other != name and siblings.fullmatch(other))


def _taken_for(name: str, other: str) -> str:
    if name.rpartition(".")[0] == other.rpartition(".")[0]:
        return f"it holds {other.rpartition('.')[2]}: the two are swapped"
    return "it holds the weight of another expert: the experts are in another order"


def _read(source: Checkpoint, module: Module) -> torch.Tensor:
    piece = module.piece
    return source.read_rows(piece.tensor, piece.start, piece.stop).float()


def _packed(checkpoint: Checkpoint, module: Module) -> tuple[torch.Tensor, torch.Tensor]:
    piece = module.piece
    assert module.scale is not None
    return (
        checkpoint.read_rows(piece.tensor, piece.start, piece.stop),
        checkpoint.read_rows(module.scale, piece.start, piece.stop),
    )


def _sqnr(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> float:
    x = x[:_ROWS]
    noise = x - mxfp4.dequantize(packed[:_ROWS], scale[:_ROWS], torch.float32)
    energy, error = (float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2 for value in (x, noise))
    if not math.isfinite(error) or not energy:
        return -math.inf
    return 10 * math.log10(energy / error) if error else math.inf
