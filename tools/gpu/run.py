"""Time published cells on one GPU: real shapes, made-up weights, drafts accepted at the published rate.

    python tools/gpu/run.py --out results          # everything, in order of importance
    python tools/gpu/run.py --models Qwen3.5-27B --workloads humaneval --seconds 560 --out results

vLLM is that of the Python that runs this. An engine is a process of its own, started once for all of its cells; one
whose cells are all there is passed over, so that the same command goes on where an earlier one was cut off. Engines
that the GPU has room for are started together and timed one after the other, while the others wait: a start takes
minutes, mostly of compiling. The next ones import vLLM meanwhile, and wait at a gate before they touch the GPU; nothing
imports or compiles while a cell is timed. Compiled code is kept under --cache, and is the same for all budgets of a
method: vLLM's key to it has the cache's size and the graphs' in it, so that these are the same too.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PUBLISHED = HERE.parents[1] / "mxq" / "analysis" / "published.json"
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from engine import OUTPUT_TOKENS, PROMPT_TOKENS, write_cell  # noqa: E402
from shapes import DRAFTERS, Blocks, blocks_needed, weights_needed, write_drafter, write_target  # noqa: E402

REQUEST = PROMPT_TOKENS + OUTPUT_TOKENS
METHODS = ("ar", "dflash-15", "mtp-3", "dflash-7", "mtp-7", "dflash-3", "mtp-15")
BUDGETS = sorted({int(method.partition("-")[2] or 0) for method in METHODS})
WORKLOADS = ("humaneval", "gsm8k", "mt-bench")
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "OMP_NUM_THREADS": "8",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the gate is in what a spawned process imports
    # Made-up weights draft the same token K times, which goes to the same experts: a pass would read too few of them.
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
}
ENGINE_ARGS: dict[str, Any] = {"gdn_prefill_backend": "triton", "kv_cache_memory_bytes": 2**30}
"""That many bytes stand for "do not measure what is free": the number of blocks is given."""
_LEAST_S = 90.0
"""No engine is started with less time left."""
_OVERHEAD = 5.0e9
"""Bytes of an engine's activations, graphs and context."""
_MORE_BLOCKS = 8
"""Beside those that requests take: vLLM keeps one for itself."""
_LEAST_REQUESTS = 2
"""That an engine has room for which compiles only: vLLM wants room for one of all the tokens that it allows."""
_SHARE = 0.95
"""Of the GPU's memory that engines are given together."""


