#!/usr/bin/env python3
"""Time the in-process verify loop: DFlash and MTP against autoregressive decoding, each target in both precisions.

    python tools/bench_decode.py                    # the testbed on this CPU, into benchmarks/DECODE.md
    python tools/bench_decode.py --device cuda      # the same on a GPU, into benchmarks/DECODE-CUDA.md

What is compared shares one process, one set of prompts and one stretch of time: every repeat runs all arms on all
prompts, one prompt at a time and every other repeat backwards, and a speedup is the ratio of two arms' times within one
repeat. The tables show the median and the range over repeats. Each target has a process of its own, so that its peak
memory is its own. The workload is the one of which DFlash drafts most at K=15 ("most predictable").

MXFP4 targets are emulated (weights dequantized, activations rounded before every quantized product): their speed says
what the emulation costs and nothing about MXFP4 kernels.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mxq import decode, files, testbed, workloads
from mxq.checkpoint import Checkpoint, resolve
from mxq.convert import plan as planning
from mxq.convert import recipe
from mxq.convert import run as conversion
from mxq.progress import note, progress
from mxq.workloads.chat import ChatTemplate

BUDGETS = (3, 7, 15)
ARMS = [("ar", 0), *(("mtp", k) for k in BUDGETS), *(("dflash", k) for k in BUDGETS)]
Arm = tuple[str, int]


@dataclass(frozen=True)
class Job:
    """One target to time."""

    title: str
    target: Path
    drafter: Path
    device: str
    threads: int
    workload: str | None
    prompts: int
    repeats: int
    max_new_tokens: int


@dataclass
class Sums:
    """One arm's numbers in one repeat, over all prompts."""

    seconds: float = 0.0
    target_s: float = 0.0
    draft_s: float = 0.0
    tokens: int = 0
    accepted: int = 0
    passes: int = 0
    same: int = 0

    @property
    def outside(self) -> float:
        """Share of the time that is in neither model."""
        return 1 - (self.target_s + self.draft_s) / self.seconds


def measure(job: Job) -> list[str]:
    """Time one target's arms and return its part of the report, in Markdown."""
    torch.set_num_threads(job.threads)
    target = decode.load_target(job.target, device=job.device)
    drafters = {
        "mtp": decode.load_drafter(None, target, "mtp"),
        "dflash": decode.load_drafter(job.drafter, target, "dflash"),
    }
    template = ChatTemplate(job.target, thinking=False)

    def prompts(workload: str, count: int) -> list[list[int]]:
        return [template.encode(prompt.messages) for prompt in workloads.load(workload, count).prompts]

    def generate(arm: Arm, ids: list[int]) -> decode.Generation:
        method, k = arm
        return decode.generate(
            target,
            ids,
            drafter=drafters.get(method),
            num_speculative_tokens=k,
            max_new_tokens=job.max_new_tokens,
            eos_token_ids=stop,
        )

    def acceptance(workload: str) -> float:
        runs = [generate(("dflash", 15), ids) for ids in prompts(workload, 4)]
        accepted = [n for run in runs for n in run.accepted]
        return 1 + sum(accepted) / max(len(accepted), 1)

    stop = _end_of_text(job.target)
    workload = job.workload or max(testbed.WORKLOADS, key=acceptance)
    ids = prompts(workload, job.prompts)
    expected = [generate(("ar", 0), prompt).token_ids for prompt in ids]
    for arm in ARMS:  # warm up: a GPU meets each new shape with work of its own (kernels chosen, memory taken)
        for prompt in ids:
            generate(arm, prompt)

    repeats: list[dict[Arm, Sums]] = []
    with progress(job.title, job.repeats * len(ids) * len(ARMS), "requests") as advance:
        for repeat in range(job.repeats):
            sums = {arm: Sums() for arm in ARMS}
            for prompt, tokens in zip(ids, expected, strict=True):
                for arm in ARMS if repeat % 2 == 0 else ARMS[::-1]:
                    _add(sums[arm], generate(arm, prompt), tokens)
                    advance(1)
            repeats.append(sums)
    return _report(job, workload, repeats)


def _end_of_text(target: Path) -> list[int]:
    stop = json.loads((target / "generation_config.json").read_text())["eos_token_id"]
    return [stop] if isinstance(stop, int) else stop


