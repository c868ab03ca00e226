"""What is made of a run after it is measured: with both targets in memory, on the bf16 target's own answers."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from mxq import files
from mxq.errors import MxqError, UsageError
from mxq.evaluate.matrix import Arm, Plan, TokenizedWorkload
from mxq.evaluate.prepare import Request
from mxq.evaluate.reading import read_run
from mxq.evaluate.runner import prompt_ids
from mxq.progress import note
from mxq.workloads import ChatTemplate

if TYPE_CHECKING:
    from mxq.decode import Target
    from mxq.engines.inprocess import InProcessEngine

ROLES = ("bf16", "mxfp4")
"""The first and the second target of every comparison."""

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the answer to it."""

_MEMORY_SHARE = 0.8
"""Of the memory that is free, what both targets' weights may take; the rest is for what is computed with them."""


class After(Protocol):
    """One thing that is made; ``option`` is how the user asked for it."""

    option: ClassVar[str]

    def refuse(self, request: Request) -> None:
        """Raise UsageError for a request of which there is nothing to make."""

    def look(self, both: "Both") -> None:
        """Raise UsageError or MxqError, before anything is measured, for what :meth:`make` would refuse."""

    def make(self, both: "Both") -> None:
        """Write what the run does not hold yet; raises InterruptedRunError on Ctrl-C."""


class Both:
    """Both targets of the run of ``plan`` in ``out``, and the bf16 target's greedy answers; each got when asked for."""

    def __init__(self, plan: Plan, template: ChatTemplate, out: Path) -> None:
        self.plan, self.template, self.out = plan, template, out
        self._texts: dict[str, list[Text]] = {}

    @functools.cached_property
    def targets(self) -> "tuple[Target, Target]":
        """Load both."""
        import torch

        from mxq import decode

        settings = self.plan.settings
        note(f"loading {' and '.join(self.plan.targets[role].spec for role in ROLES)} together")
        first, second = (
            decode.load_target(
                self.plan.targets[role].path, dtype=getattr(torch, settings.dtype), device=settings.device
            )
            for role in ROLES
        )
        return first, second

    @functools.cached_property
    def _recorded(self) -> dict[tuple[str, str], Sequence[int]]:
        return {
            (cell.workload, record.prompt_id): record.token_ids
            for cell in read_run(self.out).cells
            if (cell.arm, cell.repeat) == (Arm("bf16", "ar"), 0) and self.plan.settings.sampling.greedy
            for record in cell.records
        }

    def text(self, workload: TokenizedWorkload, position: int) -> Text:
        """Return a prompt with bf16's greedy answer: the one recorded of plain decoding, or a new one.

        Positions are asked for from 0 on, since later turns are sent behind the answers to earlier ones.
        """
        from mxq import decode

        name, settings = workload.workload.name, self.plan.settings
        texts = self._texts.setdefault(name, [])
        if position == len(texts):
            said = [self.template.decode(answer) for _, answer in texts]
            ids = prompt_ids(workload, position, said, self.template.encode)
            answer = self._recorded.get((name, workload.workload.prompts[position].id))
            if answer is None:
                answer = decode.generate(
                    self.targets[0], ids, max_new_tokens=settings.max_tokens, eos_token_ids=settings.eos_token_ids
                ).token_ids
            texts.append((ids, answer))
        return texts[position]


def refuse_one_target(option: str, request: Request) -> None:
    """Raise UsageError where a target is missing."""
    for role in ROLES:
        if role not in request.targets:
            raise UsageError(f"{option} without --{role}", "it compares the two targets: give --bf16 and --mxfp4")


def refuse_too_large(option: str, engine: "InProcessEngine", plan: Plan) -> None:
    """Raise MxqError where both targets do not fit in memory together."""
    needed, free = engine.weight_bytes([plan.targets[role].path for role in ROLES]), engine.free_bytes()
    if needed > _MEMORY_SHARE * free:
        raise MxqError(
            f"{option} needs both targets in memory at once: {files.size(needed)}, and {files.size(free)} are free",
            f"use a device with more memory, or leave {option} out",
        )
