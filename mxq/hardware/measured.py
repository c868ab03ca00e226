"""Cells that were measured or published, one form for all: what the cost model is fitted on and judged by."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq.errors import UsageError

FORMAT = 1
PUBLISHED_LENGTHS = (150, 2000)
"""Prompt and output tokens taken for published cells, which do not say theirs; with 4,096 allowed and thinking on."""
_MI355X = {
    ("Qwen3.5-27B", "bf16", "dflash", 15, "humaneval"): "27B HumanEval c1 bf16 DFlash 15 tok/s",
    ("Qwen3.5-27B", "bf16", "mtp", 15, "humaneval"): "27B HumanEval c1 bf16 MTP plateau tok/s",
    ("Qwen3.5-27B", "mxfp4", "dflash", 15, "humaneval"): "27B best c1 mxfp4 + DFlash 15 tok/s",
    ("Qwen3.5-35B-A3B", "mxfp4", "dflash", 15, "humaneval"): "35B-A3B best c1 mxfp4 + DFlash 15 tok/s",
}
"""The plateau is taken at K 15, the best to be HumanEval's, where most is accepted: the text says no workload."""


@dataclass(frozen=True, order=True)
class Cell:
    """One cell; sorted by what it is.

    Attributes:
        model, precision, method, k, workload, concurrency: what was run.
        acceptance_length: tokens per verify pass, 1 of plain decoding.
        prompt_tokens, output_tokens: of each request.
        tokens_per_s: output tokens of all requests over the wall clock, prefill included; median of repeats.
        ttft_s: median time to the first token, where it is known.
    """

    model: str
    precision: str
    method: str
    k: int
    workload: str
    concurrency: int
    acceptance_length: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    ttft_s: float | None = None

    @property
    def place(self) -> tuple[str, str, str, int, str, int]:
        """What was run."""
        return self.model, self.precision, self.method, self.k, self.workload, self.concurrency


def read_cells(directory: Path) -> list[Cell]:
    """Return the cells that ``tools/gpu/run.py`` wrote, sorted.

    Raises:
        UsageError: there are none, or one is of another version or not a cell.
    """
    cells = sorted(_cell(path) for path in directory.glob("*.json"))
    if not cells:
        raise UsageError(f"{directory} holds no cells", "give a directory that tools/gpu/run.py wrote")
    return cells


def b200_cells(published: dict[str, Any]) -> list[Cell]:
    """Return the cells of z-lab's cards, in ``mxq/analysis/published.json``, sorted.

    The cards' own acceptance lengths are not among them: these are those of the same model, method, K and workload in
    AMD's tables, measured on vLLM, pooled, and with a client that turns thinking off; the cards have it on.
    """
    table = published["b200_sglang_bf16_tok_s"]
    return sorted(_b200(published, table))


def _b200(published: dict[str, Any], table: dict[str, Any]) -> Iterator[Cell]:
    for title, rows in table.items():
        model, _, concurrency = title.partition(" c")
        if not isinstance(rows, dict):
            continue
        for workload, rates in rows.items():
            for column, rate in zip(table["columns"], rates, strict=True):
                method = column.rstrip("0123456789")
                k = int(column.removeprefix(method) or 0)
                method = "ar" if method == "baseline" else method
                length = acceptance_length(published, model, "bf16", method, k, workload)
                yield Cell(model, "bf16", method, k, workload, int(concurrency), length, *PUBLISHED_LENGTHS, rate)


def mi355x_cells(published: dict[str, Any]) -> list[Cell]:
    """Return the four figures of AMD's text in tokens per second, sorted."""
    found = []
    for (model, precision, method, k, workload), name in _MI355X.items():
        length = acceptance_length(published, model, precision, method, k, workload)
        rate = published["throughput"][name]
        found.append(Cell(model, precision, method, k, workload, 1, length, *PUBLISHED_LENGTHS, rate))
    return sorted(found)


def acceptance_length(
    published: dict[str, Any], model: str, precision: str, method: str, k: int, workload: str
) -> float:
    """Return a published acceptance length; 1 of plain decoding. That of MXFP4 is there for DFlash with K 15 alone."""
    if method == "ar":
        return 1.0
    at = published["workloads"].index(workload)
    if precision == "mxfp4" and (method, k) == ("dflash", 15):
        return float(published["acceptance_mxfp4_dflash15"][model][at])
    return float(published["acceptance_bf16"][model][method][str(k)][at])


def _cell(path: Path) -> Cell:
    raw = _read(path)
    try:
        engine, repeats = raw["engine"], raw["repeats"]
        drafts, accepted = (sum(repeat[name] for repeat in repeats) for name in ("drafts", "accepted"))
        ttft = [repeat["median_ttft_s"] for repeat in repeats if repeat["median_ttft_s"] is not None]
        return Cell(
            model=engine["model"],
            precision=engine["precision"],
            method=engine["method"],
            k=engine["num_speculative_tokens"],
            workload=raw["workload"],
            concurrency=raw["concurrency"],
            acceptance_length=1 + accepted / drafts if drafts else raw["acceptance_length"] or 1.0,
            prompt_tokens=raw["prompt_tokens"],
            output_tokens=raw["output_tokens"],
            tokens_per_s=statistics.median(repeat["tokens_per_s"] for repeat in repeats),
            ttft_s=statistics.median(ttft) if ttft else None,
        )
    except (KeyError, TypeError, statistics.StatisticsError) as error:
        raise UsageError(f"{path} is not a cell ({error!r})", "measure it again with tools/gpu/run.py") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "measure it again") from None
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT or not isinstance(raw, dict):
        raise UsageError(f"{path} has format {found!r}", f"this mxq reads format {FORMAT}: measure it again")
    return raw
