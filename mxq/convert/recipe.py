"""Recipes: YAML files that say which tensors are quantized, which are kept, and how (``recipes/README.md``)."""

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mxq.calibrate import ALGORITHMS, Calibration, check_options
from mxq.errors import UsageError
from mxq.formats.rules import RULES
from mxq.models import qwen35

FAMILIES = tuple(dict.fromkeys(qwen35.FAMILIES.values()))
SCALE_RULES = tuple(RULES)
ACTIVATIONS = ("dynamic", "none")
_SECTIONS = ("quantize", "except", "keep", "keep_if_present")
_KEYS = (
    "name",
    "description",
    "extends",
    "scale_rule",
    "activations",
    "algorithm",
    "options",
    "calibration",
    "mixed",
    "rules",
)
_CALIBRATION = ("set", "samples", "length", "seed")
_MIXED = ("budget",)
_LARGEST_BUDGET = 1e6  # a model that is kept whole has 3.8 times the bytes


@dataclass(frozen=True)
class Rule:
    """One pattern of a recipe.

    Attributes:
        pattern: a shell pattern for names without ``.weight`` and ``.bias``.
        section: ``quantize``, ``except`` (kept, whatever ``quantize`` says), ``keep`` or ``keep_if_present``; rules of
            the last may match nothing.
    """

    pattern: str
    section: str

    @property
    def quantizes(self) -> bool:
        """Whether what it matches is quantized."""
        return self.section == "quantize"

    def matches(self, name: str) -> bool:
        """Tell whether it matches a whole name."""
        # A model of many experts asks two million times: nearly every pattern is out by one of its plain parts.
        return self._plain in name and self._compiled.match(name) is not None

    @functools.cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(fnmatch.translate(self.pattern))

    @functools.cached_property
    def _plain(self) -> str:
        """The longest part of the pattern that a name must hold as it is."""
        return max(re.split(r"[*?]|\[.*", self.pattern), key=len)


@dataclass(frozen=True)
class Recipe:
    """A recipe as read, with what it extends filled in.

    Attributes:
        name, description: as in the file.
        scale_rule: that of the weights, see :mod:`mxq.formats.rules`.
        activations: ``dynamic`` (MXFP4) or ``none`` (left as they are).
        rules: family of models -> its rules, in the order of the file.
        algorithm: what chooses the codes of decoder layers' matrices by calibration text
            (:data:`mxq.calibrate.ALGORITHMS`); None where all are rounded to the nearest.
        options: of the algorithm, all of them.
        calibration: the text of the algorithm, or of a mixed recipe; None for others.
        budget: of a mixed recipe: how many times as large its output may be as with nothing kept
            (:mod:`mxq.convert.mixed`); None for others, and once what is kept has been chosen.
        chosen: what a manifest says of that choice, and no file of a recipe.
    """

    name: str
    description: str
    scale_rule: str
    activations: str
    rules: dict[str, tuple[Rule, ...]]
    algorithm: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None
    budget: float | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weight_only(self) -> bool:
        """Whether activations are left as they are."""
        return self.activations == "none"

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as a file without ``extends`` would hold it."""
        sections = {
            family: {section: [rule.pattern for rule in rules if rule.section == section] for section in _SECTIONS}
            for family, rules in self.rules.items()
        }
        for patterns in sections.values():
            if not patterns["except"]:
                del patterns["except"]
        calibrated: dict[str, Any] = {}
        if self.algorithm is not None:
            calibrated = {"algorithm": self.algorithm, "options": dict(self.options)}
        if self.calibration is not None:
            calibrated |= {"calibration": asdict(self.calibration)}
        if self.budget is not None:
            calibrated |= {"mixed": {"budget": self.budget}}
        return {
            "name": self.name,
            "description": self.description,
            "scale_rule": self.scale_rule,
            "activations": self.activations,
            **calibrated,
            "rules": sections,
        }


def directory() -> Path:
    """Return the directory of the recipes that come with mxq: in the installed package, or at a checkout's top."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def names() -> list[str]:
    """Return the names of the recipes that come with mxq."""
    return sorted(file.stem for file in directory().glob("*.yaml"))


def load(spec: str) -> Recipe:
    """Return the recipe of a name (see :func:`names`) or of a YAML file.

    Raises:
        UsageError: there is none, or it holds an unknown key, value or family.
    """
    file = Path(spec)
    if not (file.suffix in (".yaml", ".yml") or "/" in spec):
        file = directory() / f"{spec}.yaml"
        if spec not in names():
            raise UsageError(f"there is no recipe {spec!r}", _choices(spec, names()) + ", or the path of a YAML file")
    return _parse(_read(file), str(file))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"recipe {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the second: not UTF-8, no such date or number
        reason = " ".join(str(error).split())
        raise UsageError(f"recipe {file} is not valid YAML: {reason}") from None
    if not isinstance(content, dict):
        raise UsageError(f"recipe {file} is not a table of keys", f"the keys are {', '.join(_KEYS)}")
    _check_keys(content, _KEYS, str(file))
    base = content.pop("extends", None)
    if base is None:
        return content
    if base not in names():
        raise UsageError(f"recipe {file} extends {base!r}", _choices(base, names()))
    parent = _read(directory() / f"{base}.yaml")
    rules = _table(parent.get("rules"), "rules", str(file)) | _table(content.get("rules", {}), "rules", str(file))
    return parent | content | {"rules": rules}


