"""``quantization_config`` in the form of AMD Quark, and vLLM's rules for reading it.

vLLM looks up every linear it builds, under its own name for it, in ``exclude``: an entry matches if it equals the name,
or if it begins with ``re:`` and the rest matches from the name's start (:func:`re.match`). Globs match nothing. Routed
experts are looked up as one block, left unquantized as soon as one entry names the block or something in it.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

from mxq.errors import MxqError
from mxq.models import qwen35

_SPEC = {
    "block_size": None,
    "ch_axis": -1,
    "dtype": "fp4",
    "enable_buffer_reuse": False,
    "group_size": 32,
    "is_dynamic": False,
    "is_scale_quant": False,
    "max_input_numel": 4194304,
    "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver",
    "qscheme": "per_group",
    "round_method": "half_even",
    "scale_calculation_mode": "even",
    "scale_format": "e8m0",
    "scale_type": "float",
    "symmetric": None,
    "zero_point_type": "int32",
}
# Quark's `diffs` is an observer of its own; it has no `rceil` and no `mse`, of which it reads, and keeps, the name.
_DIFFS = {"observer_cls": "PerBlockMXDiffsObserver"}
_WHOLE_PART = {"mtp": r"re:.*mtp\..*", "vision": r"re:.*visual\..*"}
_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


def quark_config(exclude: Iterable[str], *, weight_only: bool, rule: str) -> dict[str, Any]:
    """Return a ``quantization_config`` as Quark 0.13 writes it.

    Args:
        exclude: from :func:`exclude_entries`.
        weight_only: activations are left as they are.
        rule: the scale rule that made the weights (:mod:`mxq.formats.rules`). Engines do not need it to read them, and
            that of activations is theirs: vLLM takes ``even`` without asking, so that is what is written.
    """
    return {
        "algo_config": None,
        "exclude": list(exclude),
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": {
            "bias": None,
            "input_tensors": None if weight_only else _SPEC | {"is_dynamic": True},
            "output_tensors": None,
            "target_device": None,
            "weight": _SPEC | (_DIFFS if rule == "diffs" else {"scale_calculation_mode": rule}),
        },
        "kv_cache_post_rope": False,
        "kv_cache_quant_config": {},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "softmax_quant_spec": None,
        "version": "0.13",
    }


def exclude_entries(kept: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Return the ``exclude`` of a checkpoint, given its modules (checkpoint names) that are and are not quantized.

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


@dataclass(frozen=True)
class QuantizationConfig:
    """How the weights of a checkpoint are quantized to MXFP4.

    Attributes:
        exclude: what is left as it was: names and ``re:`` patterns, as in config.json.
        weight_only: activations are not quantized.
        rule: the scale rule that made the weights; activations get ``even``, whatever is written.
    """

    exclude: tuple[str, ...]
    weight_only: bool
    rule: str

    @classmethod
    def of(cls, config: dict[str, Any], where: str) -> "QuantizationConfig | None":
        """Read the ``quantization_config`` of a config.json; None if it has none.

        Raises:
            MxqError: it is not MXFP4 as Quark writes it.
        """
        raw = config.get("quantization_config")
        if raw is None:
            return None
        hint = "mxq reads MXFP4 checkpoints in Quark's form (quant_method quark, fp4, groups of 32, e8m0 scales)"
        if not isinstance(raw, dict) or raw.get("quant_method") != "quark":
            method = raw.get("quant_method") if isinstance(raw, dict) else raw
            raise MxqError(f"{where} is quantized with {method!r}, which mxq does not read", hint)
        exclude, scheme = raw.get("exclude", []), raw.get("global_quant_config")
        if not isinstance(exclude, list) or not all(isinstance(entry, str) for entry in exclude):
            raise MxqError(f"{where}: quantization_config.exclude is not a list of names", hint)
        weight = scheme.get("weight") if isinstance(scheme, dict) else None
        if not isinstance(scheme, dict) or not _is_mxfp4(weight):
            raise MxqError(f"{where}: quantization_config.global_quant_config.weight is not MXFP4", hint)
        if raw.get("layer_quant_config") or raw.get("layer_type_quant_config"):
            raise MxqError(f"{where}: quantization_config has settings per layer, which mxq does not read", hint)
        inputs = scheme.get("input_tensors")
        if inputs is not None and not (_is_mxfp4(inputs) and inputs.get("is_dynamic") is True):
            raise MxqError(f"{where}: quantization_config.global_quant_config.input_tensors is not dynamic MXFP4", hint)
        for entry in exclude:
            _compiled(entry, where)
        return cls(tuple(exclude), inputs is None, _rule_of(weight))

    def is_quantized(self, module: str) -> bool:
        """Tell whether vLLM takes ``module`` (a linear's name in the checkpoint, without ``.weight``) to be MXFP4."""
        block = qwen35.experts_module(module)
        if block is not None:
            name = qwen35.engine_name(block)
            return not (name in self._experts or self._matches(name))
        fused = qwen35.fused_module(module)
        if fused is not None and self._matches(qwen35.engine_name(fused)):
            return False
        return not self._matches(qwen35.engine_name(module))

    def _matches(self, engine_name: str) -> bool:
        return engine_name in self._names or any(pattern.match(engine_name) for pattern in self._patterns)

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(qwen35.engine_name(entry) for entry in self.exclude if not entry.startswith("re:"))

    @functools.cached_property
    def _experts(self) -> frozenset[str]:
        """Blocks of routed experts of which some part is named."""
        blocks = (re.match(r"(.*\.experts)\.", name) for name in self._names)
        return frozenset(block[1] for block in blocks if block)

    @functools.cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        compiled = (_compiled(entry, "quantization_config") for entry in self.exclude)
        return tuple(pattern for pattern in compiled if pattern is not None)


def _is_mxfp4(spec: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(spec, dict) and all(spec.get(key) == value for key, value in _MXFP4.items())


def _rule_of(weight: dict[str, Any]) -> str:
    if weight.get("observer_cls") == _DIFFS["observer_cls"]:
        return "diffs"
    return str(weight.get("scale_calculation_mode") or "even")  # as Quark takes null


def _compiled(entry: str, where: str) -> re.Pattern[str] | None:
    """Return the pattern of a ``re:`` entry, None for a name."""
    if not entry.startswith("re:"):
        return None
    try:
        return re.compile(entry[3:])
    except re.error as error:
        raise MxqError(f"{where}: exclude entry {entry!r} is not a regular expression: {error}") from None
