"""What a conversion will do, worked out from headers alone: the fate of every tensor and the place of every byte."""

import contextlib
import gc
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mxq.checkpoint import Checkpoint, TensorInfo, fp8
from mxq.checkpoint.beside import copied_files
from mxq.checkpoint.quantization import FORMS, exclude_entries, packed_name
from mxq.checkpoint.writer import Shard, TensorSpec, layout
from mxq.convert import decide
from mxq.convert.recipe import Recipe, Rule
from mxq.errors import MxqError, UsageError
from mxq.files import size
from mxq.formats.rules import BLOCK
from mxq.models import qwen35
from mxq.models.qwen35 import Piece, base_name
from mxq.verify.complete import check_complete
from mxq.verify.declared import contradictions

EXPERTS = ("per-expert", "fused")
DEFAULT_SHARD_SIZE = 5_000_000_000


@dataclass(frozen=True)
class Decision:
    """The fate of one source tensor, and the pattern that decided it.

    Attributes:
        tensor: as the source's files have it.
        action: ``quantize``, ``keep``, or ``dequantize`` for FP8 that is not quantized again but written as bf16.
        rule: the pattern.
        bytes_before: of the tensor and, if it is FP8, its scales.
        bytes_after: of what is written for it.
    """

    tensor: TensorInfo
    action: str
    rule: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Group:
    """Tensors that are written together: a kept tensor, or packed codes and their scales.

    Attributes:
        outputs: one kept tensor, or the weight and its scales.
        pieces: where a quantized weight's rows come from, in order; empty for a kept tensor, which has its own name.
        rule: the pattern that decided.
        action: as in :class:`Decision`.
    """

    outputs: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    rule: str
    action: str

    def reads(self) -> tuple[str, ...]:
        """Return the source's tensors that it is made from, in order, each read by itself."""
        return tuple(piece.tensor for piece in self.pieces) or (self.outputs[0].name,)


