"""Explaining a run: both targets and their drafters over the bf16 target's own answers.

Drafts are made behind every ``every``-th token of each answer and not where the passes of decoding begin. A pass begins
where the one before it ended, so that these places depend on the drafter and on the target; all four corners could not
have the same ones, and most tokens of an answer would never be asked about. Of the n-th prompt, the first place is
token n modulo ``every``: over the prompts, each token of an answer is equally likely to be one.
"""

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mxq import decode, files
from mxq.decode.factorial import factorial
from mxq.decode.forced import force
from mxq.engines import Method
from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.evaluate import Arm, Plan, Request, Run, read_run, run
from mxq.evaluate.directory import hold
from mxq.evaluate.inprocess import prepared
from mxq.evaluate.matrix import TokenizedWorkload
from mxq.evaluate.runner import prompt_ids
from mxq.explain.record import EDGES, Drift, ExplainedPrompt, Explanation, define, path_of, read, write
from mxq.progress import note, progress
from mxq.stats import Passes
from mxq.workloads import ChatTemplate

if TYPE_CHECKING:
    from mxq.engines.inprocess import InProcessEngine

ROLES = ("bf16", "mxfp4")
"""The first and the second target of every corner."""

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the answer to it."""

_MEMORY_SHARE = 0.8
"""Of the memory that is free, what both targets' weights may take; the rest is for what is computed with them."""


def measure_and_explain(request: Request, out: Path, *, every: int) -> Run:
    """Measure what ``out`` does not hold yet of ``request``, then explain it; return the run.

    Raises what :func:`mxq.evaluate.measure` does, and, before anything is measured, UsageError where there is nothing
    to explain (a target is missing, or all decoding is plain) and where a file was made with another ``every``.
    """
    for role in ROLES:
        if role not in request.targets:
            raise UsageError(f"--explain without --{role}", "it compares the two targets: give --bf16 and --mxfp4")
    if not any(method != "ar" for method in request.methods):
        raise UsageError("--explain with --spec ar alone", "it is about drafts: give --spec mtp or --spec dflash")
    if every < 1:
        raise UsageError(f"--explain-every {every}", "it is at least 1: behind every token of an answer")
    plan, template, engine = prepared(request)
    _refuse_too_large(engine, [plan.targets[role].path for role in ROLES])
    if (out / "run.json").exists():
        _pending(plan, out, every)  # refuse before hours of measuring what is refused after
    run(plan, out, engine, template.decode, template.encode)
    explain(plan, template, out, every=every)
    return read_run(out)


def explain(plan: Plan, template: ChatTemplate, out: Path, *, every: int) -> None:
    """Write what ``out``, the directory of a run of ``plan``, does not explain yet.

    Raises UsageError where a file was made with another ``every``, InterruptedRunError on Ctrl-C: files that are there
    stay, and the same call makes the others.
    """
    with hold(out):
        pending = _pending(plan, out, every)
        if not pending:
            return
        note(f"loading {plan.targets['bf16'].spec}, {plan.targets['mxfp4'].spec} to explain what changed")
        work = _Work(plan, template, out, every)
        total = sum(len(workload.token_ids) for _, workload in pending)
        done = 0
        try:
            with progress("explaining", total, "prompts") as advance:
                for arm, workload in pending:
                    started, prompts = time.perf_counter(), []
                    for prompt in work.explained(arm, workload):
                        prompts.append(prompt)
                        advance(1, f"explaining {arm.configuration}, {workload.workload.name}")
                    write(out, work.explanation(arm, workload, prompts, time.perf_counter() - started))
                    done += 1
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"interrupted; {done} of {len(pending)} parts of the explanation were made",
                "run the same command again to continue",
            ) from None


def _refuse_too_large(engine: "InProcessEngine", targets: Sequence[Path]) -> None:
    needed, free = engine.weight_bytes(targets), engine.free_bytes()
    if needed > _MEMORY_SHARE * free:
        raise MxqError(
            f"--explain needs both targets in memory at once: {files.size(needed)}, and {files.size(free)} are free",
            "use a device with more memory, or leave --explain out",
        )


def _pending(plan: Plan, out: Path, every: int) -> list[tuple[Arm, TokenizedWorkload]]:
    """Return what is to be made, by its bf16 arm: the largest budget of each method, on every workload."""
    largest: dict[str, Arm] = {}
    for arm in plan.arms:
        if arm.target == "bf16" and arm.method != "ar":
            best = largest.setdefault(arm.method, arm)
            largest[arm.method] = max(best, arm, key=lambda one: one.num_speculative_tokens)
    pending = []
    definition = json.loads(json.dumps(plan.definition()))  # as run.json gives it back
    for workload in plan.workloads:
        for arm in largest.values():
            path = path_of(out, arm.method, arm.num_speculative_tokens, workload.workload.name)
            if not path.exists():
                pending.append((arm, workload))
            elif (other := read(path, definition).every) != every:
                raise UsageError(
                    f"{path} was made with --explain-every {other}, not {every}", "give that, or remove the file"
                )
    return pending


