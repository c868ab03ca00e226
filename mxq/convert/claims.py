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
from typing import Any, ClassVar, Protocol

from mxq.checkpoint import QuantizationConfig
from mxq.errors import MxqError
from mxq.models import qwen35

CT_FORMAT = "mxfp4-pack-quantized"
_CT_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
_EXPERT_CLASSES = ("RoutedExperts", "FusedMoE")  # vLLM's, which targets may name as they name Linear
_AUTOROUND = {"bits": 4, "data_type": "mx_fp", "group_size": 32, "packing_format": "auto_round:llm_compressor"}
_SPECIAL = set("*+?^$()[]{}|\\")
_HINT = "mxq judges MXFP4 (fp4, groups of 32, e8m0 scales) as Quark, compressed-tensors and AutoRound write it"


class Claims(Protocol):
    """What a quantization_config says."""

    @property
    def entries(self) -> tuple[str, ...]:
        """What it names, as in config.json."""

    @property
    def rule(self) -> str | None:
        """The scale rule that it says made the weights, None if it says none."""

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


def claims_of(config: dict[str, Any], where: str) -> Claims | None:
    """Read the ``quantization_config`` of a config.json; None if it has none.

    Raises:
        MxqError: it is not MXFP4 in one of the three forms.
    """
    raw = config.get("quantization_config")
    if raw is None:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else raw
    if method == "quark":
        quark = QuantizationConfig.of(config, where)
        assert quark is not None
        return Quark(quark)
    if method == "compressed-tensors":
        return CompressedTensors.of(raw, where)
    if method in ("auto-round", "auto_round"):
        return AutoRound.of(raw, where)
    raise MxqError(f"{where} is quantized with {method!r}, which mxq does not read", _HINT)


@dataclass(frozen=True)
class Quark:
    """Claims of a config in Quark's form."""

    config: QuantizationConfig
    method: ClassVar[str] = "Quark"
    listing: ClassVar[str] = "exclude"
    suffix: ClassVar[str] = ".weight"
    globs: ClassVar[bool] = False

    @property
    def entries(self) -> tuple[str, ...]:
        """``exclude``."""
        return self.config.exclude

    @property
    def rule(self) -> str | None:
        """``scale_calculation_mode``."""
        return self.config.rule

    def is_quantized(self, module: str) -> bool:
        """As :meth:`mxq.checkpoint.QuantizationConfig.is_quantized`."""
        return self.config.is_quantized(module)


@dataclass(frozen=True)
class CompressedTensors:
    """Claims of a config in the form of compressed-tensors."""

    entries: tuple[str, ...]
    ignored: "_Listing"
    targeted: "_Listing"
    rule: ClassVar[str | None] = None
    method: ClassVar[str] = "compressed-tensors"
    listing: ClassVar[str] = "ignore"
    suffix: ClassVar[str] = ".weight_packed"
    globs: ClassVar[bool] = False

    @classmethod
    def of(cls, raw: dict[str, Any], where: str) -> "CompressedTensors":
        """Read it.

        Raises:
            MxqError: it is not MXFP4, or not for all.
        """
        groups, ignore = raw.get("config_groups"), raw.get("ignore") or []
        if not isinstance(groups, dict) or not groups:
            raise MxqError(f"{where}: quantization_config has no config_groups", _HINT)
        targets: list[str] = []
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, dict) else None
            wrong = next((key for key, value in _CT_WEIGHTS.items() if _get(weights, key) != value), None)
            if wrong is not None:
                raise MxqError(f"{where}: {name} of quantization_config is not MXFP4: {wrong} of its weights", _HINT)
            form = group.get("format") or raw.get("format")
            if form != CT_FORMAT:
                raise MxqError(
                    f"{where}: quantization_config has the format {form!r}; engines take MXFP4 to be {CT_FORMAT}",
                    "export it again with a newer version of the tool that wrote it",
                )
            targets += _names(group.get("targets"), where, f"targets of {name}")
        entries = _names(ignore, where, "ignore")
        return cls(tuple(entries), _Listing(entries, where), _Listing(targets, where))

    def is_quantized(self, module: str) -> bool:
        """Tell whether vLLM takes a module of the checkpoint to be MXFP4."""
        block = qwen35.experts_module(module)
        if block is not None:  # vLLM asks for those of the first expert, and for all of them
            module = f"{block}.0.{module.rpartition('.')[2]}"
        fused, name = qwen35.fused_module(module), qwen35.engine_name(module)
        if self.ignored.matches(name) or (fused is not None and qwen35.engine_name(fused) in self.ignored.names):
            return False
        kinds = {"Linear"} if block is None else {"Linear", *_EXPERT_CLASSES}
        whole = fused is not None and self.targeted.matches(qwen35.engine_name(fused))
        return bool(kinds & self.targeted.names) or whole or self.targeted.matches(name)


@dataclass(frozen=True)
class AutoRound:
    """Claims of a config in AutoRound's own form."""

    bits: dict[str, int]
    patterns: dict[re.Pattern[str], int]
    blocks: tuple[str, ...]
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
                raise MxqError(f"{where}: quantization_config has {key} {raw.get(key)!r}, not {value!r}", _HINT)
        extra, blocks = raw.get("extra_config") or {}, raw.get("block_name_to_quantize") or []
        if not isinstance(extra, dict) or not all(isinstance(entry, dict) for entry in extra.values()):
            raise MxqError(f"{where}: quantization_config.extra_config is not a table of layers", _HINT)
        blocks = blocks.split(",") if isinstance(blocks, str) else _names(blocks, where, "block_name_to_quantize")
        bits = {qwen35.engine_name(key): entry.get("bits", 4) for key, entry in extra.items()}
        if not all(isinstance(value, int) for value in bits.values()):
            raise MxqError(f"{where}: quantization_config.extra_config gives bits that are no number", _HINT)
        patterns = {_compiled(key, where): value for key, value in bits.items() if set(key) & _SPECIAL}
        return cls(bits, patterns, tuple(qwen35.engine_name(block) for block in blocks))

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


def _get(table: Any, key: str) -> Any:
    return table.get(key) if isinstance(table, dict) else None


def _names(value: Any, where: str, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise MxqError(f"{where}: quantization_config.{what} is not a list of names", _HINT)
    return value


class _Listing:
    """Entries that are exact names or, behind ``re:``, patterns that match from a name's start."""

    def __init__(self, entries: list[str], where: str) -> None:
        self.names = frozenset(qwen35.engine_name(entry) for entry in entries if not entry.startswith("re:"))
        self._patterns = [_compiled(entry[3:], where) for entry in entries if entry.startswith("re:")]

    def matches(self, engine_name: str) -> bool:
        """Tell whether an entry means the module that vLLM calls so."""
        return engine_name in self.names or any(pattern.match(engine_name) for pattern in self._patterns)


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise MxqError(f"{where}: {pattern!r} is not a regular expression: {error}", _HINT) from None
