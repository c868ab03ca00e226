"""Explaining a run: both targets and their drafters over the bf16 target's own answers.

Drafts are made behind every ``every``-th token of each answer and not where the passes of decoding begin. A pass begins
where the one before it ended, so that these places depend on the drafter and on the target; all four corners could not
have the same ones, and most tokens of an answer would never be asked about. Of the n-th prompt, the first place is
token n modulo ``every``: over the prompts, each token of an answer is equally likely to be one.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from torch import Tensor

from mxq import decode, files
from mxq.decode.factorial import factorial
from mxq.decode.forced import force
from mxq.engines import Method
from mxq.errors import InterruptedRunError, UsageError
from mxq.evaluate import Arm, Request
from mxq.evaluate.after import Both
from mxq.evaluate.directory import hold
from mxq.evaluate.matrix import TokenizedWorkload
from mxq.explain.record import EDGES, Drift, ExplainedPrompt, Explanation, define, path_of, read, write
from mxq.progress import progress
from mxq.stats import Passes


@dataclass(frozen=True)
class Explaining:
    """What ``--explain`` adds to a run, behind one token of ``every`` of each answer."""

    option: ClassVar[str] = "--explain"
    every: int

    def refuse(self, request: Request) -> None:
        """Raise UsageError where there is nothing to explain, or ``every`` cannot be."""
        if not any(method != "ar" for method in request.methods):
            raise UsageError("--explain with --spec ar alone", "it is about drafts: give --spec mtp or --spec dflash")
        if self.every < 1:
            raise UsageError(f"--explain-every {self.every}", "it is at least 1: behind every token of an answer")

    def look(self, both: Both) -> None:
        """Raise UsageError where a file of the run was made with another ``every``, MxqError for a damaged one."""
        if (both.out / "run.json").exists():
            _pending(both, self.every)

    def make(self, both: Both) -> None:
        """Write what is not explained yet; files that are there stay, and the same call makes the others."""
        with hold(both.out):
            pending = _pending(both, self.every)
            if not pending:
                return
            work = _Work(both, self.every)
            total = sum(len(workload.token_ids) for _, workload in pending)
            done = 0
            try:
                with progress("explaining", total, "prompts") as advance:
                    for arm, workload in pending:
                        started, prompts = time.perf_counter(), []
                        for prompt in work.explained(arm, workload):
                            prompts.append(prompt)
                            advance(1, f"explaining {arm.configuration}, {workload.workload.name}")
                        write(both.out, work.explanation(arm, workload, prompts, time.perf_counter() - started))
                        done += 1
            except KeyboardInterrupt:
                raise InterruptedRunError(
                    f"interrupted; {done} of {len(pending)} parts of the explanation were made",
                    "run the same command again to continue",
                ) from None


def _pending(both: Both, every: int) -> list[tuple[Arm, TokenizedWorkload]]:
    """Return what is to be made, by its bf16 arm: the largest budget of each method, on every workload."""
    plan = both.plan
    largest: dict[str, Arm] = {}
    for arm in plan.arms:
        if arm.target == "bf16" and arm.method != "ar":
            best = largest.setdefault(arm.method, arm)
            largest[arm.method] = max(best, arm, key=lambda one: one.num_speculative_tokens)
    pending = []
    definition = json.loads(json.dumps(plan.definition()))  # as run.json gives it back
    for workload in plan.workloads:
        for arm in largest.values():
            path = path_of(both.out, arm.method, arm.num_speculative_tokens, workload.workload.name)
            if not path.exists():
                pending.append((arm, workload))
            elif (other := read(path, definition).every) != every:
                raise UsageError(
                    f"{path} was made with --explain-every {other}, not {every}", "give that, or remove the file"
                )
    return pending


class _Work:
    """Targets and drafters, loaded once."""

    def __init__(self, both: Both, every: int) -> None:
        self._both, self._plan, self._targets = both, both.plan, both.targets
        self._every = every
        self._drafters: dict[Method, tuple[decode.Drafter, decode.Drafter]] = {}
        self._definition = json.loads(json.dumps(both.plan.definition()))

    def explained(self, arm: Arm, workload: TokenizedWorkload) -> Iterator[ExplainedPrompt]:
        """Yield each prompt of a workload, explained for the method and budget of ``arm``."""
        drafters = self._drafters_of(arm.method)
        conversation = ""
        for number, prompt in enumerate(workload.workload.prompts):
            ids, answer = self._both.text(workload, number)
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


def _binned(cosine: Tensor, error: Tensor, prompt: int) -> tuple[Drift | None, ...]:
    """Return the means over the prompt and over each range of the answer."""
    edges = [0, *(prompt + edge for edge in EDGES), len(cosine)]
    return tuple(
        Drift(end - begin, float(cosine[begin:end].mean()), float(error[begin:end].mean())) if begin < end else None
        for begin, end in zip(edges, [min(edge, len(cosine)) for edge in edges[1:]], strict=False)
    )
