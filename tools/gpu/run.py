"""Time published cells on one GPU: real shapes, made-up weights, drafts accepted at the published rate.

    python tools/gpu/run.py --out results          # everything, in order of importance
    python tools/gpu/run.py --models Qwen3.5-27B --workloads humaneval --seconds 560 --out results

vLLM is that of the Python that runs this. An engine is a process of its own, started once for all of its cells; one
whose cells are all there is passed over, so that the same command goes on where an earlier one was cut off. Nothing is
started that would not end within --seconds, by what earlier starts took. Compiled code is kept under --cache.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PUBLISHED = HERE.parents[1] / "mxq" / "analysis" / "published.json"
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from shapes import DRAFTERS, write_drafter, write_target  # noqa: E402

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
_COLD_S, _WARM_S, _CELL_S = 280.0, 75.0, 8.0


def main() -> None:
    """Run what there is time for."""
    options = _options()
    deadline = time.monotonic() + options.seconds
    published = json.loads(options.published.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    started = 0
    for engine in _engines(options):
        acceptance = _acceptance(published, engine, options.workloads)
        name = "-".join(str(part) for part in engine.values())
        if not acceptance or _complete(options, name, acceptance):
            continue
        cells = len(acceptance) * len(options.concurrency) * options.repeats
        left = deadline - time.monotonic()
        needed = (_WARM_S if started else _COLD_S) + cells * _CELL_S if options.strict else 90.0
        if left < needed:
            print(f"{name}: not started, {left:.0f} s are left", flush=True)
            continue
        started += 1
        code = _run(options, engine, name, acceptance, left)
        print(f"{name}: exit code {code}, {deadline - time.monotonic():.0f} s are left", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--precisions", nargs="+", default=["bf16", "mxfp4"], choices=["bf16", "mxfp4"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="end before so many have passed")
    parser.add_argument("--strict", action="store_true", help="start nothing that may be cut off")
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="acceptance lengths")
    parser.add_argument("--work", type=Path, default=Path("/tmp/mxq-gpu"), help="shapes and logs")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/mxq-gpu/cache"), help="compiled code")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _engines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in options.models:
        for method in options.methods:
            for precision in options.precisions:
                kind, _, tokens = method.partition("-")
                yield {
                    "model": model,
                    "precision": precision,
                    "method": kind,
                    "num_speculative_tokens": int(tokens or 0),
                }


def _acceptance(published: dict[str, Any], engine: dict[str, Any], workloads: list[str]) -> dict[str, float | None]:
    """Return what to time: acceptance lengths as published for bf16, by workload.

    The published ones for MXFP4 are of DFlash with 15 drafts only, and within 3 % of these; with the same ones a
    difference between precisions is one of speed alone.
    """
    if engine["method"] == "ar":
        return {"any": None}
    lengths = published["acceptance_bf16"][engine["model"]][engine["method"]][str(engine["num_speculative_tokens"])]
    return {name: lengths[published["workloads"].index(name)] for name in workloads}


def _complete(options: argparse.Namespace, name: str, acceptance: dict[str, float | None]) -> bool:
    paths = [options.out / f"{name}-{workload}-c{c}.json" for workload in acceptance for c in options.concurrency]
    return all(path.exists() and json.loads(path.read_text())["finished"] for path in paths)


def _run(
    options: argparse.Namespace,
    engine: dict[str, Any],
    name: str,
    acceptance: dict[str, float | None],
    left_s: float,
) -> int | str:
    from mxq.engines.vllm_log import lines_of, read_log

    env = {**ENV, "VLLM_CACHE_ROOT": str(options.cache / "vllm"), "TRITON_CACHE_DIR": str(options.cache / "triton")}
    order = {
        "engine": engine,
        "name": name,
        "target": str(write_target(engine["model"], engine["precision"], options.work)),
        "drafter": str(write_drafter(engine["model"], options.work)),
        "acceptance": acceptance,
        "concurrency": options.concurrency,
        "repeats": options.repeats,
        "engine_args": ENGINE_ARGS,
        "env": env,
        "results": str(options.out),
    }
    log = options.work / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "engine.py")],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(order).encode(), timeout=max(1.0, left_s - 10))
            code: int | str = process.returncode
        except subprocess.TimeoutExpired:
            code = "cut off"
        finally:
            _end(process)
    with log.open("rb") as stream:
        facts = read_log(lines_of(stream))
    chosen = {
        "linear": facts.linear_kernels,
        "moe": facts.moe_backends,
        "attention": facts.attention_backends,
        "gdn": facts.gdn_kernels,
        "emulated": facts.emulated,
    }
    for path in options.out.glob(f"{name}-*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"kernels": chosen}, indent=1) + "\n")
    if code != 0:
        print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), flush=True)
    return code


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the engine and its workers, and wait until the GPU's memory is free again."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(3)


if __name__ == "__main__":
    main()
