"""Time published cells on one GPU: real shapes, made-up weights, drafts accepted at the published rate.

    python tools/gpu/run.py --out results          # everything, in order of importance
    python tools/gpu/run.py --models Qwen3.5-27B --workloads humaneval --seconds 560 --out results

vLLM is that of the Python that runs this. An engine is a process of its own, started once for all of its cells; one
whose cells are all there is passed over, so that the same command goes on where an earlier one was cut off. Engines
that the GPU has room for are started together and timed one after the other, while the others wait: a start takes
minutes, mostly of compiling. Compiled code is kept under --cache.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PUBLISHED = HERE.parents[1] / "mxq" / "analysis" / "published.json"
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from engine import MOST_TOKENS  # noqa: E402
from shapes import DRAFTERS, memory_needed, write_drafter, write_target  # noqa: E402

METHODS = ("ar", "dflash-15", "mtp-3", "dflash-7", "mtp-7", "dflash-3", "mtp-15")
WORKLOADS = ("humaneval", "gsm8k", "mt-bench")
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "OMP_NUM_THREADS": "8",
}
ENGINE_ARGS = {"gdn_prefill_backend": "triton"}
_LEAST_S = 90.0
"""No engine is started with less time left."""
_OVERHEAD = 5.0e9
"""Bytes of an engine's activations, graphs and context."""
_SLACK = 1.15
"""vLLM's cache consists of blocks of one size for all kinds of layers."""
_SHARE = 0.95
"""Of the GPU's memory that engines are given together."""


@dataclass(eq=False)
class Engine:
    """A process of ``engine.py``, which imports vLLM, is told what to do, says when it is ready, and is told to go.

    Attributes:
        about: model, precision, method and budget.
        acceptance: lengths to set, by workload.
        weights, cache: bytes of weights, and of K/V and states.
    """

    about: dict[str, Any]
    acceptance: dict[str, float | None]
    weights: float
    cache: float
    work: Path
    _process: "subprocess.Popen[str]" = field(init=False)
    _over: bool = field(default=False, init=False)
    _since: float = field(default=0.0, init=False)

    @property
    def name(self) -> str:
        """What its files are called."""
        return "-".join(str(part) for part in self.about.values())

    @property
    def bytes(self) -> float:
        """All that it takes of the GPU's memory."""
        return self.weights + self.cache + _OVERHEAD

    @property
    def log(self) -> Path:
        """Where it prints to."""
        return self.work / f"{self.name}.log"

    @property
    def ready(self) -> Path:
        """The file that is there once it has started."""
        return self.work / f"{self.name}.ready"

    def load(self, env: dict[str, str]) -> None:
        """Start the process: it imports vLLM and waits."""
        self.ready.unlink(missing_ok=True)
        self._since = time.time()
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py")],
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
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    @property
    def ended(self) -> int | None:
        """Its exit code."""
        return self._process.poll()

    def end(self, wait_s: float = 3.0) -> None:
        """End it and its workers, and wait until the GPU's memory is free again."""
        if self._over:
            return
        self._over = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        time.sleep(wait_s)


def main() -> None:
    """Run what there is time for."""
    options = _options()
    deadline = time.monotonic() + options.seconds - 10
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    env = {**ENV, "VLLM_CACHE_ROOT": str(options.cache / "vllm"), "TRITON_CACHE_DIR": str(options.cache / "triton")}
    groups = list(_groups(list(_engines(options)), options.memory * 1e9 * _SHARE))
    loaded: list[Engine] = []

    def load(group: Sequence[Engine]) -> None:
        for engine in group:
            engine.load(env)
            loaded.append(engine)

    try:
        for number, group in enumerate(groups):
            names = " and ".join(engine.name for engine in group)
            left = deadline - time.monotonic()
            if left < _LEAST_S:
                print(f"{names}: not started, {left:.0f} s are left", flush=True)
                continue
            if number == 0:
                load(group)
            for engine in group:
                engine.tell(json.dumps(_order(options, engine, env)))
            if number + 1 < len(groups):
                load(groups[number + 1])  # imports while this one starts
            _time(options, group, deadline)
    finally:
        for engine in loaded:
            engine.end(wait_s=0)


