"""Fit the overheads of recipes/hardware on measured and published cells, and write how well they predict the others.

    python tools/fit_hardware.py       # writes recipes/hardware/*.yaml and benchmarks/PREDICT.md

Each machine's cells are sorted by model, precision, method, K, workload and concurrency; one of every three is fitted
on, by turns the last, the middle and the first of them, and the rest is held out. The rule looks at no number. Cells
that tools/gpu measures later are taken up by themselves.
"""

import argparse
import functools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from scipy.optimize import least_squares

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from fit_page import page  # noqa: E402

from mxq.analysis.published import FILE as PUBLISHED  # noqa: E402
from mxq.hardware import machine, measured, opening  # noqa: E402
from mxq.hardware.cost import Setup  # noqa: E402
from mxq.hardware.measured import Cell  # noqa: E402
from mxq.hardware.memory import running  # noqa: E402
from mxq.hardware.predict import Load, tokens_per_s  # noqa: E402

RESULTS = HERE.parent / "benchmarks" / "results"
ARCHITECTURES = HERE.parent / "tests" / "data" / "architectures"
DRAFTERS = {"Qwen3.5-27B": "Qwen3.5-27B-DFlash", "Qwen3.5-35B-A3B": "Qwen3.5-35B-A3B-DFlash-v1"}
SPEED = ("layer_us", "draft_us", "snapshot_share")
VLLM = ("experts_us", "host_plain_ms", "host_ms", "host_draft_ms")
"""Of vLLM's kernels for experts and of its engine process; B200's cells are of another engine."""
UNPACKED = ("packed_share", "matrix_mxfp4_tflops")
"""Of kernels that unpack MXFP4 to bf16; the rate starts at the sheet's of bf16."""
OF_H200 = (*SPEED, *VLLM, *UNPACKED)
REST = ("packed_share", "prompt_ms")
START = dict.fromkeys(("scan_us", "prompt_ms", *VLLM), 0.0)
START |= {"layer_us": 50, "draft_us": 200, "snapshot_share": 0.35, "packed_share": 1}
"""Where the first machine's search begins, whatever was fitted before."""
START_VLLM = {"experts_us": 15, "host_plain_ms": 5, "host_ms": 6, "host_draft_ms": 1}
"""Where the search for vLLM's begins, and towards which it is drawn as others are towards the machine before."""
START_MI355X = {"layer_us": 50, "scan_us": 4}
NO_VLLM = "vLLM's; taken to be 0 of SGLang"
NO_SCAN = "taken to be 0: no cell tells it from 0, since bytes of snapshots take longer"
SPEEDUP = ("Qwen3.5-27B", "math500")
SPEEDUP_SAID = "27B best single-request speedup (MATH500, bf16, DFlash 15)"
"""What MI355X is fitted on beside one of its figures."""
_NOISE = 0.05
"""A residual of so much counts as one: about what repeats and rounding of published figures differ by."""
_PRIOR = math.log(2)
"""A constant is taken to be within a factor of two of the machine's before it: decides where cells are few only."""


@dataclass(frozen=True)
class Fitted:
    """A machine with what it was fitted on; ``constants`` are all of its file's."""

    name: str
    gpu: str
    constants: dict[str, float]
    sources: dict[str, str]
    cells: tuple[Cell, ...]
    on: tuple[Cell, ...]

    def predicted(self, cell: Cell) -> float:
        """Return tokens per second of a cell."""
        return predicted(self.machine, cell)

    def error(self, cell: Cell) -> float:
        """Return how far a cell's prediction is off, as a share of what was measured or published."""
        return self.predicted(cell) / cell.tokens_per_s - 1

    @property
    def machine(self) -> machine.Machine:
        """As the cost model takes it."""
        return machine.Machine.of(self.name, self.gpu, self.constants, self.sources)

    def with_constants(self, values: dict[str, float], source: str) -> "Fitted":
        """Return it with other values, rounded as the file has them, and their source."""
        rounded = {key: float(f"{value:.3g}") for key, value in values.items()}
        sources = self.sources | dict.fromkeys(values, source)
        return replace(self, constants=self.constants | rounded, sources=sources)