@dataclass(eq=False)
class Engine:
    """A process of ``engine.py``, which imports vLLM, is told what to do, says when it is ready, and is told to go.

    Attributes:
        about: model, precision, method and budget.
        acceptance: lengths to set, by workload.
        weights: bytes.
        blocks, number: its cache of K/V and states.
        compiles: it is started for the code that it compiles, and times nothing.
    """

    about: dict[str, Any]
    acceptance: dict[str, float | None]
    weights: float
    blocks: Blocks
    number: int
    work: Path
    compiles: bool = False
    _process: "subprocess.Popen[str] | None" = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)

    @property
    def name(self) -> str:
        """What its files are called."""
        return "-".join(str(part) for part in self.about.values()) + ("-compiles" if self.compiles else "")

    @property
    def family(self) -> tuple[str, str, str]:
        """What has the same compiled code."""
        return self.about["model"], self.about["precision"], self.about["method"]

    @property
    def bytes(self) -> float:
        """All that it takes of the GPU's memory."""
        return self.weights + self.number * self.blocks.bytes + _OVERHEAD

    @property
    def log(self) -> Path:
        """Where it prints to."""
        return self.work / f"{self.name}.log"

    @property
    def alone_compiling(self) -> "Engine":
        """The same with next to no cache, which is started for its code only."""
        return replace(self, number=_LEAST_REQUESTS * self.blocks.each + _MORE_BLOCKS, compiles=True)

    def sign(self, of: str) -> Path:
        """Return a file that is there once it has imported vLLM, waits ("here"), may start ("gate"), or is "ready"."""
        return self.work / f"{self.name}.{os.getpid()}.{of}"

    def reached(self, of: str) -> bool:
        """Whether it is so far, or has ended."""
        return self.ended is not None or self.sign(of).exists()

    def left(self, options: argparse.Namespace) -> list[tuple[str, int]]:
        """Return the cells that are not there with all their repeats: workload and concurrency."""
        return [
            (workload, c)
            for workload in self.acceptance
            for c in options.concurrency
            if not _finished(options.out / f"{self.name}-{workload}-c{c}.json", options.repeats)
        ]

    def load(self, env: dict[str, str]) -> None:
        """Start the process: it imports vLLM and waits."""
        for sign in ("imported", "here", "gate", "ready"):
            self.sign(sign).unlink(missing_ok=True)
        self._since = time.time()
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py"), str(self.sign("imported"))],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
                text=True,
            )

    def cells(self, directory: Path) -> list[Path]:
        """Return the files that it has written: those of an earlier start are not its own."""
        return [path for path in directory.glob(f"{self.name}-*.json") if path.stat().st_mtime >= self._since]

    def tell(self, line: str) -> None:
        """Send it a line: first its order, then that it may go."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    @property
    def ended(self) -> int | None:
        """Its exit code."""
        return self._process.poll() if self._process else None

    def end(self, wait_s: float = 1.5) -> None:
        """End it and its workers, and wait until the GPU's memory is free again."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        time.sleep(wait_s)

    @property
    def silent_s(self) -> float:
        """For how long it has printed nothing; vLLM prints every ten seconds while it answers."""
        return time.time() - self.log.stat().st_mtime

    def say_where(self) -> None:
        """Let it and its core print what they are at; others of its processes die of it."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGUSR1)
        time.sleep(2)


def main() -> None:
    """Run what there is time for; exit code 1 if an engine failed, beside others that did not."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines have sessions of their own, and are ended below
    deadline = time.monotonic() + options.seconds - 10
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    env = {**ENV, "VLLM_CACHE_ROOT": str(options.cache / "vllm"), "TRITON_CACHE_DIR": str(options.cache / "triton")}
    groups = list(_groups(list(_engines(options)), options.memory * 1e9 * _SHARE))
    for first in groups[:2]:
        _load(first, env)
    failed = False
    try:
        _order(options, groups[0] if groups else (), env)
        for group, following, later in zip_longest(groups, groups[1:], groups[2:], fillvalue=()):
            left = deadline - time.monotonic()
            if left < _LEAST_S:
                print(f"{_names(group)}: not started, {left:.0f} s are left", flush=True)
                continue
            begin = time.monotonic()
            late = begin + options.start
            _wait(group, "here", min(late, deadline))
            for engine in group:
                engine.sign("gate").touch()
            # All that imports does so while this group starts, and nothing while it is timed.
            _order(options, following, env)
            _load(later, env)
            _wait(group, "ready", min(late, deadline))
            print(f"{_names(group)}: started after {time.monotonic() - begin:.0f} s", flush=True)
            _wait(following, "here", min(late, deadline))
            _wait(later, "imported", min(late, deadline))
            for engine in group:
                if engine.compiles:
                    engine.end()
            for engine in group:
                if not engine.compiles:
                    failed |= _time(options, engine, deadline)
    finally:
        for engine in chain(*groups):
            engine.end(wait_s=0)
    sys.exit(failed)


def _names(group: Sequence[Engine]) -> str:
    return " and ".join(engine.name for engine in group)


def _load(group: Sequence[Engine], env: dict[str, str]) -> None:
    for engine in group:
        engine.load(env)


def _order(options: argparse.Namespace, group: Sequence[Engine], env: dict[str, str]) -> None:
    for engine in group:
        engine.tell(json.dumps(_ordered(options, engine, env)))


