"""What a ``quantization_config`` says of each module, by vLLM's rules: Quark's, compressed-tensors' and AutoRound's.

All three look a linear up under vLLM's own name for it, and what vLLM merges by its parts (vLLM 0.32:
``quantization/quark/utils.py``, ``compressed_tensors/utils.py``, and ``inc/config_parser.py`` for AutoRound)::

    quark               exclude       exact names and re: patterns; a block of routed experts by its name and its parts
    compressed-tensors  ignore        the same, but a block of experts only by its expert 0
    auto-round          extra_config  exact names, and keys with special characters as patterns that match anywhere

Globs match nothing in the first two. In the files, a packed weight is ``X.weight`` for Quark and ``X.weight_packed``
for the others, and ``X.weight_scale`` for all.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from mxq.checkpoint.matching import HINT, compiled, names
from mxq.checkpoint.quantization import Claims, claims_in_form
from mxq.errors import MxqError
from mxq.models import qwen35

_AUTOROUND = {"bits": 4, "data_type": "mx_fp", "group_size": 32, "packing_format": "auto_round:llm_compressor"}
_SPECIAL = set("*+?^$()[]{}|\\")


def claims_of(config: dict[str, Any], where: str) -> Claims | None:
    """Read the ``quantization_config`` of a config.json; None if it has none.

    Raises:
        MxqError: it is not MXFP4 in one of the three forms.
    """
    raw = config.get("quantization_config")
    if isinstance(raw, dict) and raw.get("quant_method") in ("auto-round", "auto_round"):
        return AutoRound.of(raw, where)
    return claims_in_form(config, where)


@dataclass(frozen=True)
class AutoRound:
    """Claims of a config in AutoRound's own form."""

    bits: dict[str, int]
    patterns: dict[re.Pattern[str], int]
    blocks: tuple[str, ...]
    weight_only: bool
    rule: ClassVar[str | None] = None
    method: ClassVar[str] = "AutoRound"
    listing: ClassVar[str] = "extra_config"
    suffix: ClassVar[str] = ".weight_packed"
    globs: ClassVar[bool] = True

    @classmethod
    def of(cls, raw: dict[str, Any], where: str) -> "AutoRound":
        """Read it.

        Raises:
            MxqError: it is not MXFP4.
        """
        for key, value in _AUTOROUND.items():
            if raw.get(key) != value:
                raise MxqError(f"{where}: quantization_config has {key} {raw.get(key)!r}, not {value!r}", HINT)
        extra, blocks = raw.get("extra_config") or {}, raw.get("block_name_to_quantize") or []
        if not isinstance(extra, dict) or not all(isinstance(entry, dict) for entry in extra.values()):
            raise MxqError(f"{where}: quantization_config.extra_config is not a table of layers", HINT)
        blocks = blocks.split(",") if isinstance(blocks, str) else names(blocks, where, "block_name_to_quantize")
        bits = {qwen35.engine_name(key): entry.get("bits", 4) for key, entry in extra.items()}
        if not all(isinstance(value, int) for value in bits.values()):
            raise MxqError(f"{where}: quantization_config.extra_config gives bits that are no number", HINT)
        patterns = {compiled(key, where): value for key, value in bits.items() if set(key) & _SPECIAL}
        act_bits = raw.get("act_bits")
        weight_only = not isinstance(act_bits, int) or act_bits >= 16
        return cls(bits, patterns, tuple(qwen35.engine_name(block) for block in blocks), weight_only)

    @property
    def entries(self) -> tuple[str, ...]:
        """The keys of ``extra_config``, by vLLM's names."""
        return tuple(self.bits)

    def is_quantized(self, module: str) -> bool:
        """Tell whether vLLM takes a module of the checkpoint to be MXFP4."""
        block, fused = qwen35.experts_module(module), qwen35.fused_module(module)
        name = qwen35.engine_name(block or module)
        if fused is not None:
            whole = qwen35.engine_name(fused)
            prefix, _, last = whole.rpartition(".")
            if whole in self.bits or not any(self._set(f"{prefix}.{part}") for part in qwen35.FUSED[last]):
                name = whole
        default = not name.endswith("lm_head") and (not self.blocks or name.startswith(self.blocks))
        parts = [] if block is None else [key for key in self.bits if key.startswith(name)]
        bits = self._set(parts[0] if parts else name)
        return default if bits is None else bits < 16

    def _set(self, name: str) -> int | None:
        """Return the bits that extra_config gives a name of vLLM's, None if it gives none."""
        if name in self.bits:
            return self.bits[name]
        return next((bits for pattern, bits in self.patterns.items() if pattern.search(name)), None)