def main() -> None:
    """Fit all machines, one after the other, and write files and page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    machines, others = fitted()
    texts = {machine.directory() / f"{one.name}.yaml": text_of(one) for one in machines.values()}
    said, h200 = statements(machines["mi355x"]), machines["h200"]
    errors = [decoding(h200, cell) for cell in h200.cells if cell not in h200.on]
    behind = [error for error in errors if error is not None]
    texts[HERE.parent / "benchmarks" / "PREDICT.md"] = page(
        machines, others, without(h200, machines["b200"]), behind, first_tokens(h200), waiting(h200), said
    )
    for path, text in texts.items():
        path.write_text(text)
        print(f"written to {path}")


@functools.cache
def read_published() -> dict[str, Any]:
    """Return the published tables."""
    found: dict[str, Any] = json.loads(PUBLISHED.read_text())
    return found


def fitted() -> tuple[dict[str, Fitted], list[Fitted]]:
    """Return every machine by name, and MI355X once more for each figure that it could have been fitted on."""
    published = read_published()
    timed = fit_prompt(opened("h200", measured.read_cells(RESULTS / "h200")))
    # B200 is fitted with what it is predicted with.
    b200 = fit(carried(opened("b200", measured.b200_cells(published)), timed, ["prompt_ms"]), SPEED)
    begun = START_VLLM | {UNPACKED[1]: timed.constants["matrix_bf16_tflops"]}
    h200 = fit(replace(timed, constants=timed.constants | begun), OF_H200, before=b200)
    start = carried(opened("mi355x", measured.mi355x_cells(published)), h200, (*SPEED, *VLLM, *REST))
    start = replace(start, constants=start.constants | START_MI355X)
    mi355x = fit_overheads(start, start.on[0])
    mi300x = carried(opened("mi300x", []), mi355x, (*SPEED, *VLLM, *REST, "scan_us"))
    machines = (carried(b200, h200, REST), h200, mi355x, mi300x)
    return {one.name: one for one in machines}, [fit_overheads(start, cell) for cell in start.cells]


def without(h200: Fitted, b200: Fitted) -> dict[str, Fitted]:
    """Return H200 fitted without what was added to the model when its cells were seen."""

    def fitted_with(constants: dict[str, float]) -> Fitted:
        begun = replace(h200, constants=h200.constants | constants)
        return fit(begun, [name for name in OF_H200 if begun.constants[name]], before=b200)

    return {
        "the longer of reading packed weights and multiplying them, not both": fitted_with({"packed_overlap": 1.0}),
        "no `experts_us`": fitted_with({"experts_us": 0.0}),
        "no times of the host": fitted_with(dict.fromkeys(VLLM[1:], 0.0)),
        "all prompts in one pass": fitted_with({"prompt_passes": 1.0}),
    }


def waiting(one: Fitted) -> list[Cell]:
    """Return the cells that were fitted on and whose steps wait for the host."""

    def waits(cell: Cell) -> bool:
        made = setup(one.machine, cell.model, cell.precision)
        return made.step(cell.method, cell.k, cell.concurrency, load_of(cell).context)["host"] > 0

    return [cell for cell in one.on if waits(cell)]


def first_tokens(one: Fitted) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Return the median seconds to the first token, measured and predicted, by model, precision and concurrency."""
    found = defaultdict[tuple[str, str, int], list[tuple[float, float]]](list)
    for cell in one.cells:
        if cell.ttft_s is not None and decoding(one, cell) is not None:
            arm = cell.model, cell.precision, cell.concurrency
            found[arm].append((cell.ttft_s, prompts(one.machine, cell)))
    return {
        arm: (statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs))
        for arm, pairs in found.items()
    }


