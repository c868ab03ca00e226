#!/usr/bin/env python3
"""Measure every arm of the testbed on vLLM servers, by ``mxq eval``, into benchmarks/EVAL-CPU.md or EVAL-H200.md.

    python tools/eval_testbed.py --hardware cpu             # in an environment that has vLLM's CPU build; half an hour
    python tools/eval_testbed.py --hardware h200 --seconds 530 --steps vllm page --tar runs.tar.gz
    python tools/eval_testbed.py --hardware h200 --steps in-process page        # elsewhere, with the runs unpacked

The two targets are measured side by side, each with both of its precisions. Beside them the in-process engine decodes
the same prompts, and the page says whether acceptance is the same: by a bootstrap over prompts, paired.

What is measured is in --work, and is not measured again: the same command goes on where an earlier one ended, by
--seconds, by a crash or by Ctrl-C. If a run fails, each target and method is tried in a run of its own, so that one
that does not start costs no more than itself. Each step is logged with its time; what it printed is in WORK/logs.
"""

import argparse
import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxq import files, testbed
from mxq.analysis import summarise
from mxq.engines.base import Method
from mxq.engines.launch import HARDWARE
from mxq.errors import MxqError
from mxq.evaluate import Arm, Record, RecordedCell, Run, read_run
from mxq.evaluate.records import conversations
from mxq.report.tables import show
from mxq.stats import Counts, Resampling, acceptance_intervals, count, identity, length_difference

METHODS: tuple[Method, ...] = ("mtp", "dflash")
TARGETS = ("bf16", "mxfp4")
_MXQ = (sys.executable, "-c", "import sys; sys.argv[0] = 'mxq'; from mxq.cli import main; sys.exit(main())")
_WIDTH = 118
_RESAMPLING = Resampling(confidence=0.999)
_DONE = (0, 3)
"""Exit codes of ``mxq eval`` when everything is measured: 3 is that it contradicts itself, which its tables show."""
_ENDING_S = 45.0
"""To end servers, write the page and the tar."""


@dataclass(frozen=True)
class Machine:
    """How the testbed is measured on a kind of machine.

    Attributes:
        form: recipe and form of the MXFP4 targets that vLLM has kernels for there.
        workloads, limit, max_tokens, concurrency: what fits into the time.
        at_once: servers of one model that are started together and stay.
        engine_args, env: what vLLM's server is given.
    """

    form: tuple[str, str]
    workloads: tuple[str, ...]
    limit: int
    max_tokens: int
    concurrency: tuple[int, ...]
    at_once: int
    engine_args: tuple[str, ...]
    env: tuple[str, ...]


MACHINES = {
    "cpu": Machine(
        ("mxfp4", "quark"),
        testbed.WORKLOADS,
        4,
        96,
        (1, 4),
        1,
        ("language-model-only", "max-num-seqs=32"),
        ("VLLM_CPU_KVCACHE_SPACE=1",),
    ),
    "h200": Machine(
        # Hopper has no MXFP4 arithmetic: Marlin's kernels have weight-only MXFP4 in this form; others are emulated.
        ("mxfp4-weight-only", "compressed-tensors"),
        ("functions", "chat"),
        16,
        96,
        (1, 16),
        14,
        (
            # Compiling takes a minute for every arm, and models of this size gain nothing that the page is about.
            *("language-model-only", "enforce-eager", "gdn-prefill-backend=triton"),
            *("max-model-len=2048", "max-num-seqs=32", "max-num-batched-tokens=8192"),
            # What is free cannot be told while others start.
            *("kv-cache-memory-bytes=1000000000", "gpu-memory-utilization=0.02"),
        ),
        ("VLLM_USE_FLASHINFER_SAMPLER=0", "OMP_NUM_THREADS=1"),
    ),
}