class _Work:
    """Targets and drafters, loaded once, and the bf16 target's answers."""

    def __init__(self, plan: Plan, template: ChatTemplate, out: Path, every: int) -> None:
        self._plan = plan
        self._template = template
        self._every = every
        settings = plan.settings
        dtype = getattr(torch, settings.dtype)
        first, second = (
            decode.load_target(plan.targets[role].path, dtype=dtype, device=settings.device) for role in ROLES
        )
        self._targets = first, second
        self._drafters: dict[Method, tuple[decode.Drafter, decode.Drafter]] = {}
        self._texts: dict[str, list[Text]] = {}
        recorded = read_run(out)
        self._definition = recorded.info["definition"]
        self._recorded = {
            (cell.workload, record.prompt_id): record.token_ids
            for cell in recorded.cells
            if (cell.arm, cell.repeat) == (Arm("bf16", "ar"), 0) and settings.sampling.greedy
            for record in cell.records
        }

    def explained(self, arm: Arm, workload: TokenizedWorkload) -> Iterator[ExplainedPrompt]:
        """Yield each prompt of a workload, explained for the method and budget of ``arm``."""
        drafters = self._drafters_of(arm.method)
        conversation = ""
        for number, prompt in enumerate(workload.workload.prompts):
            ids, answer = self._text(workload, number)
            conversation = prompt.id if prompt.turn == 1 else conversation
            forced = force(self._targets, ids, answer, drafters[0].taps)
            places = range(number % self._every, len(answer) - 1, self._every)
            one, two, three, four = factorial(
                self._targets,
                drafters,
                forced,
                ids,
                answer,
                num_speculative_tokens=arm.num_speculative_tokens,
                places=places,
                eos_token_ids=self._plan.settings.eos_token_ids,
            )
            corners = tuple(Passes(tuple(c.accepted), tuple(c.drafted)) for c in (one, two, three, four))
            yield ExplainedPrompt(
                prompt_id=prompt.id,
                conversation=conversation,
                answer_tokens=len(answer),
                places=tuple(places),
                corners=(corners[0], corners[1], corners[2], corners[3]),
                divergence=tuple(forced.divergence.tolist()),
                margin=tuple(forced.margin.tolist()),
                flips=tuple((flip.token, flip.first_gap, flip.second_gap) for flip in forced.flips),
                drift=tuple(
                    _binned(cosine, error, len(ids)) for cosine, error in zip(forced.cosine, forced.error, strict=True)
                ),
            )

    def explanation(
        self, arm: Arm, workload: TokenizedWorkload, prompts: Sequence[ExplainedPrompt], seconds: float
    ) -> Explanation:
        """Return what is written."""
        method, k, name = arm.method, arm.num_speculative_tokens, workload.workload.name
        taps = self._drafters_of(method)[0].taps
        made = {
            "command": files.command_line(),
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
        }
        read = tuple(f"layer {tap}" for tap in taps) or ("final norm",)
        definition = define(self._definition, method, k, name, self._every)
        return Explanation(method, k, name, self._every, read, definition, made, tuple(prompts))

    def _drafters_of(self, method: Method) -> tuple[decode.Drafter, decode.Drafter]:
        """Return a method's drafter for each target: of DFlash the same weights, of MTP each checkpoint's own head."""
        assert method != "ar"
        if method not in self._drafters:
            drafter = self._plan.drafter.path if method == "dflash" and self._plan.drafter else None
            first, second = (decode.load_drafter(drafter, target, method) for target in self._targets)
            self._drafters[method] = first, second
        return self._drafters[method]

    def _text(self, workload: TokenizedWorkload, position: int) -> Text:
        """Return a prompt with bf16's greedy answer: the one recorded of plain decoding, or a new one.

        Positions are asked for from 0 on, since later turns are sent behind the answers to earlier ones.
        """
        name, settings = workload.workload.name, self._plan.settings
        texts = self._texts.setdefault(name, [])
        if position == len(texts):
            said = [self._template.decode(answer) for _, answer in texts]
            ids = prompt_ids(workload, position, said, self._template.encode)
            answer: Sequence[int] | None = self._recorded.get((name, workload.workload.prompts[position].id))
            if answer is None:
                answer = decode.generate(
                    self._targets[0], ids, max_new_tokens=settings.max_tokens, eos_token_ids=settings.eos_token_ids
                ).token_ids
            texts.append((ids, answer))
        return texts[position]


def _binned(cosine: Tensor, error: Tensor, prompt: int) -> tuple[Drift | None, ...]:
    """Return the means over the prompt and over each range of the answer."""
    edges = [0, *(prompt + edge for edge in EDGES), len(cosine)]
    return tuple(
        Drift(end - begin, float(cosine[begin:end].mean()), float(error[begin:end].mean())) if begin < end else None
        for begin, end in zip(edges, [min(edge, len(cosine)) for edge in edges[1:]], strict=False)
    )
