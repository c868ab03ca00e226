"""Cells as a vLLM server answers them, made up: answers, what their records keep, and what the server itself counts.

:func:`serve` fills a run directory with them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripted import small_plan

from mxq import files
from mxq.evaluate import Cell, Plan, Record
from mxq.evaluate.checks import check_cell
from mxq.evaluate.directory import open_run


@dataclass
class ServedCell:
    """Answers to prompts of one cell, ``concurrency`` at a time, and the server's counters of them.

    The server counts each pass in full; a record leaves out what was accepted behind an end of text.
    """

    k: int
    concurrency: int = 1
    per_pass_s: float = 0.02
    prefill_s: float = 0.05
    seed: int = 0
    records: list[Record] = field(default_factory=list)
    now: list[float] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = [0.0] * self.concurrency
        speculation = {"drafts": 0 if self.k else None, "draft_tokens": 0, "accepted": 0, "per_position": [0] * self.k}
        self.counters = {"requests": 0, "output_tokens": 0, **speculation}

    def answer(
        self, prompt_id: str, passes: list[int], *, end: int | None = None, tokens: list[int] | None = None
    ) -> None:
        """Answer a prompt by passes that accept so many drafts each.

        ``end``: so many accepted drafts of the last pass come behind the end of text, and its own token with them.
        ``tokens``: the answer; passes may make more, which are cut at the token limit.
        """
        count = 1 + sum(passes) + len(passes) - (0 if end is None else end + 1)
        ids = tokens or random.Random(f"{self.seed}/{prompt_id}").choices(range(1, 99), k=count)
        lane = min(range(self.concurrency), key=lambda i: self.now[i])
        sent = self.now[lane]
        # Pieces are what passes commit; plain decoding commits a token at a time.
        steps = len(passes) if self.k else len(ids) - 1
        arrivals = tuple(round(self.prefill_s + self.per_pass_s * step, 6) for step in range(steps + 1))
        self.now[lane] = sent + arrivals[-1] + 0.001
        kept = (*passes[:-1], passes[-1] - (end or 0)) if passes else ()
        text = " ".join(map(str, ids))
        self.records.append(
            Record(
                prompt_id=prompt_id,
                prompt_tokens=10,
                output_tokens=len(ids),
                finish_reason="length" if end is None else "stop",
                ttft_s=arrivals[0],
                duration_s=arrivals[-1] + 0.001,
                target_s=None,
                draft_s=None,
                started_at=round(1e9 + sent, 3),
                accepted=kept,
                drafted=(self.k,) * len(passes),
                text_sha256=files.sha256_text(text),
                text=text,
                token_ids=tuple(ids),
                arrivals_s=arrivals,
            )
        )
        counters = self.counters
        counters["requests"] += 1
        counters["output_tokens"] += len(ids)
        if self.k:
            counters["drafts"] += len(passes)
            counters["draft_tokens"] += self.k * len(passes)
            counters["accepted"] += sum(passes)
            for accepted in passes:
                for position in range(accepted):
                    counters["per_position"][position] += 1

    @property
    def facts(self) -> dict[str, Any]:
        """Return what cell.json says of the cell."""
        return {"wall_s": max(self.now), "counters": self.counters, "passes_from": "server"}


def served(k: int, *, concurrency: int = 1, prompts: int = 6) -> ServedCell:
    """Return a cell of ordinary answers, of which some end by a draft, with accepted drafts behind the end."""
    cell, rng = ServedCell(k, concurrency), random.Random(k)
    for number in range(prompts):
        passes = [rng.randint(0, k) for _ in range(8)] if k else []
        if k and number % 3 == 0:
            cell.answer(f"p-{number}", [*passes, k], end=2)
        else:
            cell.answer(f"p-{number}", passes, tokens=None if k else list(range(1, 30)))
    for record in cell.records:
        record.check(k)
    return cell


LINES = {"linear": ["Marlin"], "moe": [], "attention": ["FlashAttention"], "gdn": ["Triton"]}
TOKENS = 40


def server_plan(
    *,
    concurrencies: tuple[int, ...] = (1, 4),
    repeats: int = 1,
    prompts: int = 12,
    budgets: Sequence[int] = (3,),
    names: Sequence[str] = ("sums",),
) -> Plan:
    """Return :func:`scripted.small_plan` for servers."""
    plan = small_plan(prompts=prompts, budgets=budgets, names=names)
    settings = replace(plan.settings, engine="vllm", max_tokens=TOKENS)
    return replace(plan, settings=settings, concurrencies=concurrencies, repeats=repeats)


def serve_cell(cell: Cell, prompts: list[str]) -> ServedCell:
    """Answer the prompts of a cell: greedy, so that all arms say the same.

    Lanes slow each other down, and repeats get slower by two percent each.
    """
    k = cell.arm.num_speculative_tokens
    slower = (1 + 0.25 * (cell.concurrency - 1)) * (1 + 0.02 * cell.repeat) * (1.2 if k else 1.0)
    made = ServedCell(k, cell.concurrency, per_pass_s=0.01 * slower, prefill_s=0.02 * slower)
    for prompt in prompts:
        rng = random.Random(f"{cell.arm.configuration}/{prompt}")
        passes: list[int] = []
        while k and 1 + sum(passes) + len(passes) < TOKENS:
            passes.append(rng.randint(0, k))
        made.answer(prompt, passes, tokens=random.Random(prompt).choices(range(1, 99), k=TOKENS))
    return made


def serve(
    path: Path,
    plan: Plan,
    *,
    change: Callable[[Cell, ServedCell], Mapping[str, Any] | None] = lambda cell, made: None,
    mxfp4: str | None = "native",
) -> Path:
    """Fill a run directory; ``change`` may spoil what a server answered, and returns further facts of the cell."""
    ids = {w.workload.name: [prompt.id for prompt in w.workload.prompts] for w in plan.workloads}
    with open_run(path, plan, {"hardware": {}, "versions": {}, "engine": {}}) as cells:
        for open_cell in cells.values():
            cell = open_cell.cell
            made = serve_cell(cell, ids[cell.workload])
            more = change(cell, made) or {}
            facts = dict(made.facts)
            facts["server"] = {
                "build": "vllm",
                "version": "0.32.0",
                "kernels": LINES,
                "mxfp4": mxfp4 if cell.arm.target == "mxfp4" else None,
            }
            facts |= more
            checks = check_cell(made.records, made.k, made.concurrency, facts)
            facts["checks"] = [vars(check) for check in checks]
            open_cell.complete(made.records, facts)
    return path
