#!/usr/bin/env python3
"""Time ``mxq report`` of a run as large as the published ones, and put the result into benchmarks/REPORT.md.

    python tools/bench_report.py

The run is made up: five workloads of 128 prompts, two targets, plain decoding and six configurations (MTP and DFlash,
budgets of 3, 7 and 15), answers of 512 tokens, one request at a time. Whole commands are timed, from a shell's view:
start, reading and checking the records, statistics, pictures, and writing.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mxq import files
from mxq.engines import Completion, Sampling
from mxq.evaluate import Cell, Plan, Record, Settings
from mxq.evaluate.directory import open_run
from mxq.evaluate.matrix import Model, TokenizedWorkload, arms
from mxq.workloads import Prompt, Workload

WORKLOADS = ("gsm8k", "humaneval", "math500", "mbpp", "mt-bench")
PROMPTS, TOKENS = 128, 512
FORMATS = ("html", "md", "csv")


def main(argv: Sequence[str] | None = None) -> int:
    """Make the run, time the commands, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/REPORT.md"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mxq-report-") as directory:
        run = Path(directory) / "run"
        plan = made_up()
        record(plan, run)
        rows = [timed(run, Path(directory) / f"report.{kind}") for kind in FORMATS]
        size = sum(path.stat().st_size for path in run.rglob("records.jsonl"))
    speculative = sum(cell.arm.method != "ar" for cell in plan.cells())
    hardware = files.hardware()
    text = "\n".join(
        [
            "# How long a report takes",
            "",
            "`python tools/bench_report.py`",
            "",
            f"A made-up run of {speculative} speculative and {len(plan.cells()) - speculative} plain cells with "
            f"{PROMPTS} prompts each and answers of {TOKENS} tokens: {files.size(size)} of records. Each line is a "
            f"whole command, `mxq report RUN -o report.html` and so on, on {hardware['cpu']}, {hardware['cores']} "
            f"cores, {os.environ.get('OMP_NUM_THREADS', 'all')} threads, load average {os.getloadavg()[0]:.1f} at the "
            "end: where others compute too, CPU time is nearer to what the command takes alone.",
            "",
            "| written | wall clock, s | CPU time, s | most memory | size |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )
    print(text)
    with files.atomic_write(options.out) as file:
        file.write(text + "\n")
    return 0


def made_up() -> Plan:
    """Return what is measured."""
    workloads = []
    for name in WORKLOADS:
        prompts = tuple(Prompt(f"{name}-{i}", (("user", f"{name} {i}"),)) for i in range(PROMPTS))
        workloads.append(TokenizedWorkload(Workload(name, prompts, name), tuple((i,) for i in range(PROMPTS))))
    targets = {role: Model(f"made-up/{role}", Path(f"/{role}"), {"weights": {}}) for role in ("bf16", "mxfp4")}
    settings = Settings(
        sampling=Sampling(),
        max_tokens=TOKENS,
        thinking=False,
        template_sha256="made up",
        eos_token_ids=(0,),
        dtype="bfloat16",
        device="cpu",
        engine="in-process",
        semantics=1,
    )
    drafter = Model("made-up/drafter", Path("/drafter"), {"weights": {}})
    every = arms(("bf16", "mxfp4"), ("mtp", "dflash"), (3, 7, 15))
    return Plan(targets, drafter, every, tuple(workloads), ((1,),), settings)


def record(plan: Plan, path: Path) -> None:
    """Fill the run directory."""
    around = {"versions": files.versions(), "hardware": files.hardware(), "engine": {"name": "in-process"}}
    with open_run(path, plan, around) as cells:
        for cell in cells.values():
            # All at once: what comes one by one waits for the disk each time.
            cell.close()
            cell.complete(list(answers(cell.cell)), {"ran_beside": []})


def answers(cell: Cell) -> Iterator[Record]:
    """Yield the records of a cell: prompts differ, MXFP4 accepts a little less."""
    k = cell.arm.num_speculative_tokens
    for number in range(PROMPTS):
        prompt = f"{cell.workload}-{number}"
        ease = random.Random(prompt).gauss(0.85, 0.06) - 0.01 * (cell.arm.target == "mxfp4")
        rng = random.Random(f"{cell.arm.label}/{prompt}")
        passes: list[int] = []
        while k and 1 + sum(passes) + len(passes) < TOKENS:
            passes.append(next((n for n in range(k) if rng.random() > ease), k))
        ids = tuple(random.Random(f"answer/{prompt}").choices(range(100_000), k=TOKENS))
        seconds = 0.02 * (len(passes) if k else TOKENS)
        completion = Completion(
            token_ids=ids,
            finish_reason="length",
            ttft_s=0.02,
            duration_s=0.02 + seconds,
            target_s=seconds,
            draft_s=0.0,
            accepted=tuple(passes),
            drafted=(k,) * len(passes),
        )
        yield Record.of(prompt, 10, completion, " ".join(map(str, ids)), 1e9 + number)


def timed(run: Path, out: Path) -> str:
    """Run the command and return its line of the table."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "mxq", "--quiet", "report", str(run), "-o", str(out)])
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    if status:
        raise SystemExit(f"mxq report ended with {os.waitstatus_to_exitcode(status)}")
    cpu, memory = used.ru_utime + used.ru_stime, files.size(used.ru_maxrss * 1024)
    return f"| {out.suffix[1:]} | {wall:.1f} | {cpu:.1f} | {memory} | {files.size(out.stat().st_size)} |"


if __name__ == "__main__":
    sys.exit(main())
