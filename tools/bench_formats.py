#!/usr/bin/env python3
"""Hold the MXFP4 kernels against the reference bit by bit, and time them against a copy.

    python tools/bench_formats.py                  # the CPU kernel, into benchmarks/FORMATS.md
    python tools/bench_formats.py --device cuda    # the GPU kernel, into benchmarks/FORMATS-CUDA.md

Speed is bytes read and written per second: a copy moves each element twice, a quantization of bfloat16 moves 2 bytes in
and 17/32 out. What is compared is timed in turns, every other repeat backwards, and a share is the ratio of two rates
within one repeat; the table shows the median and the range over repeats. Exits with 1 when any byte differs from the
reference's.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from format_cases import DTYPES, LAYOUTS, numbers
from torch import Tensor

from mxq import files
from mxq.formats import mxfp4
from mxq.formats.rules import RULES
from mxq.progress import note

Bytes = tuple[Tensor, Tensor]
Quantize = Callable[[Tensor, str], Bytes]
_COPY = "copy_"


@dataclass(frozen=True)
class Subject:
    """Something to time, and the bytes it reads and writes."""

    name: str
    call: Callable[[], object]
    moved: int


def mismatches(kernels: dict[str, Quantize], device: str) -> tuple[int, list[str]]:
    """Compare kernels with the reference on ``device``, and that with itself on the CPU.

    Returns:
        How many tensors were compared, and a line for each that differs.
    """
    compared, wrong = 0, []

    def compare(what: str, got: Bytes, expected: Bytes) -> None:
        nonlocal compared
        compared += 1
        for name, a, b in zip(("codes", "scales"), got, expected, strict=True):
            if a.shape != b.shape or not torch.equal(a, b.to(a.device)):
                wrong.append(f"{what}: {name} differ")

    for dtype in DTYPES:
        for name, x in numbers(dtype):
            on_device = x.to(device)
            for rule in RULES:
                expected = mxfp4.quantize(on_device, rule)
                if device != "cpu":
                    compare(f"reference on {device}, {dtype}, {name}, {rule}", expected, mxfp4.quantize(x, rule))
                for kernel, quantize in kernels.items():
                    compare(f"{kernel}, {dtype}, {name}, {rule}", quantize(on_device, rule), expected)
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)
        for layout, make in LAYOUTS.items():
            laid_out = make(x)
            for kernel, quantize in kernels.items():
                compare(f"{kernel}, {dtype}, {layout}", quantize(laid_out, "even"), mxfp4.quantize(laid_out, "even"))
    return compared, wrong


def measure(subjects: Sequence[Subject], repeats: int, device: str) -> dict[str, list[float]]:
    """Return the bytes per second of every subject in every repeat, after two that do not count."""
    rates: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for repeat in range(-2, repeats):
        for subject in subjects if repeat % 2 == 0 else subjects[::-1]:
            rate = subject.moved / _seconds(subject.call, device)
            if repeat >= 0:
                rates[subject.name].append(rate)
    return rates


def _seconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _moved(x: Tensor) -> int:
    """Bytes that a quantization of ``x`` has to read and write: a half for each code, one for each scale."""
    return x.nbytes + x.numel() // 2 + x.numel() // mxfp4.BLOCK


def _subject(name: str, quantize: Quantize, x: Tensor, rule: str = "even") -> Subject:
    return Subject(name, lambda: quantize(x, rule), _moved(x))


def _copy(x: Tensor) -> Subject:
    target = torch.empty_like(x)
    return Subject(_COPY, lambda: target.copy_(x), 2 * x.nbytes)


def _random(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    torch.manual_seed(0)
    return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0, 0.02)


def gpu_tables(device: str, repeats: int, gigabytes: float) -> tuple[dict[str, Quantize], list[str], list[str]]:
    """Return the GPU's kernels, their tables, and a line for each part of the large tensor that came out wrong."""
    from mxq.formats import gpu

    kernels: dict[str, Quantize] = {"triton": lambda x, rule: gpu.launch(x, rule, packed_math=False)}
    variants = [False]
    if gpu.has_packed_math(torch.device(device)):
        kernels["triton, packed"] = lambda x, rule: gpu.launch(x, rule, packed_math=True)
        variants.append(True)

    def tuned(blocks: int, warps: int, packed_math: bool) -> Quantize:
        return lambda x, rule: gpu.launch(x, rule, blocks=blocks, warps=warps, packed_math=packed_math)

    rows = int(gigabytes * 1e9 / 2 / 16384)
    x = _random(rows, 16384, torch.bfloat16, device)
    subjects = [_copy(x), _subject("gpu.quantize", gpu.quantize, x)]
    for packed_math in variants:
        for blocks, warps in ((32, 4), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)):
            name = f"{'packed, ' if packed_math else ''}{blocks} blocks, {warps} warps"
            subjects.append(_subject(name, tuned(blocks, warps, packed_math), x))
    lines = _table(f"bfloat16 {rows} x 16384, rule even", subjects, repeats, device)
    packed, scale = gpu.quantize(x)
    wrong = []
    for start in range(0, rows, max(1, rows // 64)):  # beyond 2^31 elements, too
        part = slice(start, start + 16)
        expected = mxfp4.quantize(x[part])
        if not (torch.equal(packed[part], expected[0]) and torch.equal(scale[part], expected[1])):
            wrong.append(f"rows {start} to {start + 16} of the large tensor differ")
    del x, subjects, packed, scale
    x = _random(65536, 16384, torch.bfloat16, device)
    subjects = [_copy(x), *(_subject(rule, gpu.quantize, x, rule) for rule in RULES)]
    lines += _table("bfloat16 65536 x 16384, gpu.quantize by rule", subjects, repeats, device)
    del x, subjects
    for dtype in (torch.float16, torch.float32):
        x = _random(32768, 16384, dtype, device)
        subjects = [_copy(x), _subject("gpu.quantize", gpu.quantize, x)]
        lines += _table(f"{str(dtype).removeprefix('torch.')} 32768 x 16384, rule even", subjects, repeats, device)
    x = _random(4096, 16384, torch.bfloat16, device)
    subjects = [_copy(x), _subject("gpu.quantize", gpu.quantize, x), _subject("reference", mxfp4.quantize, x)]
    lines += _table(
        "bfloat16 4096 x 16384, rule even (copies of this size partly stay in cache)", subjects, repeats, device
    )
    return kernels, lines, wrong


def cpu_subjects(dtype: torch.dtype, threads: int) -> list[Subject]:
    """Return a copy of [4096, 16384] and its quantizations on the CPU by rule even."""
    from mxq.formats import cpu

    x = _random(4096, 16384, dtype, "cpu")
    out = cpu.quantize(x)

    def into(function: Callable[..., Any]) -> Subject:
        return Subject(f"cpu.{function.__name__}", lambda: function(x, threads=threads, out=out), _moved(x))

    def new(x: Tensor, rule: str) -> Bytes:
        return cpu.quantize(x, rule, threads=threads)

    return [
        _copy(x),
        into(cpu.quantize),
        into(cpu.quantize_measured),
        _subject("cpu.quantize into new memory", new, x),
    ]


def cpu_tables(threads: int, repeats: int) -> tuple[dict[str, Quantize], list[str]]:
    """Return the CPU's kernels and their tables."""
    from mxq.formats import cpu

    def plain(x: Tensor, rule: str) -> Bytes:
        return cpu.quantize(x, rule, threads=threads)

    def measured(x: Tensor, rule: str) -> Bytes:
        return cpu.quantize_measured(x, rule, threads=threads)[:2]

    lines = []
    for dtype in DTYPES:
        title = f"{str(dtype).removeprefix('torch.')} 4096 x 16384, rule even"
        lines += _table(title, cpu_subjects(dtype, threads), repeats, "cpu")
    x = _random(1024, 16384, torch.bfloat16, "cpu")
    subjects = [
        _copy(x),
        *(_subject(rule, measured, x, rule) for rule in RULES),
        _subject("reference", mxfp4.quantize, x),
    ]
    lines += _table("bfloat16 1024 x 16384, cpu.quantize_measured by rule", subjects, max(3, repeats // 3), "cpu")
    return {"cpu.quantize": plain, "cpu.quantize_measured": measured}, lines


def _table(title: str, subjects: Sequence[Subject], repeats: int, device: str) -> list[str]:
    note(f"timing {title}")
    rates = measure(subjects, repeats, device)
    lines = [f"### {title}", "", "| kernel | GB/s | share of copy_ |", "|---|---|---|"]
    for name, values in rates.items():
        shares = [value / copied for value, copied in zip(values, rates[_COPY], strict=True)]
        share = "1" if name == _COPY else spread(shares, "{:.3f}")
        lines.append(f"| {name} | {spread([value / 1e9 for value in values], '{:.4g}')} | {share} |")
    lines.append("")
    print("\n".join(lines), flush=True)
    return lines


def spread(values: Sequence[float], form: str) -> str:
    """Return median and range, each as ``form`` says."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low}–{high})"


def main(argv: Sequence[str] | None = None) -> int:
    """Time, compare, and write both down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch's name of the device (default: cpu)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: one per core)")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--gigabytes", type=float, default=8, help="size of the GPU's large tensor (default: 8)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    cuda = options.device.startswith("cuda")
    out = options.out or Path("benchmarks") / ("FORMATS-CUDA.md" if cuda else "FORMATS.md")
    torch.set_num_threads(options.threads)
    started, load = time.perf_counter(), os.getloadavg()[0]
    if cuda:
        kernels, tables, wrong = gpu_tables(options.device, options.repeats, options.gigabytes)
        machine, packages = torch.cuda.get_device_name(options.device), ("torch", "triton")
    else:
        kernels, tables = cpu_tables(options.threads, options.repeats)
        wrong = []
        hardware = files.hardware()
        machine = f"{hardware['cpu']}, {hardware['cores']} cores, {options.threads} threads, load average "
        machine += f"{load:.1f} before and {os.getloadavg()[0]:.1f} after the timing"
        packages = ("torch", "llvmlite")
    timed = time.perf_counter()
    note("comparing every byte with the reference")
    compared, different = mismatches(kernels, options.device)
    wrong += different
    note(f"timing took {timed - started:.0f} s, comparing {time.perf_counter() - timed:.0f} s")
    for line in wrong[:20]:
        note(line)
    equality = f"{compared} tensors compared byte by byte with the reference on the same device: "
    equality += f"{len(wrong)} DIFFER" if wrong else "all equal"
    lines = [
        f"# MXFP4 quantization on {'a GPU' if cuda else 'a CPU'}",
        "",
        f"`{shlex.join(['python', 'tools/bench_formats.py', *(sys.argv[1:] if argv is None else argv)])}`",
        "",
        f"{equality} ({', '.join(RULES)}; {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}; "
        f"kernels: {'; '.join(kernels)}).",
        "",
        f"GB/s are bytes read and written, {options.repeats} repeats in turns: median (lowest–highest).",
        "",
        f"{machine}; " + ", ".join(f"{name} {version}" for name, version in files.versions(*packages).items()),
        "",
        *tables,
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(out) as file:
        file.write("\n".join(lines).rstrip() + "\n")
    print(equality)
    note(f"written to {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
