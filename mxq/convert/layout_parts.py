"""What one GPU has of an MXFP4 checkpoint's packed layers, plain: the operands of a kernel before any layout."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mxq.checkpoint import Checkpoint
from mxq.errors import MxqError, UsageError
from mxq.layouts import split
from mxq.layouts.kernels import Arrays, Kernel, Shapes, experts_shapes, linear_shapes
from mxq.layouts.operands import Experts, part_of_experts
from mxq.layouts.permutation import Bytes
from mxq.models import qwen35
from mxq.verify import structure
from mxq.verify.findings import CONVERT_AGAIN
from mxq.verify.structure import Module

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_EXPERT = re.compile(r"(\d+)\.(gate_proj|up_proj|down_proj)")


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
        source: the modules it is made of: gate, up and down of every expert, or one, or those that an engine merges.
        rank: the GPU.
        parts: of a dense module, or of each of those, what it has.
    """

    name: str
    before: tuple[int, ...]
    sizes: tuple[int, ...]
    experts: tuple[int, int]
    source: tuple[Module, ...]
    rank: Rank
    parts: tuple[split.Part, ...] = ()

    @property
    def count(self) -> int:
        """How many matrices each of its tensors has: experts, or 1."""
        return self.sizes[0] if len(self.sizes) == 3 else 1

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
            runs: dict[str, list[Bytes]] = {"weight": [], "weight_scale": []}
            for module, part in zip(self.source, self.parts, strict=True):
                first, last = part.columns
                for name, x, unit in zip(runs, _whole(checkpoint, module), (2, 32), strict=True):
                    runs[name] += [x[start:stop, first // unit : last // unit] for start, stop in part.rows]
            return {name: np.concatenate(matrices) for name, matrices in runs.items()}
        at = 3 * (self.experts[0] + e)
        (gate, gate_scale), (up, up_scale), (down, down_scale) = (
            _whole(checkpoint, module) for module in self.source[at : at + 3]
        )
        w13, w13_scale = np.concatenate([gate, up])[None], np.concatenate([gate_scale, up_scale])[None]
        one = Experts(w13, w13_scale, down[None], down_scale[None])
        own = part_of_experts(one, tp=self.rank.tp, tp_rank=self.rank.of_tp)
        return {name: getattr(own, name)[0] for name in self.shapes}


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
                "choose others with --only, or another --tp; engines compute it plain, or merged with others",
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
    whole = _sizes(checkpoint, module)
    part = split.part(name, *whole, qwen35.text_config(checkpoint.config), rank.tp, rank.of_tp)
    return Operand(name, whole, part.sizes, (0, 0), (module,), rank, (part,))


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
