"""A small plan and an engine without models, for tests of what happens around decoding."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxq.engines import Completion, Decoder, EngineArm, Sampling
from mxq.evaluate import Plan, Settings
from mxq.evaluate.matrix import Model, TokenizedWorkload, arms
from mxq.workloads import Prompt, Workload


def small_plan(*, prompts: int = 3, budgets: Sequence[int] = (3, 7), names: Sequence[str] = ("sums", "talk")) -> Plan:
    """Two targets x (ar, dflash at two budgets) x two workloads of a few prompts."""
    workloads = []
    for name in names:
        kept = tuple(Prompt(f"{name}-{i}", (("user", f"{name} {i}"),)) for i in range(prompts))
        ids = tuple(tuple(f"{name} {i}".encode()) for i in range(prompts))
        workloads.append(TokenizedWorkload(Workload(name, kept, f"sha of {name}"), ids))
    return Plan(
        targets={role: Model(f"models/{role}", Path(f"/models/{role}"), {"config_sha256": role}) for role in TARGETS},
        drafter=Model("models/drafter", Path("/models/drafter"), {"config_sha256": "drafter"}),
        arms=arms(TARGETS, ["dflash"], budgets),
        workloads=tuple(workloads),
        warm_ups=(WARM_UP,),
        settings=Settings(
            sampling=Sampling(),
            max_tokens=64,
            thinking=False,
            template_sha256="template",
            eos_token_ids=(0,),
            dtype="bfloat16",
            device="cpu",
            engine="scripted",
            semantics=1,
        ),
    )


TARGETS = ("bf16", "mxfp4")
WARM_UP = (1, 2, 3)


@dataclass
class ScriptedEngine:
    """Answers every prompt at once, with counts drawn from a seed; ``before`` is called ahead of each request.

    ``calls`` holds (target, method, K, prompt ids) of every request, warm-up included.
    """

    together: bool = True
    before: Callable[[int], None] = lambda call: None
    counts: Callable[[EngineArm, random.Random], tuple[int, ...]] | None = None
    calls: list[tuple[str, str, int, tuple[int, ...]]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    opened: list[list[EngineArm]] = field(default_factory=list)
    name = "scripted"
    semantics = 1

    def facts(self) -> dict[str, Any]:
        return {"device_name": "none", "mxfp4": "native"}

    def groups(self, arms: Sequence[EngineArm]) -> list[list[EngineArm]]:
        if self.together:
            return [list(arms)]
        targets = dict.fromkeys(arm.target for arm in arms)
        return [[arm for arm in arms if arm.target == target] for target in targets]

    @contextlib.contextmanager
    def open(self, arms: Sequence[EngineArm]) -> Iterator[list[Decoder]]:
        self.opened.append(list(arms))
        yield [_ScriptedArm(self, arm) for arm in arms]


@dataclass
class _ScriptedArm:
    engine: ScriptedEngine
    arm: EngineArm

    def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, seed: int) -> Completion:
        engine, arm, k = self.engine, self.arm, self.arm.num_speculative_tokens
        engine.before(len(engine.calls))
        engine.calls.append((arm.target.name, arm.method, k, tuple(prompt_ids)))
        engine.seeds.append(seed)
        rng = random.Random(f"{arm.target.name}/{k}/{bytes(prompt_ids)!r}")
        if engine.counts:
            accepted = engine.counts(arm, rng)
        else:
            accepted = tuple(rng.randint(0, k) for _ in range(4)) if k else ()
        count = 1 + sum(accepted) + len(accepted) if k else 12
        # The text depends on the prompt alone, so that arms agree as far as their answers reach.
        words = random.Random(bytes(prompt_ids))
        return Completion(
            token_ids=tuple(words.randint(1, 99) for _ in range(count)),
            accepted=accepted,
            drafted=(k,) * len(accepted),
            finish_reason="length",
            ttft_s=0.01,
            duration_s=count / (100 + 10 * k),
            target_s=0.01,
            draft_s=0.0,
        )


def decode(token_ids: Sequence[int]) -> str:
    """Stand in for a tokenizer."""
    return " ".join(map(str, token_ids))