def statements(mi355x: Fitted) -> list[tuple[str, str, str]]:
    """Return what else AMD's text says of speeds on MI355X, and what is predicted; one speedup is fitted on."""
    published = read_published()
    dense, moe, text = "Qwen3.5-27B", "Qwen3.5-35B-A3B", published["throughput"]
    found = []
    for model, workload, name in (
        (*SPEEDUP, SPEEDUP_SAID),
        (moe, "humaneval", "35B-A3B best single-request speedup"),
    ):
        ratio = speedup(mi355x, model, workload)
        error = "fitted on" if name == SPEEDUP_SAID else f"{ratio / text[name] - 1:+.1%}"
        found.append((f"{model} bf16 dflash-15, {workload}: speedup", f"{text[name]}", f"{ratio:.2f}, {error}"))
    plateau, said = rate(mi355x, dense, "bf16", "mtp", 7, "humaneval"), text["27B HumanEval c1 bf16 MTP plateau tok/s"]
    error = f"{plateau / said - 1:+.1%}"
    found.append((f"{dense} bf16 mtp-7, humaneval: the plateau, tok/s", f"{said}", f"{plateau:.0f}, {error}"))
    gains = [
        rate(mi355x, dense, "mxfp4", "dflash", 15, w) / rate(mi355x, dense, "bf16", "dflash", 15, w)
        for w in published["workloads"]
    ]
    shown = f"{min(gains) - 1:.0%} to {max(gains) - 1:.0%}"
    found.append((f"{dense} dflash-15: MXFP4 adds", text["mxfp4 gain on absolute c1 tok/s"], shown))
    for workload in published["workloads"]:
        rates = {
            f"{method}-{k}": rate(mi355x, dense, "bf16", method, k, workload, 32)
            for method in ("dflash", "mtp")
            for k in (3, 7, 15)
        }
        said = "dflash-15" if workload in ("gsm8k", "humaneval", "math500") else "dflash-7 or mtp-3 are safer"
        best, second = sorted(rates, key=lambda name: -rates[name])[:2]
        ahead = rates[best] / rates[second] - 1
        found.append((f"{dense} bf16, {workload}, 32 requests: fastest", said, f"{best}, {ahead:.0%} before {second}"))
    return found


