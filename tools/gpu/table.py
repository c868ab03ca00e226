"""Make benchmarks/H200.md of the cells that tools/gpu/run.py has timed.

python tools/gpu/table.py benchmarks/results/h200 --out benchmarks/H200.md
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Cells = dict[tuple[str, str, str, str, int], dict[str, Any]]
"""Model, precision, method with its budget, workload ("any" for plain decoding), concurrency -> a cell."""

_PRECISIONS = ("bf16", "mxfp4")


def main() -> None:
    """Read the cells, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cells = _read(options.results)
    options.out.write_text("\n".join(_page(cells)) + "\n")
    print(f"written to {options.out}")


def _read(directory: Path) -> Cells:
    found: Cells = {}
    for path in sorted(directory.glob("*.json")):
        cell = json.loads(path.read_text())
        engine = cell["engine"]
        method = engine["method"] + (f"-{engine['num_speculative_tokens']}" if engine["num_speculative_tokens"] else "")
        found[engine["model"], engine["precision"], method, cell["workload"], cell["concurrency"]] = cell
    if not found:
        raise SystemExit(f"error: no cells in {directory}\n  -> make some: python tools/gpu/run.py --out {directory}")
    return found


def _page(cells: Cells) -> Iterator[str]:
    first = next(iter(cells.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    yield "# Published cells on one GPU: real shapes, made-up weights\n"
    yield "`python tools/gpu/run.py --out benchmarks/results/h200`, then `python tools/gpu/table.py`\n"
    yield f"{first['gpu']}, {versions}; {first['prompt_tokens']} prompt and {first['output_tokens']} output tokens.\n"
    yield (
        "Weights are random, drafts are accepted at the published acceptance length of the bf16 target "
        "(`rejection_sample_method: synthetic`): speeds are those of the shapes, acceptance is not measured here. "
        "MXFP4 is weight-only, on Marlin's kernels. As many requests as the concurrency are sent at once, all of one "
        "length. Output tokens per second of wall clock, prefill included: median (range) of the repeats; in brackets "
        "over plain decoding of the same precision, and for MXFP4 also over that of bf16.\n"
    )
    for model in dict.fromkeys(key[0] for key in cells):
        workloads = [w for w in dict.fromkeys(key[3] for key in cells if key[0] == model) if w != "any"]
        for workload in workloads:
            yield from _table(cells, model, workload)


def _table(cells: Cells, model: str, workload: str) -> Iterator[str]:
    mine = [key for key in cells if key[0] == model and key[3] in ("any", workload)]
    concurrencies = sorted({key[4] for key in mine})
    yield f"## {model}, {workload}\n"
    yield "| method | length asked, measured | target | " + " | ".join(f"c{c} tok/s" for c in concurrencies) + " |"
    yield "|---|---|---|" + "---|" * len(concurrencies)
    for method in sorted({key[2] for key in mine}, key=_order):
        for precision in _PRECISIONS:
            row = [_cell(cells, model, precision, method, workload, c) for c in concurrencies]
            there = [cell for cell in row if cell is not None]
            if there:
                shown = [_speed(cells, cell, model, precision, c) for cell, c in zip(row, concurrencies, strict=True)]
                yield f"| {method} | {_lengths(there)} | {precision} | " + " | ".join(shown) + " |"
    yield ""


def _order(method: str) -> tuple[int, str, int]:
    name, _, tokens = method.partition("-")
    return (name != "ar", name, int(tokens or 0))


def _cell(cells: Cells, model: str, precision: str, method: str, workload: str, c: int) -> dict[str, Any] | None:
    return cells.get((model, precision, method, "any" if method == "ar" else workload, c))


def _lengths(there: list[dict[str, Any]]) -> str:
    if there[0]["acceptance_length"] is None:
        return "1"
    drafts = sum(repeat["drafts"] for cell in there for repeat in cell["repeats"])
    accepted = sum(repeat["accepted"] for cell in there for repeat in cell["repeats"])
    measured = f"{1 + accepted / drafts:.3f}" if drafts else "-"
    return f"{there[0]['acceptance_length']:.3f}, {measured}"


def _speed(cells: Cells, cell: dict[str, Any] | None, model: str, precision: str, c: int) -> str:
    if cell is None:
        return "-"
    rates = [repeat["tokens_per_s"] for repeat in cell["repeats"]]
    text = f"{_digits(statistics.median(rates))} ({_digits(min(rates))}–{_digits(max(rates))})"
    ratios = []
    for base in dict.fromkeys((precision, "bf16")):
        plain = _cell(cells, model, base, "ar", "any", c)
        if plain is not None and plain is not cell:
            over = statistics.median(repeat["tokens_per_s"] for repeat in plain["repeats"])
            ratios.append(f"{statistics.median(rates) / over:.2f}x")
    return f"{text} [{', '.join(ratios)}]" if ratios else text


def _digits(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.1f}"


if __name__ == "__main__":
    main()