def _time(options: argparse.Namespace, group: Sequence[Engine], deadline: float) -> None:
    """Wait until a group has started, and let one after the other time its cells."""
    begin = time.monotonic()
    while time.monotonic() < deadline and any(engine.ended is None and not engine.ready.exists() for engine in group):
        time.sleep(0.2)
    print(f"started after {time.monotonic() - begin:.0f} s", flush=True)
    for engine in group:
        engine.tell("go")
        while time.monotonic() < deadline and engine.ended is None:
            time.sleep(0.2)
        code = engine.ended
        engine.end()
        _add_log(options, engine)
        said = "cut off" if code is None else f"exit code {code}"
        print(f"{engine.name}: {said}, {deadline - time.monotonic():.0f} s are left", flush=True)
        if code != 0:
            print("\n".join(engine.log.read_text(errors="replace").splitlines()[-15:]), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--precisions", nargs="+", default=["bf16", "mxfp4"], choices=["bf16", "mxfp4"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="end before so many have passed")
    parser.add_argument("--memory", type=float, default=150.7, help="GB of the GPU (default: an H200's)")
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="acceptance lengths")
    parser.add_argument("--work", type=Path, default=Path("/tmp/mxq-gpu"), help="shapes and logs")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/mxq-gpu/cache"), help="compiled code")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _engines(options: argparse.Namespace) -> Iterator[Engine]:
    """Yield the engines that have cells to be timed, in order of importance."""
    published = json.loads(options.published.read_text())
    most = max(options.concurrency)
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
                needed = memory_needed(model, precision, kind, int(tokens or 0), most, MOST_TOKENS)
                weights = needed.target + needed.drafter
                room = options.memory * 1e9 * _SHARE - weights - _OVERHEAD
                engine = Engine(
                    about,
                    _acceptance(published, about, options.workloads),
                    weights,
                    min(_SLACK * (needed.kv + needed.state), room),
                    options.work,
                )
                if not _complete(options, engine):
                    yield engine


def _groups(engines: Sequence[Engine], room: float) -> Iterator[list[Engine]]:
    """Yield engines that are started together: the next one, and later ones that there is room for beside it."""
    waiting = list(engines)
    while waiting:
        group = [waiting.pop(0)]
        for engine in list(waiting):
            if sum(other.bytes for other in (*group, engine)) <= room:
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


def _complete(options: argparse.Namespace, engine: Engine) -> bool:
    paths = [options.out / f"{engine.name}-{name}-c{c}.json" for name in engine.acceptance for c in options.concurrency]
    return all(path.exists() and len(json.loads(path.read_text())["repeats"]) >= options.repeats for path in paths)


def _order(options: argparse.Namespace, engine: Engine, env: dict[str, str]) -> dict[str, Any]:
    about = engine.about
    return {
        "engine": about,
        "name": engine.name,
        "target": str(write_target(about["model"], about["precision"], options.work)),
        "drafter": str(write_drafter(about["model"], options.work)),
        "acceptance": engine.acceptance,
        "concurrency": options.concurrency,
        "repeats": options.repeats,
        "engine_args": {
            **ENGINE_ARGS,
            "kv_cache_memory_bytes": round(engine.cache),
            "compilation_config": {"cudagraph_capture_sizes": _graphs(options.concurrency, about)},
        },
        "env": env,
        "results": str(options.out),
        "ready": str(engine.ready),
    }


def _graphs(concurrency: Sequence[int], about: dict[str, Any]) -> list[int]:
    """Return the numbers of tokens that a pass is captured for: a start captures each, vLLM's own list has 51.

    Those of every concurrency, and of so many requests in between that the last ones of a cell are hardly padded.
    """
    each = 1 + about["num_speculative_tokens"]
    return [each * requests for requests in sorted({1, 2, 4, *range(8, max(concurrency) + 1, 4), *concurrency})]


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
        path.write_text(json.dumps(json.loads(path.read_text()) | added, indent=1) + "\n")


if __name__ == "__main__":
    main()
