#!/usr/bin/env python3
"""Measure what recipes are worth on the testbed: benchmarks/RECIPES.md and benchmarks/results/recipes.json.

    python tools/bench_recipes.py                       # both models side by side on two processors
    python tools/bench_recipes.py --prompts 2 --max-tokens 24 --recipes mxfp4 mxfp4-mse --out /tmp/page.md

Each model is converted by every recipe, in a process whose time and peak memory are taken. The bf16 target decodes all
workloads once: plainly, with MTP and with DFlash. Each MXFP4 target decodes them with both methods, and is held to bf16
token by token on bf16's plain answers. What is compared is paired by prompt.

What is measured is in --work, and is not measured again: stopped, the same command goes on. --report only writes the
page of what there is. A recipe that cannot be converted, or is not measured yet, has a row that says so.
"""

import argparse
import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are too small for more

import numpy as np
import peak_memory
import recipes_page

from mxq import files, testbed
from mxq.analysis.changes import ACCEPTANCE
from mxq.analysis.comparison import Comparison, compare
from mxq.checkpoint import Checkpoint
from mxq.errors import MxqError
from mxq.evaluate import Arm, Request, Run, measure, read_run
from mxq.evaluate.after import Both
from mxq.evaluate.inprocess import prepared
from mxq.quality import Recorded, judge, read_qualities
from mxq.quality.measure import Judging
from mxq.stats import ENOUGH, Interval, Margins, Resampling, holm
from mxq.stats.bootstrap import mean_of_strata, replicates
from mxq.stats.intervals import interval

