"""``quantization_config`` in the form of compressed-tensors 0.19, as llm-compressor 0.14 writes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from mxq.checkpoint.matching import HINT, Listing, names
from mxq.errors import MxqError
from mxq.models import qwen35

FORMAT = "mxfp4-pack-quantized"
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
_EXPERT_CLASSES = ("RoutedExperts", "FusedMoE")  # vLLM's, which targets may name as they name Linear


def compressed_tensors_config(ignore: Iterable[str], *, weight_only: bool) -> dict[str, Any]:
    """Return a ``quantization_config`` as compressed-tensors 0.19 writes it.

    It has no place for the rule that made the scales.

    Args:
        ignore: from :func:`mxq.checkpoint.quantization.exclude_entries`.
        weight_only: activations are left as they are.
    """
    spec = _MXFP4 | {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": None,
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "zp_dtype": None,
    }
    return {
        "config_groups": {
            "group_0": {
                "format": FORMAT,
                "input_activations": None if weight_only else spec | {"dynamic": True},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": spec,
            }
        },
        "format": FORMAT,
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "transform_config": {},
        "version": "0.19.0",
    }


@dataclass(frozen=True)
class CompressedTensors:
    """What a config in the form of compressed-tensors says.

    Attributes:
        entries: ``ignore``, as in config.json.
        ignored: what is left as it was.
        targeted: what is quantized, if it is not ignored: names, patterns and classes.
        inputs: how the activations of each group are quantized, as in config.json.
    """

    entries: tuple[str, ...]
    ignored: Listing
    targeted: Listing
    inputs: tuple[Any, ...]
    rule: ClassVar[str | None] = None
    form: ClassVar[str] = "compressed-tensors"
    method: ClassVar[str] = "compressed-tensors"
    listing: ClassVar[str] = "ignore"
    suffix: ClassVar[str] = ".weight_packed"
    globs: ClassVar[bool] = False

    @classmethod
    def of(cls, raw: dict[str, Any], where: str) -> "CompressedTensors":
        """Read a ``quantization_config``.

        Raises:
            MxqError: its weights are not MXFP4, or not all of them.
        """
        groups, ignore = raw.get("config_groups"), raw.get("ignore") or []
        if not isinstance(groups, dict) or not groups:
            raise MxqError(f"{where}: quantization_config has no config_groups", HINT)
        targets: list[str] = []
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, dict) else None
            wrong = _not_mxfp4(weights)
            if wrong is not None:
                raise MxqError(f"{where}: {name} of quantization_config is not MXFP4: of its weights {wrong}", HINT)
            form = group.get("format") or raw.get("format")
            if form != FORMAT:
                raise MxqError(
                    f"{where}: quantization_config has the format {form!r}; engines take MXFP4 to be {FORMAT}",
                    "export it again with a newer version of the tool that wrote it",
                )
            targets += names(group.get("targets"), where, f"targets of {name}")
        entries = names(ignore, where, "ignore")
        inputs = tuple(group.get("input_activations") for group in groups.values())
        return cls(tuple(entries), Listing(entries, where), Listing(targets, where), inputs)

    @property
    def weight_only(self) -> bool:
        """Activations are not quantized."""
        return not any(self.inputs)

    def check_activations(self, where: str) -> None:
        """Raise MxqError for activations that are neither left alone nor quantized to dynamic MXFP4, all alike."""
        for inputs in () if self.weight_only else self.inputs:
            if _not_mxfp4(inputs) is not None or inputs.get("dynamic") is not True:
                what = "input_activations of quantization_config are not dynamic MXFP4, or not for all"
                raise MxqError(f"{where}: {what}", HINT)

    def is_quantized(self, module: str) -> bool:
        """Tell whether vLLM takes ``module`` (a linear's name in the checkpoint, without ``.weight``) to be MXFP4."""
        block = qwen35.experts_module(module)
        if block is not None:  # vLLM asks for those of the first expert, and for all of them
            projection = module.rpartition(".")[2]
            module = f"{block}.0.{'gate_proj' if projection == 'gate_up_proj' else projection}"
        fused, name = qwen35.fused_module(module), qwen35.engine_name(module)
        whole = None if fused is None else qwen35.engine_name(fused)
        if self.ignored.matches(name) or (whole is not None and self.ignored.matches(whole)):
            return False
        kinds = {"Linear"} if block is None else {"Linear", *_EXPERT_CLASSES}
        by_class = bool(kinds & self.targeted.names)
        return by_class or self.targeted.matches(name) or (whole is not None and self.targeted.matches(whole))


def _not_mxfp4(spec: Any) -> str | None:
    """Return in words by what a specification is not MXFP4, None if it is."""
    found = spec if isinstance(spec, dict) else {}
    wrong = (key for key, value in _MXFP4.items() if found.get(key) != value)
    return next((f"{key} is {found.get(key)!r:.40}, not {_MXFP4[key]!r}" for key in wrong), None)
