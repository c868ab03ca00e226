#!/usr/bin/env python3
"""Time the statistics of a whole run, and put the result into benchmarks/STATISTICS.md as its last section.

    python tools/bench_statistics.py

A run of 60 cells with 128 prompts each: five workloads, two targets, six configurations (MTP and DFlash, budgets of 3,
7 and 15). Timed, from lists of passes on: counting, intervals of every cell, changes of every pair, all workloads
alike, and verdicts.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mxq import files
from mxq.stats import (
    AcceptanceChange,
    Margins,
    Passes,
    Resampling,
    acceptance_change,
    acceptance_intervals,
    all_alike,
    band_all_alike,
    count,
    judge_all,
)

PROMPTS, WORKLOADS, BUDGETS = 128, 5, (3, 7, 15, 3, 7, 15)
HEADING = "## Time"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and replace the page's last section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/STATISTICS.md"))
    options = parser.parse_args(argv)
    text = section()
    print(text)
    page = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
    with files.atomic_write(options.out) as file:
        file.write(page.partition(HEADING)[0] + text)
    return 0


def section() -> str:
    """Measure, and return the section."""
    cells = [(workload, K) for K in BUDGETS for workload in range(WORKLOADS)]
    run = [(K, _passes(2 * seed, K), _passes(2 * seed + 1, K)) for seed, (_, K) in enumerate(cells)]
    started, cpu_started = time.perf_counter(), time.process_time()
    analyse(run)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    passes = sum(len(request.accepted) for _, *arms in run for arm in arms for request in arm)
    hardware = files.hardware()
    lines = [
        HEADING,
        "",
        "`python tools/bench_statistics.py`",
        "",
        f"{2 * len(cells)} cells with {PROMPTS} prompts and {passes:,} verify passes in all: counted, with the "
        f"intervals of all quantities of every cell, the changes of {len(cells)} pairs, all workloads alike, and "
        f"verdicts, by {Resampling().resamples:,} resamples: {wall:.1f} s of wall clock, {cpu:.1f} s of CPU time "
        f"({os.environ.get('OMP_NUM_THREADS', 'all')} threads; {hardware['cpu']}, {hardware['cores']} cores, load "
        f"average {os.getloadavg()[0]:.1f}).",
    ]
    return "\n".join(lines) + "\n"


def analyse(run: Sequence[tuple[int, list[Passes], list[Passes]]]) -> None:
    """Do all that a comparison does with each configuration's pairs, which follow each other."""
    names = [f"p{i}" for i in range(PROMPTS)]
    changes: list[AcceptanceChange] = []
    for K, *arms in run:
        base, new = (count(arm, names, K) for arm in arms)
        for counts in (base, new):
            acceptance_intervals(counts)
        change = acceptance_change(base, new)
        assert change
        changes.append(change)
    for first in range(0, len(changes), WORKLOADS):
        several = changes[first : first + WORKLOADS]
        judge_all([all_alike([change.pooled for change in several])], Margins().acceptance)
        judge_all([band_all_alike([change.survival for change in several])], Margins().survival)
    judge_all([change.pooled for change in changes], Margins().acceptance)
    judge_all([change.survival for change in changes], Margins().survival)


def _passes(seed: int, budget: int) -> list[Passes]:
    """Return some requests: only how many passes there are matters here."""
    rng = np.random.default_rng(seed)
    chances, lengths = rng.beta(8, 3, PROMPTS), rng.integers(40, 120, PROMPTS)
    drawn = [np.minimum(rng.geometric(1 - c, n) - 1, budget).tolist() for c, n in zip(chances, lengths, strict=True)]
    return [Passes(accepted, [budget] * len(accepted)) for accepted in drawn]


if __name__ == "__main__":
    sys.exit(main())
