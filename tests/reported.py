"""Runs to report on, and reports read back as a browser's parser would: tags, text, tables."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from served import TOKENS, ServedCell, serve, server_plan

from mxq.evaluate import Cell, Plan
from mxq.evaluate.kept import layers_of
from mxq.evaluate.matrix import arms
from mxq.report.page.analysed import Analysed, analyse
from mxq.stats import Resampling

EVIL = "<script>alert(1)<!-- <img src=x onerror=alert(2)> \"'>&lt; ${7*7} {{7*7}} $x_$ `a` |b| =1+1"
"""What a run directory may call anything in it."""
LAYER = '{"module": "%s", "relative_error": %.4f, "sqnr_db": 18.5, "saturated": 0, "zero_blocks": 0, "blocks": 8}\n'
FEW = Resampling(resamples=200)


def full_plan(
    *,
    names: Sequence[str] = ("sums", "talk"),
    budgets: Sequence[int] = (3, 7, 15),
    prompts: int = 16,
    concurrencies: tuple[int, ...] = (1, 8),
    repeats: int = 2,
) -> Plan:
    """Return a plan of both targets with MTP and DFlash."""
    plan = server_plan(concurrencies=concurrencies, repeats=repeats, prompts=prompts, names=names)
    return replace(plan, arms=arms(["bf16", "mxfp4"], ["mtp", "dflash"], budgets))


def answer(cell: Cell, made: ServedCell) -> None:
    """Answer again as models do: workloads differ, MXFP4 accepts a little less and is a fifth faster."""
    k, target = cell.arm.num_speculative_tokens, cell.arm.target
    records, made.records = made.records, []
    fresh = ServedCell(k, cell.concurrency, per_pass_s=made.per_pass_s * (0.8 if target == "mxfp4" else 1))
    rate = 0.85 - 0.05 * (cell.workload != "sums") - 0.01 * (target == "mxfp4") - 0.03 * (cell.arm.method == "mtp")
    for record in records:
        rng = random.Random(f"{cell.arm.configuration}/{record.prompt_id}")
        passes: list[int] = []
        while k and 1 + sum(passes) + len(passes) < TOKENS:
            passes.append(next((n for n in range(k) if rng.random() > rate), k))
        fresh.answer(record.prompt_id, passes, tokens=list(record.token_ids))
    made.records, made.now, made.counters = fresh.records, fresh.now, fresh.counters


def record(path: Path, plan: Plan | None = None, *, layers: bool = True, **how: Any) -> Path:
    """Fill a run directory."""

    def change(cell: Cell, made: ServedCell) -> Mapping[str, Any] | None:
        answer(cell, made)
        more = how.get("change")
        return more(cell, made) if more else None

    serve(path, plan or full_plan(), **{**how, "change": change})
    if layers:
        kept = layers_of(path, "mxfp4")
        kept.parent.mkdir(exist_ok=True)
        modules = [
            f"model.layers.{i}.mlp.experts.{expert}.{kind}"
            for kind in ("up_proj", "down_proj")
            for i in range(4)
            for expert in range(3)
        ]
        kept.write_text("".join(LAYER % (module, 0.1 + 0.001 * i) for i, module in enumerate(modules)))
    return path


def analysed(path: Path) -> Analysed:
    """Read and analyse a run."""
    from mxq.evaluate import read_run

    return analyse(read_run(path), FEW)


@dataclass
class Table:
    """A table of a page: the label of it, its head, and its rows as text, intervals in brackets."""

    label: str
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    def row(self, name: str) -> dict[str, str]:
        """Return the row that begins with ``name``, by column."""
        (found,) = [row for row in self.rows if row[0] == name]
        return dict(zip(self.head, found, strict=True))


class Read(HTMLParser):
    """A page, taken apart. ``text`` is what people read; ``tags`` are (name, attributes)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.tables: list[Table] = []
        self.order: list[str] = []
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._inside.append(tag)
        if tag == "table":
            self.tables.append(Table(dict(attributes).get("aria-label") or ""))
        elif tag == "tr" and "tbody" in self._inside:
            self.tables[-1].rows.append([])
        elif tag in ("td", "th"):
            (self.tables[-1].rows[-1] if "tbody" in self._inside else self.tables[-1].head).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass  # tags without an end

    def handle_data(self, data: str) -> None:
        if "style" in self._inside:
            return
        data = data.replace("\u00a0", " ")
        self.text.append(data)
        if self._inside and self._inside[-1] in ("h1", "h2", "h3", "h4", "strong"):
            self.order.append(data.strip())
        if "td" in self._inside or "th" in self._inside:
            row = self.tables[-1].rows[-1] if "tbody" in self._inside else self.tables[-1].head
            row[-1] += f" ({data})" if self._inside[-1] == "small" else data

    def table(self, label: str) -> Table:
        """Return the one table with a label that begins so."""
        (found,) = [table for table in self.tables if table.label.startswith(label)]
        return found