@dataclass(frozen=True)
class Plan:
    """A conversion, ready to run.

    Attributes:
        source: the checkpoint that is read, as :func:`mxq.checkpoint.fp8.numbers` gives it.
        family: ``qwen3_5`` or ``qwen3_5_moe``.
        form: that of the checkpoint written, one of :data:`mxq.checkpoint.quantization.FORMS`.
        experts: how routed experts are written: ``per-expert`` or ``fused``.
        max_shard_size: of the files written, in bytes.
        decisions: every source tensor's fate, in the order of the source.
        groups: what is written, by the name of the first tensor of each group.
        shards: the files it is written to.
        exclude: quantization_config's list of what is not quantized.
        lints: what works but may be slow, in words.
    """

    source: Checkpoint
    recipe: Recipe
    family: str
    form: str
    experts: str
    max_shard_size: int
    decisions: list[Decision]
    groups: dict[str, Group]
    shards: list[Shard]
    exclude: list[str]
    lints: list[str]

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors of the source."""
        return sum(decision.bytes_before for decision in self.decisions)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors written."""
        return sum(tensor.nbytes for group in self.groups.values() for tensor in group.outputs)

    @property
    def vocabulary(self) -> int:
        """How many rows the embedding has."""
        return self._embedding.shape[0]

    @property
    def hidden(self) -> int:
        """How many elements a hidden state has."""
        return self._embedding.shape[-1]

    @property
    def _embedding(self) -> TensorInfo:
        embeddings = (name for name in self.source.tensors if qwen35.role(name) is qwen35.Role.EMBEDDING)
        return self.source.tensors[next(embeddings)]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON can hold it."""
        return {
            "recipe": self.recipe.name,
            "family": self.family,
            "format": self.form,
            "experts": self.experts,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "tensors": [
                {
                    "name": decision.tensor.name,
                    "dtype": decision.tensor.dtype,
                    "shape": list(decision.tensor.shape),
                    "action": decision.action,
                    "rule": decision.rule,
                    "bytes_before": decision.bytes_before,
                    "bytes_after": decision.bytes_after,
                }
                for decision in self.decisions
            ],
            "shards": [
                {"file": shard.file, "bytes": sum(tensor.nbytes for tensor in shard.tensors)} for shard in self.shards
            ],
            "exclude": self.exclude,
            "lints": self.lints,
        }


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Hundreds of thousands of small objects, none in a cycle: to look for cycles among them is a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def plan(
    source: Checkpoint,
    recipe: Recipe,
    *,
    form: str = FORMS[0],
    experts: str = "per-expert",
    max_shard_size: int = DEFAULT_SHARD_SIZE,
) -> Plan:
    """Plan the conversion of ``source``; reads no weights but embeddings that are said to be tied and stored twice.

    Raises:
        UsageError: the conversion would go wrong: another architecture, already quantized (but for block-FP8, see
            :func:`mxq.checkpoint.fp8.numbers`), a recipe that does not fit (see :mod:`mxq.convert.recipe`), a matrix
            that MXFP4 cannot hold, a fused group or experts split, a config.json that contradicts the tensors.
        MxqError: the tokenizer or another file that goes along is a link out of the directory, or to nothing; experts
            stored fused have an odd number of rows.
    """
    family = qwen35.family(source.config, str(source.path))
    source = fp8.numbers(source)
    if family not in recipe.rules:
        raise UsageError(
            f"recipe {recipe.name} has no rules for {family}, the family of {source.path}",
            "take mxfp4, which has rules for dense and MoE models, or another of recipes/README.md",
        )
    copied_files(source.path)  # raises for one that could not be copied, long before its turn
    try:
        held = {name: qwen35.pieces(name, tensor.shape) for name, tensor in source.tensors.items()}
    except ValueError as error:
        raise MxqError(f"{source.path}: {error}", "the checkpoint is damaged: get it again") from None
    check_complete(source, held)
    rules = decide.rules(source, recipe, family, held)
    if wrong := contradictions(source):
        raise UsageError(f"{source.path}: {wrong[0]}", "put the config.json back that belongs to these weights")
    quantized = [piece for name, rule in rules.items() if rule.quantizes for piece in held[name]]
    groups = {group.outputs[0].name: group for group in _groups(source, rules, held, form, experts)}
    decisions = [_decision(source, name, rules[name]) for name in source.tensors]
    return Plan(
        source=source,
        recipe=recipe,
        family=family,
        form=form,
        experts=experts,
        max_shard_size=max_shard_size,
        decisions=decisions,
        groups=groups,
        shards=layout((group.outputs for group in groups.values()), max_shard_size),
        exclude=exclude_entries(_kept(source, rules, held), [piece.module for piece in quantized]),
        lints=[*_fp8_lints(decisions), *decide.lints(source, quantized), *_form_lints(form, family)],
    )


def _fp8_lints(decisions: list[Decision]) -> Iterable[str]:
    """Yield what becomes of block-FP8."""
    if any(decision.tensor.dtype == fp8.CODES for decision in decisions):
        yield "the source is block-FP8: its own rounding is in the weights, and will be measured as no error"
    grown = [decision for decision in decisions if decision.action == "dequantize"]
    if grown:
        more = sum(decision.bytes_after - decision.bytes_before for decision in grown)
        yield f"{len(grown)} FP8 tensors that the recipe keeps are written as bf16, {size(more)} more"


def _form_lints(form: str, family: str) -> Iterable[str]:
    """Yield what vLLM 0.32 does not do with a form that it does with the other."""
    if form == "compressed-tensors":
        yield (
            "compressed-tensors: vLLM 0.32 quantizes activations where the GPU has kernels for that (MI350, Blackwell) "
            "and not elsewhere, whatever the recipe says"
        )
        if family == "qwen3_5_moe":
            yield "compressed-tensors: vLLM 0.32 has no kernel for experts in this form on AMD GPUs; use quark there"


def packed_specs(name: str, shape: tuple[int, ...], form: str) -> tuple[TensorSpec, TensorSpec]:
    """Return codes and scales, in ``form``, of a weight called ``name`` whose unquantized shape is [..., K]."""
    *rows, columns = shape
    return (
        TensorSpec(packed_name(name, form), "U8", (*rows, columns // 2)),
        TensorSpec(qwen35.scale_name(name), "U8", (*rows, columns // BLOCK)),
    )


def _groups(
    source: Checkpoint, rules: dict[str, Rule], held: dict[str, list[Piece]], form: str, experts: str
) -> Iterable[Group]:
    written = fp8.rounded(source)
    parts: dict[str, list[Piece]] = defaultdict(list)
    last = {into: name for name in source.tensors for into in _fused_into(held[name], experts)}
    for name, tensor in source.tensors.items():
        rule = rules[name]
        if not rule.quantizes:
            kept = written.tensors[name]
            yield Group((TensorSpec(name, kept.dtype, kept.shape),), (), rule.pattern, _kept_action(source, name))
            continue
        into = _fused_into(held[name], experts)
        for piece in held[name] if not into else ():
            shape = (piece.stop - piece.start, tensor.shape[-1])
            yield Group(packed_specs(f"{piece.module}.weight", shape, form), (piece,), rule.pattern, "quantize")
        for target, pieces in into.items():
            parts[target] += pieces
            if last[target] == name:  # not at the end of all: who streams the source would have to keep it until then
                yield _fused(source, target, parts.pop(target), form, rule.pattern)


def _fused_into(pieces: list[Piece], experts: str) -> dict[str, list[Piece]]:
    """Return what of a tensor is written into which fused tensor of experts."""
    found: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces if experts == "fused" else ():
        if (block := qwen35.experts_module(piece.module)) is not None:
            found[f"{block}.{'down_proj' if piece.module.endswith('.down_proj') else 'gate_up_proj'}"].append(piece)
    return found


def _fused(source: Checkpoint, name: str, pieces: list[Piece], form: str, rule: str) -> Group:
    def place(piece: Piece) -> tuple[int, bool]:  # by expert, gate rows before up rows
        *_, expert, projection = piece.module.split(".")
        return int(expert), projection == "up_proj"

    pieces.sort(key=place)
    count = place(pieces[-1])[0] + 1
    rows = sum(piece.stop - piece.start for piece in pieces)
    shape = (count, rows // count, source.tensors[pieces[0].tensor].shape[-1])
    return Group(packed_specs(name, shape, form), tuple(pieces), rule, "quantize")


def _kept(source: Checkpoint, rules: dict[str, Rule], held: dict[str, list[Piece]]) -> Iterable[str]:
    """Yield the modules that stay matrices of the source's type, experts stored fused also under that name."""
    for name, tensor in source.tensors.items():
        if not rules[name].quantizes and len(tensor.shape) > 1:
            yield base_name(name)
            yield from (piece.module for piece in held[name])


def _kept_action(source: Checkpoint, name: str) -> str:
    return "keep" if fp8.scale_of(source, name) is None else "dequantize"


def _decision(source: Checkpoint, name: str, rule: Rule) -> Decision:
    tensor, scale = fp8.stored(source).tensors[name], fp8.scale_of(source, name)
    before = tensor.nbytes + (0 if scale is None else scale.nbytes)
    if not rule.quantizes:
        return Decision(tensor, _kept_action(source, name), rule.pattern, before, fp8.rounded(source).info(name).nbytes)
    elements = math.prod(tensor.shape)
    return Decision(tensor, "quantize", rule.pattern, before, elements // 2 + elements // BLOCK)