class Steps:
    """Runs commands in the work directory until there is no time left, and logs each."""

    def __init__(self, work: Path, seconds: float) -> None:
        self._work = work
        self._begin = time.monotonic()
        self._deadline = self._begin + seconds - _ENDING_S
        self._stop = threading.Event()
        (work / "logs").mkdir(parents=True, exist_ok=True)
        here = str(Path(__file__).resolve().parents[1])
        paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        caches = {"VLLM_CACHE_ROOT": str(work / "cache" / "vllm"), "TRITON_CACHE_DIR": str(work / "cache" / "triton")}
        self._env = {**caches, **os.environ, **quiet, "PYTHONPATH": os.pathsep.join([here, *paths])}
        self._env["PATH"] = f"{_programs(work)}{os.pathsep}{os.environ.get('PATH', '')}"

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"[{time.monotonic() - self._begin:6.0f} s] {text}", flush=True)

    def stop(self) -> None:
        """Have what runs end."""
        self._stop.set()

    @property
    def over(self) -> bool:
        """Whether nothing more is to be started."""
        return self._stop.is_set() or time.monotonic() > self._deadline

    def __call__(self, name: str, words: Sequence[str]) -> bool:
        """Run ``mxq`` with words; return whether it did its work."""
        if self.over:
            self.say(f"{name}: not started, the time is over")
            return False
        self.say(f"{name}: mxq {shlex.join(words)}")
        log, begin = self._work / "logs" / f"{name}.log", time.monotonic()
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [*_MXQ, *words],
                cwd=self._work,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = self._wait(process)
        self.say(f"{name}: exit code {code} after {time.monotonic() - begin:.0f} s: {last_line(log)}")
        return code in _DONE

    def _wait(self, process: "subprocess.Popen[bytes]") -> int:
        while process.poll() is None and not self.over:
            self._stop.wait(0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends its servers, and keeps what is measured
            try:
                process.wait(_ENDING_S - 10)
            except subprocess.TimeoutExpired:
                process.kill()  # servers end with it
        return process.wait()


def _programs(work: Path) -> Path:
    """Return a directory with ``vllm`` as a program: one that was unpacked somewhere, and not installed, has none."""
    place = work.resolve() / "bin"
    place.mkdir(exist_ok=True)
    python = place / "python"
    if not python.exists():
        python.symlink_to(sys.executable)
    program = place / "vllm"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m vllm.entrypoints.cli.main "$@"\n')
    program.chmod(0o755)
    return place


def last_line(log: Path) -> str:
    """Return the error that a step ended with, else the last line that it printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-5:] if line.lower().startswith("error")]
    return (errors or lines or ["nothing was printed"])[-1][:300]


def measure(model: str, number: int, options: argparse.Namespace, steps: Steps) -> None:
    """Measure one of the testbed's targets in both precisions, by vLLM and in process."""
    recipe, form = MACHINES[options.hardware].form
    packed = given = f"{model}-mxfp4"
    if not (options.work / packed).exists():
        words = ["quantize", f"testbed:{model}", packed, "--recipe", recipe, "--format", form]
        if not steps(f"{model}-quantize", words):
            return
    if options.dequantized:
        given = f"{model}-dequantized"
        if not (options.work / given).exists() and not steps(f"{model}-dequantize", ["dequantize", packed, given]):
            return
    spec = {"bf16": f"testbed:{model}", "mxfp4": given}
    if "vllm" in options.steps:
        on_servers = _on_servers(number, options)
        whole = _words(options, spec, TARGETS, METHODS, f"vllm/{model}")
        if not steps(f"{model}-vllm", [*whole, *on_servers]):
            for target in TARGETS:
                for method in METHODS:
                    name = f"{model}-{target}-{method}"
                    steps(f"{name}-vllm", [*_words(options, spec, (target,), (method,), f"vllm/{name}"), *on_servers])
    if "in-process" in options.steps:
        steps(f"{model}-in-process", _words(options, spec, TARGETS, METHODS, f"in-process/{model}"))


def _words(
    options: argparse.Namespace, spec: dict[str, str], targets: Sequence[str], methods: Sequence[str], out: str
) -> list[str]:
    words = ["eval"]
    words += [word for target in targets for word in (f"--{target}", spec[target])]
    words += [word for method in methods for word in ("--spec", method)]
    words += ["--drafter", f"{spec['bf16']}-dflash"] if "dflash" in methods else []
    words += [word for k in options.budgets for word in ("-k", str(k))]
    words += [word for name in options.workloads for word in ("--workload", name)]
    return [*words, "--limit", str(options.limit), "--max-tokens", str(options.max_tokens), "--out", out]


def _on_servers(number: int, options: argparse.Namespace) -> list[str]:
    machine = MACHINES[options.hardware]
    words = ["--engine", "vllm", "--hardware", options.hardware, "--servers-at-once", str(machine.at_once)]
    words += [word for count in options.concurrency for word in ("--concurrency", str(count))]
    words += [word for argument in machine.engine_args for word in ("--engine-arg", argument)]
    words += [word for variable in machine.env for word in ("--env", variable)]
    if options.hardware == "cpu" and len(options.models) > 1:
        words += ["--env", f"VLLM_CPU_OMP_THREADS_BIND={number % (os.cpu_count() or 1)}"]
    return [*words, "--gpus", options.gpus] if options.gpus else words


def page(options: argparse.Namespace, steps: Steps, command: str) -> str:
    """Return the page of what is measured."""
    hardware = files.hardware()
    recipe, form = MACHINES[options.hardware].form
    runs = {model: list(_runs(options.work / "vllm", model, steps)) for model in options.models}
    versions = sorted(
        {str(run.info["environment"]["engine"].get("version")) for found in runs.values() for run in found}
    )
    simulated = (
        " MXFP4 targets are served dequantized, as this build has no kernels for them." if options.dequantized else ""
    )
    lines = [
        f"# The testbed on vLLM servers, {'on an H200' if options.hardware == 'h200' else 'on a CPU'}",
        "",
        f"`{command}`",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores, load average {os.getloadavg()[2]:.1f} over the last 15 "
        f"minutes; vLLM {', '.join(versions)}, mxq {files.versions()['mxq']}.",
        "",
        f"Recipe {recipe}, in the form of {form}. Greedy, at most {options.max_tokens} tokens an answer, the first "
        f"{options.limit} prompts of each workload. The two models are measured side by side on one machine, so that "
        f"speeds say less than acceptance.{simulated}",
        "",
    ]
    for model, found in runs.items():
        lines += [f"## testbed:{model}", ""]
        for run in found:
            lines += [f"`{_recorded(run, options)}`", "", "```", *_tables(run), "```", ""]
        if not found:
            lines += ["Nothing is measured.", ""]
        own = list(_runs(options.work / "in-process", model, steps))
        if found and own:
            lines += ["### vLLM beside the in-process engine", "", *beside(found, own), ""]
        lines += _missing(model, found, options)
    return "\n".join(lines).rstrip() + "\n"


def _runs(where: Path, model: str, steps: Steps) -> Iterator[Run]:
    """Yield the runs of a model that have something; the whole one alone where it is finished."""
    for path in sorted(where.glob(f"{model}*")):
        try:
            run = read_run(path)
        except MxqError as error:
            steps.say(f"{path.name}: {error}")
            continue
        if any(cell.finished for cell in run.cells):
            yield run
        if run.finished and path.name == model:
            return


def _recorded(run: Run, options: argparse.Namespace) -> str:
    """Return the command that a run was started with, as its log has it."""
    words = run.info.get("command") or []
    return shlex.join(map(str, words)) if words else f"mxq eval --show {run.path.relative_to(options.work)}"


def _tables(run: Run) -> list[str]:
    from rich.console import Console

    text = io.StringIO()
    try:
        show(summarise(run), Console(file=text, width=_WIDTH))
    except MxqError as error:
        return [str(error)]
    return [line.rstrip() for line in text.getvalue().rstrip().splitlines()]


def beside(served: Sequence[Run], own: Sequence[Run]) -> list[str]:
    """Return a table: pooled acceptance by vLLM and in process for each arm, over the prompts that both have answered.

    By request where the server says it: the difference with its interval. Else, whether what the server counted lies
    in the in-process engine's own interval. Both intervals are bootstraps over prompts, at 99.9 %.
    """
    theirs, mine = ({(c.arm, c.workload): c for run in runs for c in _first(run)} for runs in (served, own))
    lines = [
        "| target | method | K | prompts | vLLM | in process | difference, or in-process interval (99.9 %) "
        "| workloads in the interval | answers identical |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(arm for arm, _ in theirs if arm.method != "ar"):
        pairs = [(theirs[place], mine[place]) for place in theirs if place[0] == arm and place in mine]
        pairs = [(a, b) for a, b in pairs if _prompts(a) == _prompts(b)]
        if not pairs:
            continue
        inside = sum(_agrees([pair])[1] for pair in pairs)
        same = sum(
            identity([r.token_ids for r in a.records], [r.token_ids for r in b.records]).identical for a, b in pairs
        )
        prompts = sum(len(a.records) for a, _ in pairs)
        cells = [arm.target, arm.method, str(arm.num_speculative_tokens), str(prompts), *_agrees(pairs)[0]]
        lines.append(f"| {' | '.join([*cells, f'{inside} of {len(pairs)}', f'{same} of {prompts}'])} |")
    return lines


Pair = tuple[RecordedCell, RecordedCell]


def _agrees(pairs: Sequence[Pair]) -> tuple[list[str], bool]:
    """Return the lengths of some cells by vLLM and in process, with the interval; and whether they agree."""
    said, own = (_counts(cells) for cells in zip(*pairs, strict=True))
    if said and own:
        found = length_difference(own, said, _RESAMPLING)
        if found is None:
            return ["-", "-", "-"], False
        lengths = [f"{1 + counts.accepted.sum() / counts.passes.sum():.3f}" for counts in (said, own)]
        interval = f"{found.estimate:+.3f} ({found.lower:+.3f} to {found.upper:+.3f})"
        return [*lengths, interval], found.holds(0.0)
    counters = [cell.facts.get("counters") or {} for cell, _ in pairs]
    drafts = sum(counted.get("drafts") or 0 for counted in counters)
    mine = acceptance_intervals(own, _RESAMPLING) if own else None
    if not drafts or mine is None:
        return ["-", "-", "-"], False
    length = 1 + sum(counted.get("accepted") or 0 for counted in counters) / drafts
    inside = f"in process {mine.pooled.lower:.3f} to {mine.pooled.upper:.3f}"
    return [f"{length:.3f}", f"{mine.pooled.estimate:.3f}", inside], mine.pooled.holds(length)


def _counts(cells: Sequence[RecordedCell]) -> Counts | None:
    """Count the passes of one arm's cells in several workloads; None where they are not known by request."""
    records = [(f"{cell.workload}/{name}", r) for cell in cells for name, r in _in_conversations(cell)]
    known = [passes for _, record in records if (passes := record.passes) is not None]
    if len(known) < len(records):
        return None
    return count(known, [name for name, _ in records], cells[0].arm.num_speculative_tokens)


def _in_conversations(cell: RecordedCell) -> Iterator[tuple[str, Record]]:
    return zip(conversations(cell.records), cell.records, strict=True)


def _first(run: Run) -> list[RecordedCell]:
    """Return the finished cells at the lowest concurrency, first repeat."""
    lowest = min(cell.concurrency for cell in run.cells)
    return [cell for cell in run.cells if cell.finished and (cell.concurrency, cell.repeat) == (lowest, 0)]


def _prompts(cell: RecordedCell) -> list[str]:
    return [record.prompt_id for record in cell.records]


def _missing(model: str, found: Sequence[Run], options: argparse.Namespace) -> list[str]:
    """Say which arms have no finished cell, and what each step of the model printed last."""
    budgets = [(method, k) for method in METHODS for k in options.budgets]
    arms = [Arm(target, method, k) for target in TARGETS for method, k in budgets]
    wanted = [*(Arm(target, "ar") for target in TARGETS), *arms]
    there = {cell.arm for run in found for cell in run.cells if cell.finished}
    missing = [arm.label for arm in wanted if arm not in there]
    if not missing:
        return []
    logs = [f"* {log.stem}: {last_line(log)}" for log in sorted((options.work / "logs").glob(f"{model}*.log"))]
    return [f"Not measured: {', '.join(missing)}. What each step printed last:", "", *logs, ""]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hardware", required=True, choices=list(MACHINES))
    add("--work", type=Path, default=Path("eval-testbed"), help="models, runs and logs")
    add("--steps", nargs="+", choices=["vllm", "in-process", "page"], default=["vllm", "in-process", "page"])
    add("--models", nargs="+", choices=testbed.NAMES, default=list(testbed.NAMES))
    add("--budgets", nargs="+", type=int, default=[3, 7, 15])
    add("--workloads", nargs="+", help="(default: what fits, by hardware; so the next three)")
    add("--limit", type=int)
    add("--max-tokens", type=int)
    add("--concurrency", nargs="+", type=int)
    add("--gpus", help="as for mxq eval")
    add("--dequantized", action="store_true", help="serve MXFP4 targets dequantized: this vLLM has no kernels for them")
    add("--seconds", type=float, default=1e9, help="end before so many have passed")
    add("--tar", type=Path, help="put all runs and logs in here")
    add("--out", type=Path)
    options = parser.parse_args(argv)
    assert options.hardware in HARDWARE
    for name in ("workloads", "limit", "max_tokens", "concurrency"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(MACHINES[options.hardware], name))
    options.work = options.work.resolve()
    steps = Steps(options.work, options.seconds)
    for where in ("vllm", "in-process"):
        (options.work / where).mkdir(exist_ok=True)
    lanes = [
        threading.Thread(target=measure, args=(model, number, options, steps))
        for number, model in enumerate(options.models)
    ]
    try:
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    except KeyboardInterrupt:
        steps.stop()
        for lane in lanes:
            lane.join()
        steps.say("interrupted; the same command goes on")
    if "page" in options.steps:
        out = options.out or Path("benchmarks") / f"EVAL-{options.hardware.upper()}.md"
        command = shlex.join(["python", "tools/eval_testbed.py", *(sys.argv[1:] if argv is None else argv)])
        text = page(options, steps, command)
        with files.atomic_write(out) as file:
            file.write(text)
        steps.say(f"written to {out}")
    if options.tar:
        with tarfile.open(options.tar, "w:gz") as tar:
            for name in ("vllm", "in-process", "logs"):
                tar.add(options.work / name, name)
        steps.say(f"{options.tar} has the runs and logs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