def _add(sums: Sums, run: decode.Generation, expected: list[int]) -> None:
    sums.seconds += run.duration_s
    sums.target_s += run.target_s
    sums.draft_s += run.draft_s
    sums.tokens += len(run.token_ids)
    sums.accepted += sum(run.accepted)
    sums.passes += len(run.accepted) or len(run.token_ids) - 1
    sums.same += run.token_ids == expected


def _report(job: Job, workload: str, repeats: list[dict[Arm, Sums]]) -> list[str]:
    if job.device.startswith("cuda"):
        memory = f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB (tensors)"
    else:
        # The kernel counts in KiB on Linux.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        memory = f"peak resident memory {peak:.0f} MiB (Python and libraries included)"
    lines = [
        f"### {job.title}",
        "",
        f"Workload {workload}, {memory}.",
        "",
        "| method | K | acceptance length (pooled) | tokens/s | speedup | outside both models | target ms/pass "
        "| draft ms/pass | outputs equal to AR's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        method, k = arm
        runs = [sums[arm] for sums in repeats]
        all_passes = sum(run.passes for run in runs)
        length = f"{1 + sum(run.accepted for run in runs) / all_passes:.2f}" if k else "1"
        speed = _spread([run.tokens / run.seconds for run in runs], "{:.0f}")
        # Per token, because outputs may differ by near-ties and then end at another length.
        plain = [sums["ar", 0].seconds / sums["ar", 0].tokens for sums in repeats]
        ratios = [base / (run.seconds / run.tokens) for base, run in zip(plain, runs, strict=True)]
        speedup = _spread(ratios, "{:.2f}") if k else "1"
        outside = f"{100 * statistics.median(run.outside for run in runs):.1f} %"
        target_ms = 1e3 * sum(run.target_s for run in runs) / all_passes
        draft_ms = f"{1e3 * sum(run.draft_s for run in runs) / all_passes:.2f}" if k else ""
        same = f"{runs[0].same} of {job.prompts}"
        cells = [method, str(k or ""), length, speed, speedup, outside, f"{target_ms:.2f}", draft_ms, same]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _spread(values: Sequence[float], form: str) -> str:
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low}–{high})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch's name of the device (default: cpu)")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads (default: 1, fastest for models this small)"
    )
    parser.add_argument("--models", nargs="+", default=list(testbed.NAMES), choices=testbed.NAMES)
    parser.add_argument("--workload", help="testbed workload (default: the most predictable)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    cuda = options.device.startswith("cuda")
    out = options.out or Path("benchmarks") / ("DECODE-CUDA.md" if cuda else "DECODE.md")
    sections: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models:
            source, drafter = resolve(f"testbed:{name}"), resolve(f"testbed:{name}-dflash")
            packed = Path(temporary) / name
            note(f"converting testbed:{name} to MXFP4")
            conversion.run(planning.plan(Checkpoint.open(source), recipe.load("mxfp4")), packed, f"testbed:{name}")
            for precision, target in (("bf16", source), ("MXFP4, emulated", packed)):
                job = Job(
                    title=f"testbed:{name}, {precision}",
                    target=target,
                    drafter=drafter,
                    device=options.device,
                    threads=options.threads,
                    workload=options.workload,
                    prompts=options.prompts,
                    repeats=options.repeats,
                    max_new_tokens=options.max_new_tokens,
                )
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    sections += pool.apply(measure, (job,))
    head = [
        f"# The verify loop in process, on {'a GPU' if cuda else 'a CPU'}",
        "",
        f"`{shlex.join(['python', 'tools/bench_decode.py', *(sys.argv[1:] if argv is None else argv)])}`",
        "",
        f"Greedy, one request at a time, bf16 arithmetic; {options.prompts} prompts, {options.repeats} interleaved "
        "repeats: median (lowest–highest). The time includes the prompt. Speedup is over autoregressive decoding of "
        "the same target. MXFP4 is emulated, so its speed says nothing about MXFP4 kernels.",
        "",
        f"{_machine(options.device)}, {options.threads} CPU thread{'s' if options.threads > 1 else ''}, load average "
        f"{os.getloadavg()[2]:.1f} over the last 15 minutes; "
        + ", ".join(f"{name} {version}" for name, version in files.versions("torch", "transformers").items()),
        "",
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(out) as file:
        file.write("\n".join([*head, *sections]).rstrip() + "\n")
    print("\n".join(sections))
    note(f"written to {out}")
    return 0


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    hardware = files.hardware()
    return f"{hardware['cpu']}, {hardware['cores']} cores"


if __name__ == "__main__":
    sys.exit(main())
