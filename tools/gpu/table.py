"""Make benchmarks/H200.md, and the table in README.md, of the cells that tools/gpu/run.py has timed.

python tools/gpu/table.py benchmarks/results/h200 --out benchmarks/H200.md --readme README.md
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import MOST_TOKENS
from run import METHODS, WORKLOADS
from shapes import DRAFTERS

Cells = dict[tuple[str, str, str, str, int], dict[str, Any]]
"""Model, precision, method with its budget, workload ("any" for plain decoding), concurrency -> a cell."""

PRECISIONS = ("bf16", "mxfp4")
TRIED = {("Qwen3.5-35B-A3B", "dflash-15"): "it hangs with 8 requests on vLLM 0.25.1 and an H200"}
"""Arms that were tried and could not be timed, and why."""
BEGIN, END = "<!-- tools/gpu/table.py writes from here -->", "<!-- to here -->"


def main() -> None:
    """Read the cells, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--readme", type=Path, help="a file with the marks between which the short table goes")
    options = parser.parse_args()
    cells = read(options.results)
    options.out.write_text("\n".join(page(cells)) + "\n")
    print(f"written to {options.out}")
    if options.readme:
        options.readme.write_text(with_table(options.readme.read_text(), cells))
        print(f"written into {options.readme}")


def with_table(text: str, cells: Cells) -> str:
    """Return a text with the short table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"error: no place for the table\n  -> mark it: {BEGIN} and {END}")
    return "\n".join([before + BEGIN, *_short(cells), END]) + after


def _short(cells: Cells) -> Iterator[str]:
    """Yield medians of both precisions, over plain decoding of bf16, of the first workload of each model."""
    concurrencies, waited = sorted({key[4] for key in cells}), False
    yield "| model, workload | method | " + " | ".join(f"{c} in flight: bf16, MXFP4" for c in concurrencies) + " |"
    yield "|---|---|" + "---|" * len(concurrencies)
    for model in dict.fromkeys(key[0] for key in cells):
        workload = next((w for w in WORKLOADS if any(key[0] == model and key[3] == w for key in cells)), "any")
        for method in sorted({key[2] for key in cells if key[0] == model and key[3] in ("any", workload)}, key=_order):
            row = []
            for c in concurrencies:
                plain = _cell(cells, model, "bf16", "ar", "any", c)
                row.append(", ".join(_ratio(_cell(cells, model, p, method, workload, c), plain) for p in PRECISIONS))
            waited |= any("*" in text for text in row)
            yield f"| {model}, {workload} | {method} | {' | '.join(row)} |"
    if waited:
        yield "\n\\* Some requests waited for room."


def _median(cell: dict[str, Any]) -> float:
    return statistics.median(repeat["tokens_per_s"] for repeat in cell["repeats"])


def _ratio(cell: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    rate, waited = _median(cell), "*" if any(_waited(repeat) for repeat in cell["repeats"]) else ""
    return f"{_digits(rate)}{waited} ({rate / _median(base):.2f}x)" if base else f"{_digits(rate)}{waited}"


def read(directory: Path) -> Cells:
    """Return the cells of a directory; ends the process if there are none."""
    found: Cells = {}
    for path in sorted(directory.glob("*.json")):
        cell = json.loads(path.read_text())
        engine = cell["engine"]
        method = engine["method"] + (f"-{engine['num_speculative_tokens']}" if engine["num_speculative_tokens"] else "")
        found[engine["model"], engine["precision"], method, cell["workload"], cell["concurrency"]] = cell
    if not found:
        raise SystemExit(f"error: no cells in {directory}\n  -> make some: python tools/gpu/run.py --out {directory}")
    return found


def page(cells: Cells) -> Iterator[str]:
    """Yield the page: what was timed and how, a table per model and workload, what was not timed."""
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
        "over plain decoding of the same precision, and for MXFP4 also over that of bf16. Where the GPU has no room "
        "for all requests at once, some wait until others have ended: with speculation each has K + 1 states of every "
        f"gated DeltaNet. For how many there is room is what vLLM's log says of requests of {MOST_TOKENS} tokens; of "
        "these shorter ones there is for more.\n"
    )
    if any("VLLM_MOE_ROUTING_SIMULATION_STRATEGY" in cell["env"] and "A3B" in key[0] for key, cell in cells.items()):
        yield (
            "Experts of 35B-A3B are drawn at random for each token, all alike often (vLLM's routing simulation): "
            "drafts of made-up weights are alike, and would be sent to the same few.\n"
        )
    if early := [key for key, cell in cells.items() if "num_gpu_blocks_override" not in cell["engine_args"]]:
        methods = ", ".join(dict.fromkeys(f"{model} {method} {precision}" for model, precision, method, *_ in early))
        yield f"Timed by earlier forms of these scripts, with a cache and graphs of other sizes: {methods}.\n"
    for model in dict.fromkeys(key[0] for key in cells):
        workloads = [w for w in dict.fromkeys(key[3] for key in cells if key[0] == model) if w != "any"]
        for workload in workloads:
            yield from _table(cells, model, workload)
    yield from _missing(cells)


def _missing(cells: Cells) -> Iterator[str]:
    """Say which arms were not timed, and which cells have fewer repeats than they should."""
    there = {(model, precision, method, workload) for model, precision, method, workload, _ in cells}
    yield "## Not timed yet\n"
    for model in DRAFTERS:
        for workload in WORKLOADS:
            arms = [(m, p) for m in METHODS for p in PRECISIONS if m != "ar" or workload == WORKLOADS[0]]
            left = [f"{m} {p}" for m, p in arms if (model, p, m, "any" if m == "ar" else workload) not in there]
            if left:
                said = "everything" if len(left) == len(arms) else ", ".join(left)
                yield f"- {model}, {workload}: {said}"
    for (model, method), why in TRIED.items():
        if any((model, precision, method, WORKLOADS[0]) not in there for precision in PRECISIONS):
            yield f"- {model} {method} was tried: {why} ([tools/gpu](../tools/gpu/README.md))"
    short = [
        f"- {' '.join(map(str, key[:3]))}, {key[4]} in flight: {len(cell['repeats'])} repeats only"
        for key, cell in cells.items()
        if not cell["finished"]
    ]
    yield "\n".join(["", *short]) if short else ""


def _table(cells: Cells, model: str, workload: str) -> Iterator[str]:
    mine = [key for key in cells if key[0] == model and key[3] in ("any", workload)]
    concurrencies = sorted({key[4] for key in mine})
    yield f"## {model}, {workload}\n"
    yield "| method | length asked, measured | target | " + " | ".join(f"c{c} tok/s" for c in concurrencies) + " |"
    yield "|---|---|---|" + "---|" * len(concurrencies)
    for method in sorted({key[2] for key in mine}, key=_order):
        for precision in PRECISIONS:
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
    rates, median = [repeat["tokens_per_s"] for repeat in cell["repeats"]], _median(cell)
    text = f"{_digits(median)} ({_digits(min(rates))}–{_digits(max(rates))})"
    if any(_waited(repeat) for repeat in cell["repeats"]):
        room = cell.get("room_for")
        text += ", some waited" + (f" (room for {room:.0f})" if room else "")
    ratios = []
    for base in dict.fromkeys((precision, "bf16")):
        plain = _cell(cells, model, base, "ar", "any", c)
        if plain is not None and plain is not cell:
            ratios.append(f"{median / _median(plain):.2f}x")
    return f"{text} [{', '.join(ratios)}]" if ratios else text


def _waited(repeat: dict[str, Any]) -> bool:
    """Whether some requests had no room before others had ended."""
    last, median = repeat.get("last_ttft_s"), repeat.get("median_ttft_s")
    return bool(last and median and last > 2 * median)


def _digits(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.1f}"


if __name__ == "__main__":
    main()