def _parse(content: dict[str, Any], where: str) -> Recipe:
    for key in ("name", "description", "scale_rule", "activations"):
        if not isinstance(content.get(key), str):
            raise UsageError(f"recipe {where}: {key} is missing or not a text")
    for key, known in (("scale_rule", SCALE_RULES), ("activations", ACTIVATIONS)):
        if content[key] not in known:
            raise UsageError(f"recipe {where}: {key} is {content[key]!r}", _choices(content[key], known))
    return Recipe(
        content["name"],
        content["description"],
        content["scale_rule"],
        content["activations"],
        _rules(content, where),
        *_calibrated(content, where),
        budget=_budget(content, where),
    )


def _rules(content: dict[str, Any], where: str) -> dict[str, tuple[Rule, ...]]:
    families = _table(content.get("rules"), "rules", where)
    _check_keys(families, FAMILIES, f"{where}, rules")
    rules: dict[str, tuple[Rule, ...]] = {}
    for family, sections in families.items():
        here = f"{where}, rules.{family}"
        sections = _table(sections, f"rules.{family}", where)
        _check_keys(sections, _SECTIONS, here)
        for section, patterns in sections.items():
            if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
                raise UsageError(f"recipe {here}: {section} is not a list of patterns")
        rules[family] = tuple(Rule(pattern, section) for section in _SECTIONS for pattern in sections.get(section, []))
    return rules


def _calibrated(content: dict[str, Any], where: str) -> tuple[str | None, dict[str, Any], Calibration | None]:
    """Read ``algorithm``, ``options`` and ``calibration``, whose text a mixed recipe has without an algorithm."""
    algorithm, mixed = content.get("algorithm"), content.get("mixed")
    if algorithm is None:
        for key in ("options", "calibration") if mixed is None else ("options",):
            if content.get(key) is not None:
                raise UsageError(
                    f"recipe {where}: {key} is for an algorithm, and there is none",
                    f"add algorithm: {' or '.join(ALGORITHMS)}, or remove it",
                )
        return None, {}, None if mixed is None else _calibration(content, where)
    if mixed is not None:
        raise UsageError(f"recipe {where}: algorithm and mixed do not go together", "leave one out")
    if algorithm not in ALGORITHMS:
        raise UsageError(f"recipe {where}: algorithm is {algorithm!r}", _choices(algorithm, ALGORITHMS))
    if content["scale_rule"] != "even":
        raise UsageError(f"recipe {where}: {algorithm} takes scale_rule even, not {content['scale_rule']}", "change it")
    given = content.get("options")
    options = check_options(algorithm, {} if given is None else _table(given, "options", where), f"recipe {where}")
    return algorithm, options, _calibration(content, where)


def _calibration(content: dict[str, Any], where: str) -> Calibration:
    section = _table(content.get("calibration"), "calibration", where)
    here = f"{where}, calibration"
    _check_keys(section, _CALIBRATION, here)
    chosen = section.get("set")
    if chosen is not None and not (isinstance(chosen, str) and chosen):
        raise UsageError(f"recipe {here}: set is neither a workload nor a file", "give a name, or null for none")
    for key, least in (("samples", 1), ("length", 1), ("seed", 0)):
        if type(section.get(key)) is not int or section[key] < least:
            raise UsageError(f"recipe {here}: {key} is {section.get(key)!r:.40}", f"give a number, at least {least}")
    return Calibration(chosen, section["samples"], section["length"], section["seed"])


def _budget(content: dict[str, Any], where: str) -> float | None:
    if content.get("mixed") is None:
        return None
    section = _table(content["mixed"], "mixed", where)
    _check_keys(section, _MIXED, f"{where}, mixed")
    budget = section.get("budget")
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < _LARGEST_BUDGET:
        raise UsageError(
            f"recipe {where}, mixed: budget is {budget!r:.40}", "give how many times as large the output may be: 1.1"
        )
    return float(budget)


def _table(value: Any, key: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"recipe {where}: {key} is missing or not a table")
    return value


def _check_keys(table: dict[str, Any], known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise UsageError(f"recipe {where}: unknown key {key!r}", _choices(str(key), known))


def _choices(given: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
