"""What one GPU has of an MXFP4 checkpoint's packed layers, plain: the operands of a kernel before any layout."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxq.checkpoint import Checkpoint
from mxq.errors import MxqError, UsageError
from mxq.layouts.kernels import Arrays, Kernel, Shapes, experts_shapes, linear_shapes
from mxq.layouts.operands import Experts, part_of_experts
from mxq.layouts.permutation import Bytes
from mxq.models import qwen35
from mxq.verify import structure
from mxq.verify.findings import CONVERT_AGAIN
from mxq.verify.structure import Module

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_EXPERT = re.compile(r"(\d+)\.(gate_proj|up_proj|down_proj)")
_BY_COLUMNS = {"o_proj", "out_proj", "down_proj"}  # engines split what these take; of all else, what it gives
_HEADS = {
    "q_proj": ("num_attention_heads",),
    "k_proj": ("num_key_value_heads",),
    "v_proj": ("num_key_value_heads",),
    "o_proj": ("num_attention_heads",),
    "in_proj_qkv": ("linear_num_key_heads", "linear_num_key_heads", "linear_num_value_heads"),
    "in_proj_z": ("linear_num_value_heads",),
    "in_proj_a": ("linear_num_value_heads",),
    "in_proj_b": ("linear_num_value_heads",),
    "out_proj": ("linear_num_value_heads",),
}
_HEAD_SIZES = {"linear_num_key_heads": "linear_key_head_dim", "linear_num_value_heads": "linear_value_head_dim"}


@dataclass(frozen=True)
class Rank:
    """One GPU of tp * ep, which are counted through TP first: ``rank`` = EP rank * tp + TP rank.

    Raises:
        UsageError: there is no such rank.
    """

    tp: int = 1
    ep: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        """Check it."""
        if min(self.tp, self.ep) < 1 or not 0 <= self.rank < self.tp * self.ep:
            raise UsageError(
                f"there is no rank {self.rank} of TP {self.tp} x EP {self.ep}",
                f"ranks go from 0 to {self.tp * self.ep - 1}: EP rank * {self.tp} + TP rank",
            )

    @property
    def of_tp(self) -> int:
        """Which part of every matrix it has."""
        return self.rank % self.tp

    @property
    def of_ep(self) -> int:
        """Which of the experts it has."""
        return self.rank // self.tp


@dataclass(frozen=True)
class Operand:
    """Experts of a layer, or a dense module, as one GPU has them.

    Attributes:
        name: of the block of experts, or of the module.
        before: (E, H, I) or (N, K) of the whole.
        sizes: the same of this GPU's part.
        experts: the first that it has, and the one behind its last; (0, 0) of a dense module.
        source: the modules it is made of: gate, up and down of every expert, or one.
        rank: the GPU.
        rows: of a dense module, those that it has.
    """

    name: str
    before: tuple[int, ...]
    sizes: tuple[int, ...]
    experts: tuple[int, int]
    source: tuple[Module, ...]
    rank: Rank
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def shapes(self) -> Shapes:
        """The shapes of the plain operands."""
        return linear_shapes(*self.sizes) if len(self.sizes) == 2 else experts_shapes(*self.sizes)

    def read(self, checkpoint: Checkpoint) -> Arrays:
        """Read all of it."""
        if len(self.sizes) == 2:
            return self.read_one(checkpoint, 0)
        arrays = {name: np.empty(shape, np.uint8) for name, shape in self.shapes.items()}
        for e in range(self.sizes[0]):
            for name, matrix in self.read_one(checkpoint, e).items():
                arrays[name][e] = matrix
        return arrays

    def read_one(self, checkpoint: Checkpoint, e: int) -> Arrays:
        """Read the matrices of this GPU's expert ``e``, counted from its first; of a dense module, its only ones."""
        if len(self.sizes) == 2:
            weight, scale = _whole(checkpoint, self.source[0])
            n, k = self.sizes
            first = 0 if k == self.before[1] else self.rank.of_tp * k
            found = {}
            for name, x, unit in (("weight", weight, 2), ("weight_scale", scale, 32)):
                own = np.concatenate([x[start:stop] for start, stop in self.rows])
                found[name] = np.ascontiguousarray(own[:n, first // unit : (first + k) // unit])
            return found
        at = 3 * (self.experts[0] + e)
        (gate, gate_scale), (up, up_scale), (down, down_scale) = (
            _whole(checkpoint, module) for module in self.source[at : at + 3]
        )
        w13, w13_scale = np.concatenate([gate, up])[None], np.concatenate([gate_scale, up_scale])[None]
        one = Experts(w13, w13_scale, down[None], down_scale[None])
        part = part_of_experts(one, tp=self.rank.tp, tp_rank=self.rank.of_tp)
        return {name: getattr(part, name)[0] for name in self.shapes}


def operands(checkpoint: Checkpoint, is_moe: bool, rank: Rank, wanted: Callable[[str], bool]) -> list[Operand]:
    """Return the packed layers of a checkpoint as one GPU has them: experts, or dense modules.

    Args:
        checkpoint: a sound one.
        is_moe: blocks of routed experts, and not the rest.
        rank: the GPU.
        wanted: tells by its name whether a block or a module is to be among them.

    Raises:
        UsageError: they cannot be shared like that.
        MxqError: a layer of experts is not whole.
    """
    blocks: dict[str, dict[int, dict[str, Module]]] = {}
    dense: dict[str, Module] = {}
    for name, module in structure.modules(checkpoint).items():
        block = qwen35.experts_module(name)
        if module.scale is None or not wanted(block or name):
            continue
        if block is None:
            dense[name] = module
        elif found := _EXPERT.fullmatch(name.removeprefix(f"{block}.")):
            blocks.setdefault(block, {}).setdefault(int(found[1]), {})[found[2]] = module
    if is_moe:
        return [_experts(checkpoint, name, found, rank) for name, found in blocks.items()]
    return [_dense(checkpoint, name, module, rank) for name, module in dense.items()]


def check_fits(operand: Operand, kernel: Kernel) -> None:
    """Raise UsageError unless a kernel for dense layers takes the part that the GPU has; experts are padded instead."""
    if kernel.is_moe:
        return
    n, k = operand.before
    for letter, value, of in zip("NK", operand.sizes, (kernel.intermediate, kernel.hidden), strict=True):
        if value % of:
            raise UsageError(
                f"{operand.name} [N {n}, K {k}] under TP {operand.rank.tp}: {letter} = {value} of a GPU's part is not "
                f"a multiple of {of}, as {kernel.name} needs",
                "engines compute such a layer without a layout: choose others with --only, or another --tp",
            )


def _experts(checkpoint: Checkpoint, block: str, found: dict[int, dict[str, Module]], rank: Rank) -> Operand:
    count = len(found)
    sizes = {(p, *_sizes(checkpoint, module)) for projections in found.values() for p, module in projections.items()}
    shapes = {p: (n, k) for p, n, k in sizes}
    if (
        set(found) != set(range(count))
        or any(len(projections) != 3 for projections in found.values())
        or len(sizes) != 3
        or not shapes["gate_proj"] == shapes["up_proj"] == shapes["down_proj"][::-1]
    ):
        raise MxqError(
            f"{checkpoint.path}: {block} lacks experts or parts of them, or they differ in size", CONVERT_AGAIN
        )
    h, i = shapes["down_proj"]
    for name, value, by, what in (("E", count, rank.ep, 1), ("I", i, rank.tp, 32), ("H", h, 1, 32)):
        if value % (by * what):
            rule = f"{name} = {value} is not a multiple of {by}" + (f" x {what}" if what > 1 else "")
            raise UsageError(
                f"{block} [E {count}, H {h}, I {i}] under TP {rank.tp}, EP {rank.ep}: {rule}",
                "a GPU has whole experts, and whole blocks of 32 of I: choose another --tp or --ep",
            )
    own = count // rank.ep
    first = own * rank.of_ep
    source = tuple(found[e][p] for e in range(count) for p in _PROJECTIONS)
    return Operand(block, (count, h, i), (own, h, i // rank.tp), (first, first + own), source, rank)


def _dense(checkpoint: Checkpoint, name: str, module: Module, rank: Rank) -> Operand:
    n, k = _sizes(checkpoint, module)
    last = name.rpartition(".")[2]
    where = f"{name} [N {n}, K {k}] under TP {rank.tp}"
    text = qwen35.text_config(checkpoint.config)
    rows = [(0, n)]
    if rank.tp > 1:
        if last in _BY_COLUMNS:
            _shared(where, text, last, [k], rank.tp)
            k = _quotient(where, "K", k, rank.tp)
        else:
            rows = _rows(where, text, last, n, rank)
    part = sum(stop - start for start, stop in rows)
    return Operand(name, _sizes(checkpoint, module), (part, k), (0, 0), (module,), rank, tuple(rows))


def _rows(where: str, text: dict[str, Any], last: str, n: int, rank: Rank) -> list[tuple[int, int]]:
    """Return the rows that a GPU has of a module that engines split by what it gives, whole heads each."""
    keys = _HEADS.get(last, ())
    sections = [n]
    if len(keys) > 1:
        sections = [_number(where, text, key) * _number(where, text, _HEAD_SIZES[key]) for key in keys]
        if sum(sections) != n:
            raise UsageError(f"{where}: config.json asks for {sum(sections)} rows", "put the model's own config there")
    tp, at = rank.tp, rank.of_tp
    if last in ("k_proj", "v_proj"):
        heads = _number(where, text, keys[0])
        if heads < tp and tp % heads == 0:  # then several GPUs have the same head
            tp, at = heads, at * heads // tp
    _shared(where, text, last, sections, tp)
    found, start = [], 0
    for section in sections:
        size = _quotient(where, "N", section, tp)
        found.append((start + size * at, start + size * (at + 1)))
        start += section
    return found


def _shared(where: str, text: dict[str, Any], last: str, sections: list[int], tp: int) -> None:
    for key in _HEADS.get(last, ()):
        _quotient(where, key, _number(where, text, key), tp)


def _number(where: str, text: dict[str, Any], key: str) -> int:
    value = text.get(key)
    if type(value) is not int or value < 1:
        raise UsageError(f"{where}: config.json has no number {key}", "put the model's own config there")
    return value


def _quotient(where: str, name: str, value: int, tp: int) -> int:
    if value % tp:
        raise UsageError(f"{where}: {name} = {value} is not a multiple of {tp}", "choose another --tp")
    return value // tp


def _sizes(checkpoint: Checkpoint, module: Module) -> tuple[int, int]:
    return module.piece.stop - module.piece.start, checkpoint.tensors[module.piece.tensor].shape[-1] * 2


def _whole(checkpoint: Checkpoint, module: Module) -> Iterator[Bytes]:
    """Yield codes and scales of a module."""
    rows = module.piece.stop - module.piece.start
    assert module.scale is not None
    for tensor in (module.piece.tensor, module.scale):
        width = checkpoint.tensors[tensor].shape[-1]
        out = np.empty((rows, width), np.uint8)
        checkpoint.read_into(tensor, module.piece.start * width, out.data.cast("B"))
        yield out
