#!/usr/bin/env python3
"""Time AITER's layouts and their inverses against a copy, on one CPU thread, into benchmarks/LAYOUTS.md.

    python tools/bench_layouts.py

A rate counts the bytes of the tensor once, though each is read and written, per second that the core was at work on
it: other work on the machine makes caches colder, but does not count as time. Results go into new memory, as in use; so
does the copy. What is compared is timed in turns, every other repeat backwards. Exits with 1 when a median is below
1 GB/s.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from bench_formats import Subject, spread

from mxq import files
from mxq.layouts import aiter as orders
from mxq.layouts import operands
from mxq.layouts.operands import Experts
from mxq.layouts.permutation import Bytes

_LEAST = 1.0  # GB/s
_EXPERTS, _HIDDEN, _INTERMEDIATE = 32, 2048, 512  # an eighth of a layer of Qwen3.5-35B-A3B: a GPU's part under EP 8
_PERMUTATIONS: dict[str, tuple[str, Callable[[Bytes], Bytes]]] = {
    "tile16": ("w13", orders.tile16),
    "untile16": ("w13", orders.untile16),
    "tile16, gate_up": ("w13", lambda x: orders.tile16(x, gate_up=True)),
    "untile16, gate_up": ("w13", lambda x: orders.untile16(x, gate_up=True)),
    "gu16": ("w13", orders.gu16),
    "ungu16": ("w13", orders.ungu16),
    "pairs": ("w13", orders.pairs),
    "unpairs": ("w13", orders.unpairs),
    "swz": ("w13_scale", orders.swz),
    "unswz": ("w13_scale", orders.unswz),
    "swz, gate_up": ("w13_scale", lambda x: orders.swz(x, gate_up=True)),
    "unswz, gate_up": ("w13_scale", lambda x: orders.unswz(x, gate_up=True)),
}


def random_experts() -> Experts[Bytes]:
    """Return random bytes in the shapes of experts."""
    rng, e, h, i = np.random.default_rng(0), _EXPERTS, _HIDDEN, _INTERMEDIATE
    shapes = [(e, 2 * i, h // 2), (e, 2 * i, h // 32), (e, h, i // 2), (e, h, i // 32)]
    return Experts(*(rng.integers(0, 256, shape, np.uint8) for shape in shapes))


def subjects(experts: Experts[Bytes]) -> list[Subject]:
    """Return copies, every permutation, and whole layers of numpy's arrays and torch's tensors."""

    def permutation(name: str, operand: str, layout: Callable[[Bytes], Bytes]) -> Subject:
        x: Bytes = getattr(experts, operand)
        return Subject(f"{name} of {operand}", lambda: layout(x), x.nbytes)

    all_four = [experts.w13, experts.w13_scale, experts.w2, experts.w2_scale]
    tensors = Experts(*map(torch.from_numpy, all_four))
    laid_out, interleaved, triton = (
        layout(experts) for layout in (operands.moe_a4w4, operands.moe_interleaved, operands.moe_triton)
    )
    whole = sum(x.nbytes for x in all_four)
    return [
        *(permutation("copy", operand, np.copy) for operand in ("w13", "w13_scale")),
        *(permutation(name, *rest) for name, rest in _PERMUTATIONS.items()),
        Subject("moe_a4w4", lambda: operands.moe_a4w4(experts), whole),
        Subject("moe_a4w4, torch", lambda: operands.moe_a4w4(tensors), whole),
        Subject("undo_moe_a4w4", lambda: operands.undo_moe_a4w4(laid_out), whole),
        Subject("moe_interleaved", lambda: operands.moe_interleaved(experts), whole),
        Subject("undo_moe_interleaved", lambda: operands.undo_moe_interleaved(interleaved), whole),
        Subject("moe_triton", lambda: operands.moe_triton(experts), whole),
        Subject("undo_moe_triton", lambda: operands.undo_moe_triton(triton), whole),
    ]


def measure(subjects: Sequence[Subject], repeats: int) -> dict[str, list[float]]:
    """Return the bytes per second of this thread's CPU time, in every repeat, after two that do not count."""
    rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for repeat in range(-2, repeats):
        for subject in subjects if repeat % 2 == 0 else subjects[::-1]:
            started = time.thread_time()
            subject.call()
            rate = subject.moved / (time.thread_time() - started)
            if repeat >= 0:
                rates[subject.name].append(rate)
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    """Time and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/LAYOUTS.md"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    experts = random_experts()
    load = os.getloadavg()[0]
    rates = measure(subjects(experts), options.repeats)
    hardware = files.hardware()
    versions = ", ".join(f"{name} {version}" for name, version in files.versions("numpy", "torch").items())
    shapes = ", ".join(f"{name} {list(getattr(experts, name).shape)}" for name in ("w13", "w13_scale"))
    lines = [
        "# AITER's layouts on a CPU",
        "",
        f"`{shlex.join(['python', 'tools/bench_layouts.py', *(sys.argv[1:] if argv is None else argv)])}`",
        "",
        "Gigabytes of the tensor, each byte read and written once, into new memory, per second of one thread's CPU "
        f"time; {options.repeats} repeats in turns: median (lowest–highest).",
        "",
        f"{_EXPERTS} experts with H = {_HIDDEN}, I = {_INTERMEDIATE}: {shapes}.",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores shared with other work: load average {load:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after the timing; {versions}",
        "",
        "| layout | GB/s |",
        "|---|---|",
        *(f"| {name} | {spread([value / 1e9 for value in values], '{:.2f}')} |" for name, values in rates.items()),
    ]
    print("\n".join(lines))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(options.out) as file:
        file.write("\n".join(lines) + "\n")
    return int(min(map(statistics.median, rates.values())) < _LEAST * 1e9)


if __name__ == "__main__":
    sys.exit(main())
