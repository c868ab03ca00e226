"""Where a planned checkpoint's layers would run on MI355X, by sizes of tensor and expert parallelism: headers alone."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mxq.checkpoint.quantization import FORMS
from mxq.convert.plan import Plan
from mxq.errors import UsageError
from mxq.layouts import paths, split
from mxq.layouts.paths import Deployment, ExpertsCase, Found, LinearCase
from mxq.models import qwen35

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DIVIDE = "vllm/model_executor/layers/linear.py, divide"
_WHOLE = "vllm/model_executor/models/qwen3_next.py, Qwen3NextSparseMoeBlock"
_INDIVISIBLE = {
    "refused": "",
    "wrong": ", which vLLM does not notice",
    "note": ": needs --mm-encoder-tp-mode data, or --language-model-only",
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Experts:
    """Routed experts of some layers, alike: E, H and I; ``packed``: the plan makes them MXFP4."""

    name: str
    layers: int
    sizes: tuple[int, int, int]
    packed: bool


@dataclass(frozen=True)
class Linear:
    """Modules of some layers that engines merge into one, alike: by name N and K; or a single one."""

    name: str
    layers: int
    modules: tuple[tuple[str, int, int], ...]
    packed: bool

    @property
    def is_shared_expert(self) -> bool:
        """It is part of a shared expert."""
        return ".shared_expert." in self.name


@dataclass(frozen=True)
class ExpertsPath:
    """What becomes of :class:`Experts` in a deployment; sizes are of one GPU, bytes of all their layers on it.

    Attributes:
        kind: the experts.
        case: what decided; None where they are not packed.
        facts: what is known of it.
    """

    kind: Experts
    case: ExpertsCase | None
    facts: list[Found] = field(default_factory=list)

    @property
    def bytes(self) -> tuple[int, int] | None:
        """Before and after padding; None where there is nothing right to pad."""
        if self.case is None or paths.worst(self.facts) in ("refused", "wrong"):
            return None
        plain, padded = self.case.bytes()
        return plain * self.kind.layers, padded * self.kind.layers


@dataclass(frozen=True)
class LinearPath:
    """What becomes of a :class:`Linear` in a deployment.

    Attributes:
        kind: the modules.
        case: N and K that a GPU has; None where vLLM does not divide it like that.
        repeated: rows that all GPUs of TP have together beyond the module's own: of key and value heads.
        facts: what is known of it; nothing if it is not packed.
    """

    kind: Linear
    case: LinearCase | None
    repeated: int = 0
    facts: list[Found] = field(default_factory=list)


@dataclass(frozen=True)
class Placed:
    """A deployment.

    Attributes:
        on: its sizes.
        facts: what is known of it whatever is packed: numbers that do not divide.
        experts: by kind.
        linear: by kind.
    """

    on: Deployment
    facts: list[Found]
    experts: list[ExpertsPath]
    linear: list[LinearPath]

    @property
    def repeated_bytes(self) -> int:
        """What a GPU has of weights because others have the same key and value heads, on average; 16 bits unpacked."""
        return (
            sum(
                path.repeated * path.kind.modules[0][2] * path.kind.layers * (17 if path.kind.packed else 64) // 32
                for path in self.linear
            )
            // self.on.tp
        )

    @property
    def verdict(self) -> str:
        """The worst that is known of any part: see :data:`mxq.layouts.paths.VERDICTS`, or ``ok``."""
        found = [*self.facts]
        for experts in self.experts:
            found += experts.facts
        for linear in self.linear:
            found += linear.facts
        return paths.worst(found)


def place(planned: Plan, tps: Sequence[int], eps: Sequence[int] | None) -> list[Placed]:
    """Return every combination of TP and EP.

    Args:
        planned: the conversion.
        tps: tensor parallel sizes.
        eps: sizes of expert parallelism, 1 for none; None if it was not asked for.

    Raises:
        UsageError: there are no experts to share, a size does not divide them, or config.json lacks a number.
    """
    experts, linear = kinds(planned)
    where = str(planned.source.path)
    if eps is not None and not experts:
        raise UsageError(f"{where}: --ep is for MoE models, and this one has no experts", "leave it out")
    for ep in eps or ():
        for kind in experts:
            if kind.sizes[0] % ep:
                raise UsageError(
                    f"{where}: --ep {ep} does not divide the {kind.sizes[0]} experts", "choose sizes that do"
                )
    return [_placed(planned, Deployment(tp, ep), experts, linear) for ep in eps or (1,) for tp in tps]


def kinds(planned: Plan) -> tuple[list[Experts], list[Linear]]:
    """Return the layers that could be MXFP4, alike ones together, in the order of the checkpoint."""
    blocks: dict[str, dict[str, Any]] = {}
    merged: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    packed = {}
    for decision in planned.decisions:
        name, shape = decision.tensor.name, decision.tensor.shape
        role = qwen35.role(name)
        if role not in qwen35.QUANTIZABLE or len(shape) < 2:
            continue
        base = qwen35.base_name(name)
        if role is qwen35.Role.EXPERT:
            block = base[: base.index(".experts") + len(".experts")]
            found = blocks.setdefault(block, {"count": 0, "packed": decision.action == "quantize"})
            if len(shape) == 3:
                found["count"] = shape[0]
            elif number := _EXPERT.search(base):
                found["count"] = max(found["count"], int(number[1]) + 1)
            if base.endswith(".down_proj"):
                found["sizes"] = tuple(shape[-2:])
            continue
        whole = qwen35.fused_module(base) or base
        merged[whole][base.rpartition(".")[2]] = (shape[0], shape[1])
        packed[whole] = decision.action == "quantize"
    return list(_experts(blocks)), list(_linear(merged, packed))


def _experts(blocks: dict[str, dict[str, Any]]) -> Iterator[Experts]:
    alike: dict[tuple[Any, ...], int] = defaultdict(int)
    for name, found in blocks.items():
        alike[_short(name), (found["count"], *found["sizes"]), found["packed"]] += 1
    yield from (Experts(name, layers, sizes, packed) for (name, sizes, packed), layers in alike.items())


def _linear(merged: dict[str, dict[str, tuple[int, int]]], packed: dict[str, bool]) -> Iterator[Linear]:
    alike: dict[tuple[Any, ...], int] = defaultdict(int)
    for name, found in merged.items():
        order = qwen35.FUSED.get(name.rpartition(".")[2], ())
        modules = tuple((last, *found[last]) for last in (order or found) if last in found)
        alike[_short(name), modules, packed[name]] += 1
    yield from (Linear(name, layers, modules, kept) for (name, modules, kept), layers in alike.items())


def _short(name: str) -> str:
    """Return a name without what all layers have: ``self_attn.qkv_proj``, ``mtp.mlp.experts``."""
    short = _NUMBER.sub("*", name)
    for prefix, instead in (("model.language_model.layers.*.", ""), ("model.layers.*.", ""), ("mtp.layers.*.", "mtp.")):
        if short.startswith(prefix):
            return instead + short.removeprefix(prefix)
    return short


def _placed(planned: Plan, on: Deployment, experts: list[Experts], linear: list[Linear]) -> Placed:
    config = planned.source.config
    text = qwen35.text_config(config)
    vision = config.get("vision_config")
    divided = split.indivisible(text, vision if isinstance(vision, dict) else {}, on.tp)
    facts: list[Found] = []
    for verdict, more in _INDIVISIBLE.items():
        ones = [(one, value) for one, value in divided if one.verdict == verdict]
        if ones and not facts:
            what = ", ".join(f"{value} {one.what}" for one, value in ones)
            source = "; ".join(dict.fromkeys(one.source for one, _ in ones))
            facts.append(Found("divided", verdict, f"TP {on.tp} does not divide {what}{more}", source))
    divides = all(fact.verdict == "note" for fact in facts)
    activations = planned.recipe.activations == "dynamic"
    return Placed(
        on,
        facts,
        [_experts_path(planned, kind, on, activations, text, _has_shared(kind, linear)) for kind in experts],
        [_linear_path(kind, on, activations, text, divides) for kind in linear],
    )


def _has_shared(kind: Experts, linear: list[Linear]) -> bool:
    """Tell whether there is a shared expert beside experts, packed and of their size."""
    names = kind.name.removesuffix("experts") + "shared_expert.down_proj"
    return any(one.name == names and one.packed and one.modules[0][2] == kind.sizes[2] for one in linear)


def _experts_path(
    planned: Plan, kind: Experts, on: Deployment, activations: bool, text: dict[str, Any], shared: bool
) -> ExpertsPath:
    top_k = text.get("num_experts_per_tok")
    if type(top_k) is not int or top_k < 1:
        raise UsageError(
            f"{planned.source.path}: config.json has no number num_experts_per_tok", "put the model's own config there"
        )
    if not kind.packed:
        return ExpertsPath(kind, None)
    case = ExpertsCase(*kind.sizes, top_k, on, activations, planned.form == FORMS[0], shared)
    return ExpertsPath(kind, case, paths.facts(case, paths.EXPERTS_FACTS))


def _linear_path(kind: Linear, on: Deployment, activations: bool, text: dict[str, Any], divides: bool) -> LinearPath:
    tp = on.tp
    if kind.is_shared_expert:
        n, k = kind.modules[0][1:]
        tp = on.of_shared_expert(k if kind.name.endswith("down_proj") else n, kind.packed)
    if not divides:
        return LinearPath(kind, None)
    try:
        parts = [split.part(name, n, k, text, tp) for name, n, k in kind.modules]
    except split.IndivisibleError as error:
        return LinearPath(kind, None, 0, [Found("divided", "refused", error.message, _DIVIDE)])
    rows = sum(part.sizes[0] for part in parts)
    case = LinearCase(rows, parts[0].sizes[1], activations)
    repeated = sum(
        part.sizes[0] * tp - n
        for part, (_, n, k) in zip(parts, kind.modules, strict=True)
        if part.sizes[1] == k and part.sizes[0] * tp > n > part.sizes[0]
    )
    found = paths.facts(case, paths.LINEAR_FACTS) if kind.packed else []
    if tp != on.tp:
        found.append(Found("whole", "note", "every GPU has all of the shared expert", _WHOLE))
    return LinearPath(kind, case, repeated, found)
