#!/usr/bin/env python3
"""Time whole conversions by GPUs against those by the CPU, and compare their bytes, into benchmarks/CONVERT-CUDA.md.

    python tools/bench_devices.py --device cpu cuda:0 cuda

The checkpoint is that of tools/bench_convert.py, of one size. Conversions are processes of their own, timed from start
to end, imports and the start of CUDA included, and take turns. Exits with 1 if any two differ in a byte.
"""

import argparse
import json
import shlex
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import bench_convert
import bench_formats
import torch

from mxq import files

_MXQ = [sys.executable, "-c", "from mxq.cli import main; main()"]  # where it is not installed, too


def convert(source: Path, device: str, jobs: int) -> tuple[bench_convert.Run, dict[str, str]]:
    """Convert once; returns time and memory, and the sha256 of every file of tensors."""
    out = source.with_name(f"out-{device.replace(':', '-').replace(',', '-')}-{jobs}")
    command: list[str | Path] = [*_MXQ, "--quiet", "quantize", source, out, "--jobs", str(jobs), "--device", device]
    kept: dict[str, str] = {}

    def look(directory: Path) -> None:
        listed = json.loads((directory / "mxq_manifest.json").read_text())["files"]
        kept.update({name: facts["sha256"] for name, facts in listed.items() if name.endswith(".safetensors")})

    return bench_convert.measure(command, source, out, look), kept


def main(argv: Sequence[str] | None = None) -> int:
    """Time, compare, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", nargs="+", default=["cpu", "cuda"], help="as of mxq quantize; the first is compared with"
    )
    parser.add_argument("--jobs", type=int, nargs="+", default=[8], help="threads")
    parser.add_argument("--size", type=float, default=4.0, help="gigabytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("bench-devices"), help="for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/CONVERT-CUDA.md"))
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    source = bench_convert.write_checkpoint(options.work.resolve() / "source", options.size)
    arms = [(device, jobs) for jobs in options.jobs for device in options.device]
    runs: dict[tuple[str, int], list[bench_convert.Run]] = defaultdict(list)
    sums: set[str] = set()
    for repeat in range(options.repeats):
        for device, jobs in arms[:: -1 if repeat % 2 else 1]:
            run, kept = convert(source, device, jobs)
            runs[device, jobs].append(run)
            sums.add(json.dumps(kept, sort_keys=True))
    shutil.rmtree(source)
    hardware = files.hardware()
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in files.versions("numpy", "torch", "triton").items())
    lines = [
        "# Whole conversions by GPUs",
        "",
        f"`python tools/bench_devices.py {shlex.join(sys.argv[1:] if argv is None else argv)}`",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores; {gpus}; {versions}.",
        "",
        f"{options.size:g} GB of bfloat16 with Qwen3.5-35B-A3B's layer shapes, in the page cache; median "
        f"(lowest-highest) of {options.repeats} conversions in turns, each a process from its start to its end. "
        f"All {sum(map(len, runs.values()))} wrote "
        + ("the same bytes." if len(sums) == 1 else f"**{len(sums)} different outputs**."),
        "",
        "| --device | --jobs | seconds | time over the first's | peak memory |",
        "|---|---|---|---|---|",
    ]
    for device, jobs in arms:
        seconds = [run.seconds for run in runs[device, jobs]]
        ratios = [a / b.seconds for a, b in zip(seconds, runs[options.device[0], jobs], strict=True)]
        cells = [device, str(jobs), bench_formats.spread(seconds, "{:.2f}"), bench_formats.spread(ratios, "{:.2f}")]
        peak = statistics.median(run.peak for run in runs[device, jobs])
        lines.append(f"| {' | '.join([*cells, f'{peak / 1e6:.0f} MB'])} |")
    with files.atomic_write(options.out) as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if len(sums) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
