"""What the bytes of a checkpoint show by themselves: scales that cannot be, numbers that are none, NaN made into 6."""

from collections.abc import Iterator

import torch

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.headers import DTYPES
from mxq.formats.mxfp4 import BLOCK
from mxq.progress import Advance, progress
from mxq.verify.findings import Problem, Report, about
from mxq.verify.structure import fit, scales_of

_BYTES_AT_ONCE = 16 << 20
_NAN = 255
_ONE = 127
_ZERO_BYTES = (0, 1, 104)  # of blocks of zeros, by the tools' different rules
_ENOUGH = 256  # scales that are all the same by chance only if there are fewer
# Half of a trained weight's blocks have their scale far inside 2^-64 .. 2^16: at 2^16 elements would reach 6 * 65536.
_PLAUSIBLE = range(_ONE - 64, _ONE + 16)
_SIXES = 0x7777777777777777  # sixteen codes of magnitude 6, in an int64
_FLOATS = ("F64", "F32", "F16", "BF16")


def check_values(checkpoint: Checkpoint, report: Report) -> None:
    """Add to ``report`` what a look at every scale, every kept number and the codes under suspicious scales shows."""
    scales = {
        name: weight
        for name, weight in scales_of(checkpoint).items()
        if checkpoint.tensors[name].dtype == "U8" and _is_packed(checkpoint, name, weight)
    }
    kept = [name for name, tensor in checkpoint.tensors.items() if tensor.dtype in _FLOATS]
    total = sum(checkpoint.tensors[name].nbytes for name in (*scales, *kept))
    with progress("looking at values", total, "B") as advance:
        report.add("scales", *_scales(checkpoint, scales, advance))
        bad = []
        for name in kept:
            if not _finite(checkpoint, name):
                bad.append(name)
            advance(checkpoint.tensors[name].nbytes)
    problems = about(
        bad, "{} holds NaN or infinity", "get the source again and look there too: a model that holds them is damaged"
    )
    report.add("kept values", f"{len(kept)} tensors that are not quantized, for NaN and infinity", problems)


def _is_packed(checkpoint: Checkpoint, scale: str, weight: str) -> bool:
    tensor = checkpoint.tensors.get(weight)
    return tensor is not None and tensor.dtype == "U8" and fit(tensor, checkpoint.tensors[scale])


def _scales(checkpoint: Checkpoint, scales: dict[str, str], advance: Advance) -> tuple[str, list[Problem]]:
    nan, equal, far, sixes, count = [], [], [], [], 0
    for name, weight in scales.items():
        seen = torch.zeros(256, dtype=torch.int64)
        for chunk in checkpoint.read_bytes(name, _BYTES_AT_ONCE):
            seen += torch.bincount(chunk.int(), minlength=256)
            advance(len(chunk))
        total = int(seen.sum())
        count += total
        if seen[_NAN]:
            nan.append(name)
        if total >= _ENOUGH and int(seen.max()) == total and _has_codes(checkpoint, weight):
            equal.append(f"{name} {int(seen.argmax())}")
        elif (middle := _median(seen)) is not None and middle not in _PLAUSIBLE:
            far.append(f"{name} 2^{middle - _ONE}")
        if seen[_ONE] and _holds_sixes(checkpoint, name, weight):
            sixes.append(weight)
    problems = [
        *about(nan, "{} holds scales that mean NaN", "the source held NaN or infinity: look there"),
        *about(equal, "{}: all scales are the same byte, though codes differ: they are no scales of these weights"),
        *about(far, "{} is the middle of the scales, which no trained weight has: their exponents are shifted"),
        *about(
            sixes,
            "{} holds blocks of nothing but 6 under scale 1: so Quark writes a block with NaN in it",
            "look for NaN in the source, and get it again",
        ),
    ]
    return f"{count} scales, for NaN and for what no weight has", problems


def _median(seen: torch.Tensor) -> int | None:
    """Return the median byte of the blocks that are not zeros."""
    seen = seen.clone()
    seen[list(_ZERO_BYTES)] = 0
    total = int(seen.sum())
    return int((seen.cumsum(0) * 2 >= total).int().argmax()) if total else None


def _has_codes(checkpoint: Checkpoint, weight: str) -> bool:
    """Tell whether any element of a packed weight is not zero."""
    return any(bool((chunk & 0x77).any()) for chunk in checkpoint.read_bytes(weight, _BYTES_AT_ONCE))


def _holds_sixes(checkpoint: Checkpoint, scale: str, weight: str) -> bool:
    for codes, scales in _rows(checkpoint, scale, weight):
        ones = scales == _ONE
        words = codes.view(*scales.shape, BLOCK // 2)[ones].view(torch.int64)
        if ((words & _SIXES) == _SIXES).all(dim=-1).any():
            return True
    return False


def _rows(checkpoint: Checkpoint, scale: str, weight: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield codes [n, K/2] and scales [n, K/32] of a weight, some rows at a time."""
    *axes, width = checkpoint.tensors[weight].shape
    rows = torch.Size(axes).numel()
    step = max(1, _BYTES_AT_ONCE // max(1, width))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield checkpoint.read_rows(weight, start, stop), checkpoint.read_rows(scale, start, stop)


def _finite(checkpoint: Checkpoint, name: str) -> bool:
    dtype = DTYPES[checkpoint.tensors[name].dtype]
    return all(bool(torch.isfinite(c.view(dtype)).all()) for c in checkpoint.read_bytes(name, _BYTES_AT_ONCE))
