"""What is measured: arms (target x method x budget), cells (arm x workload x concurrency x repeat), a cell's key."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxq import files
from mxq.engines import EngineArm, Method, Sampling
from mxq.workloads import Workload

METHODS: tuple[Method, ...] = ("ar", "mtp", "dflash")

VLLM = "vllm"
"""The engine whose cells are measured by requests side by side, see :mod:`mxq.evaluate.servers`."""

Place = tuple["Arm", str, int, int]
"""Where a cell is in its run: arm, name of the workload, concurrency, repeat."""


@dataclass(frozen=True)
class Arm:
    """One target ("bf16" or "mxfp4"), one method, one budget K (0 for plain decoding)."""

    target: str
    method: Method
    num_speculative_tokens: int = 0

    @property
    def label(self) -> str:
        """Return what tables call the arm, such as ``mxfp4 dflash-15``."""
        return f"{self.target} {self.configuration}"

    @property
    def configuration(self) -> str:
        """Return method and budget, such as ``dflash-15``: what the two targets' arms have in common."""
        return self.method if self.method == "ar" else f"{self.method}-{self.num_speculative_tokens}"


@dataclass(frozen=True)
class Model:
    """A target or a drafter: as the user named it, where it is, and the fingerprint of its files."""

    spec: str
    path: Path
    fingerprint: Mapping[str, Any]


@dataclass(frozen=True)
class TokenizedWorkload:
    """A workload with every prompt as token ids, the same ones for all targets.

    None for a later turn of a conversation: what is sent there depends on what the arm has answered before.
    """

    workload: Workload
    token_ids: tuple[tuple[int, ...] | None, ...]

    @property
    def tokens_sha256(self) -> str:
        """Return the hash of the token ids: what the models see, after template and tokenizer."""
        return files.sha256_text(json.dumps(self.token_ids, separators=(",", ":")))


@dataclass(frozen=True)
class Settings:
    """What all cells of a run share. ``engine`` and ``semantics`` say whose decoding the records are.

    ``engine_args`` and ``engine_env`` are what the user set beside what mxq does, as ``name=value``.
    """

    sampling: Sampling
    max_tokens: int
    thinking: bool
    template_sha256: str
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    engine: str
    semantics: int
    engine_args: tuple[str, ...] = ()
    engine_env: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One arm on one workload, with ``concurrency`` requests in flight, for the ``repeat``-th time (from 0).

    ``key`` names its directory: readable front, hash of ``definition`` at the end.
    """

    arm: Arm
    workload: str
    concurrency: int
    repeat: int
    definition: Mapping[str, Any]

    @property
    def place(self) -> Place:
        """Return where the cell is in its run."""
        return self.arm, self.workload, self.concurrency, self.repeat

    @property
    def key(self) -> str:
        """Return the directory name; equal definitions, and only those, have equal keys."""
        digest = files.sha256_text(json.dumps(self.definition, sort_keys=True, separators=(",", ":")))
        front = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.arm.target}-{self.arm.configuration}-{self.workload}")
        return f"{front[:60]}-c{self.concurrency}-r{self.repeat}-{digest[:16]}"


@dataclass(frozen=True)
class Plan:
    """A whole run, checked and ready: everything is decided, nothing is written yet."""

    targets: Mapping[str, Model]
    drafter: Model | None
    arms: tuple[Arm, ...]
    workloads: tuple[TokenizedWorkload, ...]
    warm_ups: tuple[tuple[int, ...], ...]
    """Prompts that none of the workloads has, at least as many as requests are in flight at once."""
    settings: Settings
    concurrencies: tuple[int, ...] = (1,)
    """Requests in flight, ascending. Acceptance and speed are only comparable at equal concurrency."""
    repeats: int = 1
    warnings: tuple[str, ...] = ()
    """What is doubtful about the models; kept with the run, and no part of what it is."""
    architecture: Mapping[str, Any] = field(default_factory=dict)
    """Dimensions of the targets, by which published numbers of their model are found; kept likewise."""

    def engine_arm(self, arm: Arm) -> EngineArm:
        """Return the arm as an engine takes it."""
        drafter = self.drafter.path if arm.method == "dflash" and self.drafter else None
        return EngineArm(self.targets[arm.target].path, arm.method, arm.num_speculative_tokens, drafter)

    def cell(self, arm: Arm, workload: TokenizedWorkload, concurrency: int = 1, repeat: int = 0) -> Cell:
        """Return the cell of an arm and a workload."""
        definition = {
            "target": self.targets[arm.target].fingerprint,
            "method": arm.method,
            "num_speculative_tokens": arm.num_speculative_tokens,
            "drafter": self.drafter.fingerprint if arm.method == "dflash" and self.drafter else None,
            "workload": _workload_facts(workload),
            "concurrency": concurrency,
            "repeat": repeat,
            **_settings_facts(self.settings),
        }
        return Cell(arm, workload.workload.name, concurrency, repeat, definition)

    def cells(self) -> list[Cell]:
        """Return every cell: repeat by repeat, workload by workload, at every concurrency."""
        return [
            self.cell(arm, workload, concurrency, repeat)
            for repeat in range(self.repeats)
            for workload in self.workloads
            for concurrency in self.concurrencies
            for arm in self.arms
        ]

    def definition(self) -> dict[str, Any]:
        """Return what makes a run this run: two runs that differ in it must not share a directory."""
        return {
            "targets": {role: _model_facts(model) for role, model in self.targets.items()},
            "drafter": _model_facts(self.drafter) if self.drafter else None,
            "arms": [asdict(arm) for arm in self.arms],
            "workloads": [_workload_facts(workload) for workload in self.workloads],
            "concurrency": list(self.concurrencies),
            "repeats": self.repeats,
            **_settings_facts(self.settings),
        }


def arms(targets: Sequence[str], methods: Sequence[str], budgets: Sequence[int]) -> tuple[Arm, ...]:
    """Return every target x method x budget, each target's plain arm first: it is the baseline of the others."""
    found = []
    for target in targets:
        found.append(Arm(target, "ar"))
        for method in METHODS:
            if method in methods and method != "ar":
                found += [Arm(target, method, budget) for budget in sorted(set(budgets))]
    return tuple(found)


def _model_facts(model: Model) -> dict[str, Any]:
    return {"spec": model.spec, "fingerprint": dict(model.fingerprint)}


def _workload_facts(workload: TokenizedWorkload) -> dict[str, Any]:
    prompts, conversations = len(workload.workload.prompts), workload.workload.conversations
    return {
        "name": workload.workload.name,
        "prompts": prompts,
        **({"conversations": conversations} if conversations < prompts else {}),
        "sha256": workload.workload.sha256,
        "tokens_sha256": workload.tokens_sha256,
    }


def _settings_facts(settings: Settings) -> dict[str, Any]:
    facts = asdict(settings)
    return facts | {name: list(facts[name]) for name in ("eos_token_ids", "engine_args", "engine_env")}