def _wait(group: Sequence[Engine], sign: str, deadline: float) -> None:
    """Wait until all engines of a group are so far."""
    while time.monotonic() < deadline and not all(engine.reached(sign) for engine in group):
        time.sleep(0.1)


def _time(options: argparse.Namespace, engine: Engine, deadline: float) -> bool:
    """Let a started engine time its cells, and end it; return whether it failed, as no lack of time is."""
    started = engine.reached("ready")
    if started:
        engine.tell("go")
        engine.log.touch()
    while time.monotonic() < deadline and started and engine.ended is None and engine.silent_s < options.stuck:
        time.sleep(0.1)
    code, stuck = engine.ended, ""
    if code is None and time.monotonic() < deadline:
        stuck = (
            f"printed nothing for {engine.silent_s:.0f} s" if started else f"not started after {options.start:.0f} s"
        )
        engine.say_where()
    engine.end()
    _add_log(options, engine)
    said = f"stuck, {stuck}" if stuck else "cut off" if code is None else f"exit code {code}"
    print(f"{engine.name}: {said}, {deadline - time.monotonic():.0f} s are left", flush=True)
    if code != 0:
        print("\n".join(engine.log.read_text(errors="replace").splitlines()[-15:]), flush=True)
    return bool(stuck or code)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--precisions", nargs="+", default=["bf16", "mxfp4"], choices=["bf16", "mxfp4"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--concurrency", nargs="+", type=_positive, default=[1, 8, 32])
    parser.add_argument("--repeats", type=_positive, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="end before so many have passed")
    parser.add_argument("--stuck", type=float, default=60, help="end an engine that has printed nothing for so long")
    parser.add_argument("--start", type=float, default=600, help="end an engine that has not started after so long")
    parser.add_argument("--drafter-attention", help="of DFlash's drafter, as vLLM calls it (default: vLLM's choice)")
    parser.add_argument("--memory", type=float, default=150.7, help="GB of the GPU (default: an H200's)")
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="acceptance lengths")
    parser.add_argument("--work", type=Path, default=Path("/tmp/mxq-gpu"), help="shapes and logs")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/mxq-gpu/cache"), help="compiled code")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def _engines(options: argparse.Namespace) -> Iterator[Engine]:
    """Yield the engines that have cells to be timed, in order of importance."""
    published = json.loads(options.published.read_text())
    most, memory = max(options.concurrency), options.memory * 1e9 * _SHARE
    for model in options.models:
        for method in options.methods:
            for precision in options.precisions:
                kind, _, tokens = method.partition("-")
                about = {
                    "model": model,
                    "precision": precision,
                    "method": kind,
                    "num_speculative_tokens": int(tokens or 0),
                }
                weights = weights_needed(model, precision, kind)
                room = memory - weights - _OVERHEAD
                blocks = blocks_needed(model, kind, int(tokens or 0), BUDGETS[-1], REQUEST + BUDGETS[-1])
                least = _LEAST_REQUESTS * blocks.each + _MORE_BLOCKS
                number = max(least, min(most * blocks.each + _MORE_BLOCKS, int(room / blocks.bytes)))
                acceptance = _acceptance(published, about, options.workloads)
                engine = Engine(about, acceptance, weights, blocks, number, options.work)
                if not engine.left(options):
                    continue
                if engine.bytes > memory:
                    short = (engine.bytes - memory) / 1e9
                    print(f"{engine.name}: not started, the GPU is {short:.1f} GB too small", flush=True)
                    continue
                yield engine