ROOT = Path(__file__).resolve().parents[1]
PLAIN = "mxfp4"
RECIPES = (PLAIN, "mxfp4-mse", "mxfp4-gptq", "mxfp4-awq", "mxfp4-smoothquant", "mxfp4-mixed")
SPECULATIVE = (("dflash", 15), ("mtp", 3))
_MXQ = (sys.executable, "-c", "import sys; sys.argv[0] = 'mxq'; from mxq.cli import main; sys.exit(main())")
_RESAMPLING = Resampling()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the page and its numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=list(testbed.NAMES), choices=testbed.NAMES)
    add("--recipes", nargs="+", default=list(RECIPES), help=f"the first is {PLAIN}, which others are held to")
    add("--workloads", nargs="+", default=list(testbed.WORKLOADS), choices=testbed.WORKLOADS)
    add("--prompts", type=int, default=16, help="prompts a workload (default: 16)")
    add("--max-tokens", type=int, default=96, help="longest answer (default: 96)")
    add("--report", action="store_true", help="measure nothing, write the page of what there is")
    add("--work", type=Path, default=Path("runs/recipes"), help="where models and runs are kept")
    add("--out", type=Path, default=ROOT / "benchmarks" / "RECIPES.md")
    add("--results", type=Path, help="default: results/recipes.json beside --out")
    add("--only", choices=testbed.NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.recipes[0] != PLAIN:
        parser.error(f"the first recipe is {PLAIN}, which others are held to")
    options.work.mkdir(parents=True, exist_ok=True)
    if options.only is not None:
        _measure(options.only, options)
        return 0
    if not options.report:
        command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
        children = [subprocess.Popen([*command, "--only", name]) for name in options.models]
        codes = [child.wait() for child in children]
        if any(codes):
            sys.exit("not everything could be measured; the same command goes on")
    results = {"command": _command(parser, options), **_results(options)}
    beside = options.results or options.out.parent / "results" / "recipes.json"
    beside.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(beside, results)
    with files.atomic_write(options.out) as stream:
        stream.write("\n".join(recipes_page.page(results)) + "\n")
    print(f"written to {options.out} and {beside}", file=sys.stderr)
    return 0


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    words = ["python", "tools/bench_recipes.py"]
    for name in ("models", "recipes", "workloads", "prompts", "max_tokens"):
        value = getattr(options, name)
        if value != parser.get_default(name):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _measure(name: str, options: argparse.Namespace) -> None:
    """Measure one model; each step is skipped where it is done."""
    work = options.work / name
    work.mkdir(exist_ok=True)
    made = [recipe for recipe in options.recipes if _converted(name, recipe, work)]
    bf16 = _step(f"{name}, bf16", measure, _bf16(name, options), work / "run-bf16")
    for recipe in made:
        _step(f"{name}, {recipe}", measure, _mxfp4(name, work / recipe, options), work / f"run-{recipe}")
        _step(f"{name}, {recipe}: quality", _quality, name, recipe, options, bf16)


def _step(title: str, work: Any, *arguments: Any) -> Any:
    begin = time.perf_counter()
    found = work(*arguments)
    print(f"{title}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def _converted(name: str, recipe: str, work: Path) -> bool:
    """Convert a model and note time, peak memory and, where it fails, why; returns whether there is a checkpoint."""
    noted = work / f"{recipe}.json"
    if not noted.exists():
        for left in (work / recipe, work / f"{recipe}.partial"):  # going on with it would take less time
            shutil.rmtree(left, ignore_errors=True)
        begin = time.perf_counter()
        command = [*_MXQ, "--quiet", "quantize", f"testbed:{name}", str(work / recipe), "--recipe", recipe]
        done, peak = peak_memory.measured(command)
        seconds = time.perf_counter() - begin
        error = None
        if done.returncode:
            error = next((line for line in done.stderr.splitlines() if line.startswith("error: ")), done.stderr[-200:])
        files.write_json(noted, {"seconds": round(seconds, 2), "peak_bytes": peak, "error": error})
        print(f"{name}, {recipe}: {error or 'converted'} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return json.loads(noted.read_text())["error"] is None


def _bf16(name: str, options: argparse.Namespace) -> Request:
    return _request({"bf16": f"testbed:{name}"}, name, options, plain=True)


def _mxfp4(name: str, converted: Path, options: argparse.Namespace) -> Request:
    return _request({"mxfp4": str(converted)}, name, options)


def _request(targets: Mapping[str, str], name: str, options: argparse.Namespace, *, plain: bool = False) -> Request:
    """Return a request for both methods alone, or with plain decoding, each with its own budget."""
    arms = [Arm(role, "ar") for role in targets if plain]
    arms += [Arm(role, method, k) for role in targets for method, k in SPECULATIVE]  # type: ignore[arg-type]
    return Request(
        targets=targets,
        methods=tuple(method for method, _ in SPECULATIVE),
        budgets=tuple(k for _, k in SPECULATIVE),
        workloads=options.workloads,
        drafter=f"testbed:{name}-dflash",
        limit=options.prompts,
        max_tokens=options.max_tokens,
        arms=tuple(arms),
    )


class _Answered(Both):
    """Both targets, with bf16's answers of a run of bf16 alone."""

    def __init__(self, *arguments: Any, bf16: Run) -> None:
        super().__init__(*arguments)
        self._bf16 = bf16

    @functools.cached_property
    def _recorded(self) -> dict[tuple[str, str], Sequence[int]]:
        plain = [cell for cell in self._bf16.cells if cell.arm == Arm("bf16", "ar")]
        return {(cell.workload, record.prompt_id): record.token_ids for cell in plain for record in cell.records}


def _quality(name: str, recipe: str, options: argparse.Namespace, bf16: Run) -> None:
    out = options.work / name / f"quality-{recipe}"
    out.mkdir(exist_ok=True)
    plan, template, _ = prepared(_both(name, recipe, options))
    Judging().make(_Answered(plan, template, out, bf16=bf16))
    files.write_json(out / "definition.json", plan.definition())


def _both(name: str, recipe: str, options: argparse.Namespace) -> Request:
    targets = {"bf16": f"testbed:{name}", "mxfp4": str(options.work / name / recipe)}
    return _request(targets, name, options, plain=True)


def _results(options: argparse.Namespace) -> dict[str, Any]:
    """Return all numbers: of each model bf16's, and each recipe's with its changes."""
    models = {name: _model(name, options) for name in options.models}
    _adjust([recipe for model in models.values() for recipe in model["recipes"].values()])
    run = read_run(options.work / options.models[0] / "run-bf16")
    around = run.info["environment"]
    return {
        "trial": options.prompts < ENOUGH,
        "prompts": options.prompts,
        "max_tokens": options.max_tokens,
        "workloads": options.workloads,
        "hardware": {name: around["hardware"][name] for name in ("cpu", "cores")},
        "versions": around["versions"] | files.versions("amd-quark"),
        "margin": Margins().acceptance,
        "resampling": asdict(_RESAMPLING),
        "models": models,
    }


def _model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    work = options.work / name
    bf16, source = read_run(work / "run-bf16"), testbed.path(f"testbed:{name}")
    made = {recipe: _Measured(work, recipe) for recipe in options.recipes if _measured(work, recipe)}
    plain = made.get(PLAIN)
    recipes = {}
    for recipe in options.recipes:
        path, mine = work / f"{recipe}.json", made.get(recipe)
        noted = json.loads(path.read_text()) if path.exists() else {"error": None}
        if mine is None:
            noted["error"] = noted["error"] or "it is not measured yet"
        else:
            noted |= {"bytes": _bytes(work / recipe), **mine.against_bf16(bf16)}
            if plain is not None and recipe != PLAIN:
                noted["from_plain"] = mine.against(plain)
        recipes[recipe] = noted
    return {"bytes": _bytes(source), "recipes": recipes}


def _measured(work: Path, recipe: str) -> bool:
    return (work / f"quality-{recipe}" / "definition.json").exists()


class _Measured:
    """What one recipe's target did."""

    def __init__(self, work: Path, recipe: str) -> None:
        self.run = read_run(work / f"run-{recipe}")
        out = work / f"quality-{recipe}"
        self.read = read_qualities(out, json.loads((out / "definition.json").read_text()))

    def against_bf16(self, bf16: Run) -> dict[str, Any]:
        quality = judge(self.read, _RESAMPLING)
        assert quality.overall is not None
        rows = _rows(compare(bf16, self.run, base_target="bf16", new_target="mxfp4", resampling=_RESAMPLING))
        parts = {part.name: part.means for part in quality.parts}
        return {
            "divergence": quality.overall.divergence.as_json(),
            "agreement": quality.overall.agreement.as_json(),
            "perplexity_ratio": quality.overall.ratio.as_json(),
            "acceptance": {configuration: found[None] for configuration, found in rows.items()},
            "workloads": {
                name: {
                    "divergence": means.divergence.as_json(),
                    "agreement": means.agreement.as_json(),
                    "acceptance": {configuration: found[name] for configuration, found in rows.items()},
                }
                for name, means in parts.items()
            },
        }

    def against(self, plain: "_Measured") -> dict[str, Any]:
        """Return changes from plain MXFP4, each with the p-value that there is one."""
        made = compare(plain.run, self.run, base_target="mxfp4", new_target="mxfp4", resampling=_RESAMPLING)
        alone = len(self.read) == 1  # with one workload there is no mean
        rows = [row for row in made.rows if row.quantity == ACCEPTANCE and (alone or row.workload is None)]
        changes = {row.configuration: row.change for row in rows}
        changes["divergence"] = _divergence_change(plain.read, self.read)
        return {
            name: one.as_json() | {"p": min(one.p_below(0.0), one.p_above(0.0)) if one.bounded else 1.0}
            for name, one in changes.items()
        }


def _rows(comparison: Comparison) -> dict[str, dict[str | None, dict[str, Any]]]:
    """Return rows of acceptance by configuration and workload, None for all; one workload is all of them."""
    found: dict[str, dict[str | None, dict[str, Any]]] = {}
    for row in comparison.rows:
        if row.quantity == ACCEPTANCE:
            told = {name: getattr(row, name).as_json() for name in ("base", "new", "change")}
            mine = found.setdefault(row.configuration, {})
            mine[row.workload] = told | {"verdict": str(row.adjusted)}
    for mine in found.values():
        mine.setdefault(None, next(iter(mine.values())))
    return found


def _divergence_change(base: Sequence[Recorded], new: Sequence[Recorded]) -> Interval:
    """Return KL(bf16 || new) - KL(bf16 || base) in nats per token, workloads weighing alike, paired by conversation."""
    strata = []
    for one, other in zip(base, new, strict=True):
        clusters = sorted({read.cluster for read in one.read})
        tops, bottoms = np.zeros((2, 2, len(clusters), 1))
        for arm, recorded in enumerate((one, other)):
            for read in recorded.read:
                place = clusters.index(read.cluster)
                tops[arm, place] += sum(read.divergence)
                bottoms[arm, place] += read.tokens
        strata.append(replicates(tops, bottoms, _RESAMPLING))
    return interval(strata[0] if len(strata) == 1 else mean_of_strata(strata), _RESAMPLING)


def _adjust(recipes: Sequence[dict[str, Any]]) -> None:
    """Put Holm's adjusted p-value beside each: all claims of a difference from plain MXFP4 are one family."""
    claims = [change for recipe in recipes for change in recipe.get("from_plain", {}).values()]
    for change, adjusted in zip(claims, holm([change["p"] for change in claims]), strict=True):
        change["adjusted_p"] = adjusted


def _bytes(checkpoint: Path) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in Checkpoint.open(checkpoint).tensors.values())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MxqError as error:
        sys.exit(f"error: {error}")
