"""What of a model can be quantized or kept by itself: a class of modules in one decoder layer.

Engines load q, k and v as one linear, and so gate and up, ``in_proj_qkv`` and ``in_proj_z``, ``in_proj_b`` and
``in_proj_a``, and all routed experts of a layer: none of these is ever in two groups.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxq.checkpoint import Checkpoint, fp8
from mxq.checkpoint.headers import SIZES
from mxq.formats.rules import BLOCK
from mxq.models import qwen35
from mxq.models.qwen35 import Piece

_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.(.*)")
_CLASSES = [
    (re.compile(pattern), name)
    for pattern, name in [
        (r"self_attn\.[qkv]_proj", "attention qkv"),
        (r"self_attn\.o_proj", "attention out"),
        (r"linear_attn\.in_proj_(qkv|z)", "GDN in_proj"),
        (r"linear_attn\.in_proj_[ab]", "GDN gates"),
        (r"linear_attn\.out_proj", "GDN out"),
        (r"mlp\.(gate|up)_proj", "MLP gate/up"),
        (r"mlp\.down_proj", "MLP down"),
        (r"mlp\.experts\..*", "routed experts"),
        (r"mlp\.shared_expert\..*", "shared expert"),
    ]
]
CLASSES = tuple(name for _, name in _CLASSES)
"""The classes of modules, in the order in which a layer runs them."""

BY = ("class", "layer", "group")
"""What a unit may be: a class in all layers, a layer with all of its classes, or one class of one layer."""


@dataclass(frozen=True)
class Group:
    """A class of modules in one decoder layer.

    Attributes:
        layer: its number, from 0.
        kind: one of :data:`CLASSES`.
        pieces: the weights, as :func:`mxq.models.qwen35.pieces` has them.
        bytes_saved: by which a checkpoint is smaller where they are MXFP4 and not as they were.
    """

    layer: int
    kind: str
    pieces: tuple[Piece, ...]
    bytes_saved: int

    @property
    def name(self) -> str:
        """What people are told: ``layer 3 attention qkv``."""
        return f"layer {self.layer} {self.kind}"

    @property
    def patterns(self) -> tuple[str, ...]:
        """Shell patterns that match its modules and nothing else, as recipes have them."""
        blocks = (qwen35.experts_module(piece.module) for piece in self.pieces)
        named = (
            piece.module if block is None else f"{block}.*" for piece, block in zip(self.pieces, blocks, strict=True)
        )
        return tuple(dict.fromkeys(named))


@dataclass(frozen=True)
class Unit:
    """Groups that are quantized together, all else staying as it was."""

    name: str
    groups: tuple[Group, ...]

    @property
    def bytes_saved(self) -> int:
        """As of :class:`Group`, of all of them."""
        return sum(group.bytes_saved for group in self.groups)

    @property
    def first_layer(self) -> int:
        """The first layer that it changes."""
        return min(group.layer for group in self.groups)


def groups(source: Checkpoint, pieces: Iterable[Piece]) -> list[Group]:
    """Return the groups that ``pieces`` make, by layer and in the order of :data:`CLASSES`.

    Args:
        source: the checkpoint as :func:`mxq.checkpoint.fp8.numbers` gives it.
        pieces: the modules that a recipe quantizes; those outside the decoder layers, MTP's, are left out: they do
            not change what the target says.
    """
    held: Mapping[tuple[int, str], list[Piece]] = defaultdict(list)
    for piece in pieces:
        found = _LAYER.fullmatch(piece.module)
        if found:
            held[int(found[1]), next(name for pattern, name in _CLASSES if pattern.fullmatch(found[2]))].append(piece)
    written = fp8.rounded(source)

    def saved(piece: Piece) -> int:
        columns = source.tensors[piece.tensor].shape[-1]
        elements = (piece.stop - piece.start) * columns
        return elements * SIZES[written.tensors[piece.tensor].dtype] - elements // 2 - elements // BLOCK

    ordered = sorted(held, key=lambda key: (key[0], CLASSES.index(key[1])))
    return [Group(*key, tuple(held[key]), sum(map(saved, held[key]))) for key in ordered]


def units(found: Sequence[Group], by: str) -> list[Unit]:
    """Return ``found`` as units of the kind ``by``, one of :data:`BY`."""
    keys: dict[str, Callable[[Group], str]] = {
        "class": lambda group: group.kind,
        "layer": lambda group: f"layer {group.layer}",
        "group": lambda group: group.name,
    }
    together: dict[str, list[Group]] = defaultdict(list)
    for group in found:
        together[keys[by](group)].append(group)
    return [Unit(name, tuple(members)) for name, members in together.items()]