def _groups(engines: Sequence[Engine], room: float) -> Iterator[list[Engine]]:
    """Yield engines that are started together: the next one, and others that there is room for beside it.

    Where one compiles, which takes most of a start, others that compile something else come first; those without room
    for their cache compile all the same, and are started again later. Two that would compile the same do not start
    together.
    """
    waiting, compiled = list(engines), set[tuple[str, str, str]]()
    while waiting:
        group = [waiting.pop(0)]
        free = room - group[0].bytes
        others = sorted(waiting, key=lambda engine: engine.bytes) if group[0].family not in compiled else []
        compiled.add(group[0].family)
        joined: list[Engine] = []
        for engine in others:
            if engine.family not in compiled and engine.alone_compiling.bytes <= free:
                free -= engine.alone_compiling.bytes
                joined.append(engine)
                compiled.add(engine.family)
        for engine in joined:
            more = engine.bytes - engine.alone_compiling.bytes
            whole = more <= free
            if whole:
                free -= more
                waiting.remove(engine)
            group.append(engine if whole else engine.alone_compiling)
        families = [engine.family for engine in group]
        for engine in list(waiting):
            if engine.family in compiled and engine.family not in families and engine.bytes <= free:
                free -= engine.bytes
                group.append(engine)
                waiting.remove(engine)
        yield group


def _acceptance(published: dict[str, Any], engine: dict[str, Any], workloads: list[str]) -> dict[str, float | None]:
    """Return what to time: acceptance lengths as published for bf16, by workload.

    The published ones for MXFP4 are of DFlash with 15 drafts only, and within 3 % of these; with the same ones a
    difference between precisions is one of speed alone.
    """
    if engine["method"] == "ar":
        return {"any": None}
    lengths = published["acceptance_bf16"][engine["model"]][engine["method"]][str(engine["num_speculative_tokens"])]
    return {name: lengths[published["workloads"].index(name)] for name in workloads}


def _finished(path: Path, repeats: int) -> bool:
    return path.exists() and len(json.loads(path.read_text())["repeats"]) >= repeats


def _ordered(options: argparse.Namespace, engine: Engine, env: dict[str, str]) -> dict[str, Any]:
    about = engine.about
    return {
        "engine": about,
        "name": engine.name,
        "target": str(write_target(about["model"], about["precision"], options.work)),
        "drafter": str(write_drafter(about["model"], options.work)),
        "drafter_attention": options.drafter_attention if about["method"] == "dflash" else None,
        "acceptance": engine.acceptance,
        "concurrency": options.concurrency,
        "cells": engine.left(options),
        "repeats": options.repeats,
        "engine_args": {
            **ENGINE_ARGS,
            "block_size": engine.blocks.tokens,
            "num_gpu_blocks_override": engine.number,
            "compilation_config": {"cudagraph_capture_sizes": _graphs(options.concurrency, about["method"])},
        },
        "env": env,
        "results": str(options.out),
        "signs": {sign: str(engine.sign(sign)) for sign in ("here", "gate", "ready")} | {"run": str(os.getpid())},
    }


def _graphs(concurrency: Sequence[int], method: str) -> list[int]:
    """Return the numbers of tokens that a pass is captured for: a start captures each, vLLM's own list has 51.

    Those of every concurrency, and of so many requests in between that the last ones of a cell are hardly padded; for
    every budget, since they are a part of the key under which compiled code is kept.
    """
    requests = {1, 2, 4, *range(8, max(concurrency) + 1, 4), *concurrency}
    each = [1] if method == "ar" else [1 + budget for budget in BUDGETS if budget]
    return sorted({number * tokens for number in requests for tokens in each})


def _add_log(options: argparse.Namespace, engine: Engine) -> None:
    """Add to an engine's cells what its log says was used, and for how many of the longest requests there was room."""
    from mxq.engines.vllm_log import lines_of, read_log

    with engine.log.open("rb") as stream:
        facts = read_log(lines_of(stream))
    chosen = {
        "linear": facts.linear_kernels,
        "moe": facts.moe_backends,
        "attention": facts.attention_backends,
        "gdn": facts.gdn_kernels,
        "emulated": facts.emulated,
    }
    room = re.search(
        r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", engine.log.read_text(errors="replace")
    )
    added = {"kernels": chosen, "room_for": float(room[1]) if room else None}
    for path in engine.cells(options.out):
        write_cell(path, json.loads(path.read_text()) | added)


if __name__ == "__main__":
    main()
