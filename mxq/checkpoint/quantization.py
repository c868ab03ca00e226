"""How the weights of a checkpoint are quantized to MXFP4: the two forms, and vLLM's rules for reading them.

Codes and scales of ``X.weight``, and the module that has ``quantization_config``::

    quark                X.weight, X.weight_scale           mxq.checkpoint.quark
    compressed-tensors   X.weight_packed, X.weight_scale    mxq.checkpoint.compressed_tensors

The bytes are the same in both, and mxq knows packed weights by Quark's names whatever the file says. Experts stored
fused are ``experts.gate_up_proj`` and ``experts.down_proj`` with the same endings; in the form of compressed-tensors
nothing but vLLM reads them.

vLLM looks up every linear it builds, under its own name for it, in the list of what is not quantized (``exclude``,
``ignore``): an entry matches if it equals the name, or if it begins with ``re:`` and the rest matches from the name's
start (:func:`re.match`). Globs match nothing. Quark's routed experts are looked up as one block, left unquantized as
soon as one entry names the block or something in it; those of compressed-tensors as the projections of expert 0.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Protocol

from mxq.checkpoint.compressed_tensors import CompressedTensors, compressed_tensors_config
from mxq.checkpoint.headers import TensorInfo
from mxq.checkpoint.matching import HINT
from mxq.checkpoint.quark import Quark, quark_config
from mxq.errors import MxqError
from mxq.models import qwen35

FORMS = ("quark", "compressed-tensors")
_PACKED = "_packed"
_PACKED_NAMES = tuple(f"{name}{_PACKED}" for name in (".weight", ".experts.gate_up_proj", ".experts.down_proj"))
_WHOLE_PART = {"mtp": r"re:.*mtp\..*", "vision": r"re:.*visual\..*"}


class Claims(Protocol):
    """What a quantization_config says of the weights."""

    @property
    def entries(self) -> tuple[str, ...]:
        """What it names, as in config.json."""

    @property
    def rule(self) -> str | None:
        """The scale rule that it says made the weights, None if it says none."""

    @property
    def weight_only(self) -> bool:
        """Activations are not quantized."""

    method: ClassVar[str]
    """What writes such a config."""
    listing: ClassVar[str]
    """The key under which it names what is not quantized."""
    suffix: ClassVar[str]
    """What a packed weight's name ends with."""
    globs: ClassVar[bool]
    """Whether an entry with a ``*`` that does not begin with ``re:`` can match."""

    def is_quantized(self, module: str) -> bool:
        """Tell whether vLLM takes a module of the checkpoint, by its name there, to be MXFP4."""


class QuantizationConfig(Claims, Protocol):
    """What a quantization_config says, in a form that mxq writes and decodes with."""

    form: ClassVar[str]
    """One of :data:`FORMS`."""


def config_for(form: str, exclude: Iterable[str], *, weight_only: bool, rule: str) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint in ``form``.

    Args:
        form: one of :data:`FORMS`.
        exclude: from :func:`exclude_entries`.
        weight_only: activations are left as they are.
        rule: the scale rule that made the weights, which only Quark's form can say.
    """
    if form == "quark":
        return quark_config(exclude, weight_only=weight_only, rule=rule)
    return compressed_tensors_config(exclude, weight_only=weight_only)


def quantization_of(config: dict[str, Any], where: str) -> QuantizationConfig | None:
    """Read the ``quantization_config`` of a config.json; None if it has none.

    Raises:
        MxqError: it is not MXFP4 in one of :data:`FORMS`, activations included.
    """
    found = claims_in_form(config, where)
    if isinstance(found, CompressedTensors):
        found.check_activations(where)
    return found


def claims_in_form(config: dict[str, Any], where: str) -> Quark | CompressedTensors | None:
    """As :func:`quantization_of`, but activations of compressed-tensors' form may be whatever they are."""
    raw = config.get("quantization_config")
    if raw is None:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else raw
    if method == "quark":
        return Quark.of(raw, where)
    if method == "compressed-tensors":
        return CompressedTensors.of(raw, where)
    raise MxqError(f"{where} is quantized with {method!r}, which mxq does not read", HINT)


def packed_name(weight: str, form: str) -> str:
    """Return the name under which the codes of ``weight`` are stored in ``form``."""
    return weight if form == "quark" else weight + _PACKED


def quark_names(tensors: dict[str, TensorInfo]) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return tensors with packed weights by Quark's names, in the same order, and what their files call those renamed.

    A ``X.weight_packed`` beside a ``X.weight`` keeps its name.
    """
    stored = {name.removesuffix(_PACKED): name for name in tensors if name.endswith(_PACKED_NAMES)}
    stored = {name: origin for name, origin in stored.items() if name not in tensors}
    if not stored:
        return tensors, stored
    plain = {origin: name for name, origin in stored.items()}
    named = {}
    for origin, info in tensors.items():
        name = plain.get(origin, origin)
        named[name] = dataclasses.replace(info, name=name) if name != origin else info
    return named, stored


def exclude_entries(kept: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Return the list of what is not quantized, given modules (checkpoint names) that are and are not.

    What is kept is named as the checkpoint and as vLLM call it, routed experts also by their block. The vision tower
    and MTP, where no part of them is quantized, get a pattern too, for engines that rename them.
    """
    kept = list(kept)
    names = set(kept)
    names.update(block for module in kept if (block := qwen35.experts_module(module)) is not None)
    engine_names = {qwen35.engine_name(name) for name in names} - names
    touched = {qwen35.part(module) for module in quantized}
    present = {qwen35.part(module) for module in kept}
    patterns = [_WHOLE_PART[part] for part in sorted(present - touched) if part in _WHOLE_PART]
    return [*sorted(names), *sorted(engine_names), *patterns]


def without(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a config.json without ``keys``, which some tools repeat for the language model."""
    left = {key: value for key, value in config.items() if key not in keys}
    if isinstance(text := left.get("text_config"), dict):
        left["text_config"] = {key: value for key, value in text.items() if key not in keys}
    return left