def one_of_three(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return of every three sorted cells one: the last, of the next three the middle one, then the first, and so on.

    Where three concurrencies were measured of each arm, always the last would be always the largest.
    """
    whole = sorted(cells)[: len(cells) // 3 * 3]
    return tuple(cell for i, cell in enumerate(whole) if (i + i // 3) % 3 == 2)


def opened(name: str, cells: Sequence[Cell]) -> Fitted:
    """Return a machine as its file has it, but for what was fitted before, with its cells."""
    gpu, constants, sources = machine.read(machine.directory() / f"{name}.yaml")
    sources |= {"scan_us": NO_SCAN, **dict.fromkeys(VLLM, NO_VLLM)}
    return Fitted(name, gpu, constants | START, sources, tuple(sorted(cells)), one_of_three(cells))


def setup(on: machine.Machine, model: str, precision: str) -> Setup:
    """Return a published model on a machine, with its published drafter."""
    drafter = str(ARCHITECTURES / f"{DRAFTERS[model]}.json")
    return opening.setup(on, ARCHITECTURES / f"{model}.json", precision, drafter)


def predicted(on: machine.Machine, cell: Cell) -> float:
    """Return tokens per second of a cell on a machine."""
    made = setup(on, cell.model, cell.precision)
    return tokens_per_s(made, cell.method, cell.k, load_of(cell), cell.acceptance_length)


def load_of(cell: Cell) -> Load:
    """Return what was asked of a cell's server: all its requests at once."""
    return Load.of_request(cell.concurrency, cell.prompt_tokens, cell.output_tokens)


def decoding(one: Fitted, cell: Cell) -> float | None:
    """Return the error of a cell without its prompts: behind the median first token.

    None where that was not measured, or not all requests have room at once.
    """
    load, made = load_of(cell), setup(one.machine, cell.model, cell.precision)
    if cell.ttft_s is None or running(made, cell.method, cell.k, cell.concurrency, load.longest) < cell.concurrency:
        return None
    without = Load(cell.concurrency, load.context)
    found = tokens_per_s(made, cell.method, cell.k, without, cell.acceptance_length)
    took = cell.concurrency * cell.output_tokens / cell.tokens_per_s - cell.ttft_s
    return found / (cell.concurrency * (cell.output_tokens - 1) / took) - 1


def off(one: Fitted, cell: Cell) -> float:
    """Return the error of a cell, without its prompts where that is known."""
    behind = decoding(one, cell)
    return one.error(cell) if behind is None else behind


def fit(one: Fitted, names: Sequence[str], before: Fitted | None = None) -> Fitted:
    """Fit constants by least squares of log(predicted / measured) on the chosen cells.

    Without prompts, where that is known (:func:`off`): ``prompt_ms`` is fitted by itself.

    With ``before``, each is drawn towards that machine's by one residual for a factor of two; those of MXFP4 and of
    vLLM, which no machine before was fitted with, towards where they start.
    """
    own = (*UNPACKED, *VLLM)
    middle = [(one if before is None or name in own else before).constants[name] for name in names]

    def residuals(logs: Any) -> list[float]:
        values = dict(zip(names, map(math.exp, logs), strict=True))
        tried = replace(one, constants=one.constants | values)
        found = [math.log1p(off(tried, cell)) / _NOISE for cell in tried.on]
        if before is not None:
            found += [(log - math.log(value)) / _PRIOR for log, value in zip(logs, middle, strict=True)]
        return found

    top = [0.0 if name in machine.SHARES else 10.0 for name in names]
    solved = least_squares(
        residuals,
        [min(math.log(value), high - 0.1) for value, high in zip(middle, top, strict=True)],
        bounds=([-10.0] * len(names), top),
        loss="soft_l1",
        f_scale=2.0,
    )
    values = dict(zip(names, map(math.exp, solved.x), strict=True))
    return one.with_constants(values, about(one))


def fit_prompt(one: Fitted) -> Fitted:
    """Fit ``prompt_ms`` on times to the first token of the chosen cells of bf16 with one request.

    No other constant that is fitted matters to these.
    """
    chosen = [cell for cell in one.on if (cell.precision, cell.concurrency) == ("bf16", 1)]
    bare = replace(one.machine, prompt_s=0.0)
    over = [cell.ttft_s - prompts(bare, cell) for cell in chosen if cell.ttft_s is not None]
    return one.with_constants({"prompt_ms": 1e3 * max(0.0, statistics.median(over))}, about(one))


def about(one: Fitted) -> str:
    """Return the source of a fitted constant."""
    return f"fitted on {len(one.on)} of {len(one.cells)} cells (tools/fit_hardware.py, benchmarks/PREDICT.md)"


def prompts(on: machine.Machine, cell: Cell) -> float:
    """Return the seconds that a cell's prompts take on a machine."""
    return setup(on, cell.model, cell.precision).prompts(cell.concurrency, cell.prompt_tokens)


def carried(one: Fitted, origin: Fitted, names: Iterable[str]) -> Fitted:
    """Return a machine with constants of another, for which it has no cells."""
    return one.with_constants({name: origin.constants[name] for name in names}, f"not measured here: {origin.gpu}'s")


def fit_overheads(one: Fitted, cell: Cell) -> Fitted:
    """Fit both overheads of a machine's kernels, ``layer_us`` and ``scan_us``, on one figure and one speedup.

    Two equations for two numbers. The figure alone does not say which of both the time of a step is; plain decoding
    has no snapshots to scan for, so that a speedup over it does.
    """
    names = tuple(START_MI355X)

    def with_logs(logs: Any) -> Fitted:
        return replace(one, constants=one.constants | dict(zip(names, map(math.exp, logs), strict=True)))

    def misses(logs: Any) -> list[float]:
        tried = with_logs(logs)
        return [math.log(tried.predicted(cell) / cell.tokens_per_s), math.log(speedup(tried, *SPEEDUP) / said)]

    said = read_published()["throughput"][SPEEDUP_SAID]
    solved = least_squares(misses, [math.log(value) for value in START_MI355X.values()])
    assert max(map(abs, solved.fun)) < 1e-4, "both can be met"
    values = dict(zip(names, map(math.exp, solved.x), strict=True))
    source = f"fitted on one of {len(one.cells)} figures and one speedup (tools/fit_hardware.py, benchmarks/PREDICT.md)"
    return replace(one.with_constants(values, source), on=(cell,))


def speedup(one: Fitted, model: str, workload: str) -> float:
    """Return the predicted speedup of DFlash with 15 drafts over plain decoding, both bf16, of one request."""
    fast, plain = (rate(one, model, "bf16", method, k, workload) for method, k in (("dflash", 15), ("ar", 0)))
    return fast / plain


def rate(one: Fitted, model: str, precision: str, method: str, k: int, workload: str, concurrency: int = 1) -> float:
    """Return predicted tokens per second at the published acceptance length."""
    length = measured.acceptance_length(read_published(), model, precision, method, k, workload)
    cell = Cell(model, precision, method, k, workload, concurrency, length, *measured.PUBLISHED_LENGTHS, 0)
    return one.predicted(cell)


def text_of(one: Fitted) -> str:
    """Return a machine's file."""
    order = [name for name in (machine.SHEET | machine.FITTED) if name in one.constants]
    constants = {name: {"value": one.constants[name], "source": one.sources[name]} for name in order}
    content = {"format": machine.FORMAT, "gpu": one.gpu, "constants": constants}
    return (
        "# What each constant means: mxq/hardware/machine.py. Fitted ones are written by tools/fit_hardware.py.\n"
        + str(yaml.safe_dump(content, sort_keys=False, width=118))
    )


if __name__ == "__main__":
    main()
