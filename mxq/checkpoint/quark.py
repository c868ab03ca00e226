"""``quantization_config`` in the form of AMD Quark 0.13."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from mxq.checkpoint.matching import HINT, Listing, names
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
_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
# At these engines do not look; a config that has them otherwise was written for other weights.
_IF_SAID: dict[str, tuple[Any, ...]] = {"ch_axis": (-1, 1), "block_size": (None,)}


def quark_config(exclude: Iterable[str], *, weight_only: bool, rule: str) -> dict[str, Any]:
    """Return a ``quantization_config`` as Quark 0.13 writes it.

    Args:
        exclude: from :func:`mxq.checkpoint.quantization.exclude_entries`.
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


@dataclass(frozen=True)
class Quark:
    """What a config in Quark's form says.

    Attributes:
        excluded: what is left as it was.
        entries: ``exclude``, as in config.json.
        weight_only: activations are not quantized.
        rule: the scale rule that made the weights; activations get ``even``, whatever is written.
    """

    entries: tuple[str, ...]
    excluded: Listing
    weight_only: bool
    rule: str
    form: ClassVar[str] = "quark"
    method: ClassVar[str] = "Quark"
    listing: ClassVar[str] = "exclude"
    suffix: ClassVar[str] = ".weight"
    globs: ClassVar[bool] = False

    @classmethod
    def of(cls, raw: dict[str, Any], where: str) -> "Quark":
        """Read a ``quantization_config``.

        Raises:
            MxqError: it is not MXFP4 as Quark writes it.
        """
        exclude, scheme = names(raw.get("exclude", []), where, "exclude"), raw.get("global_quant_config")
        scheme = scheme if isinstance(scheme, dict) else {}
        weight = _mxfp4(scheme.get("weight"), f"{where}: quantization_config.global_quant_config.weight")
        if raw.get("layer_quant_config") or raw.get("layer_type_quant_config"):
            raise MxqError(f"{where}: quantization_config has settings per layer, which mxq does not read", HINT)
        inputs = scheme.get("input_tensors")
        if inputs is not None:
            _mxfp4(inputs, f"{where}: quantization_config.global_quant_config.input_tensors", is_dynamic=True)
        return cls(tuple(exclude), Listing(exclude, where), inputs is None, _rule_of(weight))

    def is_quantized(self, module: str) -> bool:
        """Tell whether vLLM takes ``module`` (a linear's name in the checkpoint, without ``.weight``) to be MXFP4."""
        block = qwen35.experts_module(module)
        if block is not None:
            name = qwen35.engine_name(block)
            return not (name in self._experts or self.excluded.matches(name))
        fused = qwen35.fused_module(module)
        if fused is not None and self.excluded.matches(qwen35.engine_name(fused)):
            return False
        return not self.excluded.matches(qwen35.engine_name(module))

    @functools.cached_property
    def _experts(self) -> frozenset[str]:
        """Blocks of routed experts of which some part is named."""
        blocks = (re.match(r"(.*\.experts)\.", name) for name in self.excluded.names)
        return frozenset(block[1] for block in blocks if block)


def _mxfp4(spec: Any, what: str, *, is_dynamic: bool = False) -> dict[str, Any]:
    """Return a specification; raise MxqError, which calls it ``what``, if it is not of MXFP4."""
    if not isinstance(spec, dict):
        raise MxqError(f"{what} is not MXFP4", HINT)
    if bool(spec.get("is_dynamic")) is not is_dynamic:
        raise MxqError(f"{what} is not {'dynamic' if is_dynamic else 'static'} MXFP4", HINT)
    wanted = {key: (value,) for key, value in _MXFP4.items()}
    for key, values in (wanted | {key: values for key, values in _IF_SAID.items() if key in spec}).items():
        if spec.get(key) not in values:
            raise MxqError(f"{what} is not MXFP4: {key} is {spec.get(key)!r:.40}, not {values[0]!r}", HINT)
    return spec


def _rule_of(weight: dict[str, Any]) -> str:
    if weight.get("observer_cls") == _DIFFS["observer_cls"]:
        return "diffs"
    return str(weight.get("scale_calculation_mode") or "even")  # as Quark takes null
