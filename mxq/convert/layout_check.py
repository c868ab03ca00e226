"""In which order the bytes of operands are, found by comparing them with the checkpoint that they come from.

Padding is judged, too. Codes that padding adds are 0, since kernels add up what they compute with them; scales there
are no NaN, since NaN times 0 is NaN. What is behind the columns that a kernel reads is undefined in AITER. So much
holds of a dump; an export has exactly the bytes that its description says.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.identity import fingerprint
from mxq.convert import layout_dump
from mxq.convert.layout_export import DESCRIPTION, where
from mxq.convert.layout_parts import Operand, Rank
from mxq.convert.layout_undo import open_export, open_tensors, read_array
from mxq.convert.packed import open_packed
from mxq.errors import MismatchError, MxqError, UsageError
from mxq.formats.rules import NAN_BYTE
from mxq.layouts.kernels import LINEAR, PADDING, Kernel, Padding, experts_shapes, may_hold, orders_of
from mxq.progress import note, progress

_BYTES = ("U8", "I8", "F8_E8M0")
_UNKNOWN = "unknown: the source's bytes in an order that is none of these (AITER's unreleased klane-inner shuffles?)"
_OTHER = "unknown: not the bytes of this part of the source (another rank, TP, EP or model?)"


@dataclass(frozen=True)
class Finding:
    """What was found out about a tensor.

    Attributes:
        tensor: its name.
        orders: those in which it holds the source's bytes; several if they cannot be told apart.
        expected: the one that it should be in, None if nothing says so.
        padding: the bytes that it holds where the source has none.
        bad_padding: what is wrong with those, if anything is.
        text: all that in words.
    """

    tensor: str
    orders: tuple[str, ...]
    expected: str | None
    padding: Padding
    bad_padding: str | None
    text: str

    @property
    def is_wrong(self) -> bool:
        """It is in no known order, or not in that which is expected, or its padding is wrong."""
        unexpected = self.expected is not None and self.expected not in self.orders
        return not self.orders or unexpected or self.bad_padding is not None


def check(path: Path, source: Path, kernel: Kernel | None, rank: Rank | None) -> list[Finding]:
    """Compare every tensor in ``path`` with the checkpoint in ``source``.

    Args:
        path: what ``mxq layout export`` wrote, or a safetensors file with tensors X.w13, X.w13_scale, X.w2 and
            X.w2_scale, or X.weight and X.weight_scale, or with vLLM's names.
        source: the MXFP4 checkpoint.
        kernel: whose layout is expected; None: what the description says, and nothing if there is none.
        rank: of which GPU the operands are; None: what the description says, and all of it if there is none.

    Raises:
        MismatchError: files, or the checkpoint, are not those of the description.
        UsageError: there is nothing to check.
        MxqError: a file is broken.
    """
    if not path.exists():
        raise UsageError(f"{path} is missing", "give a safetensors file, or a directory that mxq layout export made")
    checkpoint, _ = open_packed(source, "compare with")
    said: dict[str, dict[str, Any]] = {}
    if path.is_dir():
        export = open_export(path)
        said = {layout_dump.plain(name): spans for name, spans in export.where.items()}
        tensors, kernel, rank = export.tensors, kernel or export.kernel, rank or export.rank
        if export.fingerprint != fingerprint(checkpoint):
            raise MismatchError(
                f"{path} was made from another checkpoint than {source}, as the fingerprint in {DESCRIPTION} shows",
                "give the one that it was made from",
            )
    else:
        tensors, rank = open_tensors(path.parent, [path]), rank or Rank()
    found = [layout_dump.split(name) for name in tensors.tensors]
    known = [(name, *split) for name, split in zip(tensors.tensors, found, strict=True) if split is not None]
    by_operand: dict[str, dict[str, str]] = {}
    others = len(found) - len(known)
    for name, operand, tensor in known:
        info = tensors.info(name)
        if info.dtype not in _BYTES:
            if tensor in LINEAR:
                others += 1  # not packed: a norm, or what the recipe leaves alone
                continue
            raise MxqError(f"{info.file}: {name} is {info.dtype}, not bytes", "store it as uint8")
        if kernel is not None and tensor not in kernel.orders:
            raise UsageError(f"{path}: {name} is no operand of {kernel.name}", "choose another --kernel")
        if by_operand.setdefault(operand, {}).setdefault(tensor, name) != name:
            raise MxqError(f"{info.file} holds {tensor} of {operand} twice", "remove what is left over")
    if not by_operand:
        raise UsageError(
            f"{path} holds no operands of a kernel", "names are X.w13, X.w13_scale, X.w2, X.w2_scale, X.weight, ..."
        )
    if others:
        note(f"note: {others} tensors that are no operands of a kernel are not compared")
    parts = layout_dump.found(checkpoint, rank, by_operand)
    findings = []
    with progress("comparing", len(by_operand)) as advance:
        for operand, names in by_operand.items():
            if operand not in parts or not names.keys() <= parts[operand].shapes.keys():
                what = f"{path}: {operand} is no block of experts and no dense module that is packed in {source}"
                raise MismatchError(what, "give its source, and names as mxq layout export has them")
            if operand in said and said[operand] != where(parts[operand]):
                what = f"{path}: {operand} is {where(parts[operand])} of its source, by {DESCRIPTION} {said[operand]}"
                raise MismatchError(what, "export it again")
            findings += _findings(tensors, names, parts[operand], checkpoint, kernel, path.is_dir())
            advance(1)
    return findings


def _findings(
    tensors: Checkpoint, names: dict[str, str], operand: Operand, source: Checkpoint, kernel: Kernel | None, ours: bool
) -> list[Finding]:
    """Compare the tensors ``names`` of one operand with the source, matrix by matrix; ``ours`` are of an export."""
    found: dict[str, dict[str, Padding] | None] = dict.fromkeys(names)
    possible = dict.fromkeys(names, True)
    for e in range(operand.count):
        plain = operand.read_one(source, e)
        for tensor, name in names.items():
            whole = tensors.info(name).nbytes % operand.count == 0
            own = read_array(tensors, name, e, operand.count)
            possible[tensor] = possible[tensor] and whole and may_hold(own, plain[tensor])
            before = found[tensor]
            if not possible[tensor]:
                found[tensor] = {}
            elif before != {}:
                now = orders_of(own, plain[tensor], tensor, before, _read(operand, tensor, kernel))
                found[tensor] = {order: held | (before or {}).get(order, Padding()) for order, held in now.items()}
    findings = []
    for tensor, name in names.items():
        orders = found[tensor] or {}
        expected = None if kernel is None else kernel.orders[tensor]
        padding = orders.get(expected or "", next(iter(orders.values()), Padding()))
        bad = _bad_padding(padding, tensor, kernel, ours)
        text = _text(set(orders), expected, possible[tensor])
        text += (f", {said}" if (said := _said(padding)) else "") + (f": {bad}" if bad else "")
        findings.append(Finding(name, tuple(sorted(orders)), expected, padding, bad, text))
    return findings


def _read(operand: Operand, tensor: str, kernel: Kernel | None) -> tuple[int, int] | None:
    """Return the rows and columns of a matrix that its kernel computes with, if they are known."""
    if tensor in LINEAR:
        n, width = operand.shapes[tensor]
        return n, width
    if kernel is None:
        return None
    h, i = kernel.padded(*operand.sizes[1:])
    _, n, width = experts_shapes(1, h, i)[tensor]
    return n, width


def _bad_padding(padding: Padding, tensor: str, kernel: Kernel | None, ours: bool) -> str | None:
    scale = tensor.endswith("_scale")
    if ours and kernel is not None:
        fill = PADDING["scales" if scale else "codes"]
        for held, wanted in ((padding.read, fill), (padding.behind, kernel.column_fill)):
            if held - {wanted}:
                return f"mxq writes {wanted} there"
    if not scale and (padding.read | padding.behind) - {0}:
        return "codes there are to be 0"
    if kernel is not None and NAN_BYTE in padding.read:
        return f"{NAN_BYTE} is NaN"
    return None


def _said(padding: Padding) -> str:
    parts = ((padding.read, "padding"), (padding.behind, "behind what is read"))
    return ", ".join(f"{where} {_listed(held)}" for held, where in parts if held)


def _listed(held: frozenset[int]) -> str:
    return f"{len(held)} different bytes" if len(held) > 3 else " and ".join(map(str, sorted(held)))


def _text(orders: set[str], expected: str | None, possible: bool) -> str:
    if not orders:
        return _UNKNOWN if possible else _OTHER
    if len(orders) == 1:
        (only,) = orders
        return only if expected in (None, only) else f"{only}, expected {expected}"
    text = f"cannot tell: its bytes are the same in {', '.join(sorted(orders))}"
    return text if expected is None or expected in orders else f"{text}; expected {expected}"
