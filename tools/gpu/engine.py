"""One engine of vLLM, timed at several acceptances and concurrencies: run by tools/gpu/run.py, a process for each.

Imports vLLM, says so by the file that its argument names, reads its order as a line of JSON from standard input, starts
vLLM, says that it is ready by a file, and times its cells once it is told to go, since other engines may start beside
it. vLLM's core, a process that begins by importing this file, imports vLLM too and waits at a gate until the GPU is
free. Writes one file per cell. Drafts are accepted at a given rate, whatever they are (``rejection_sample_method:
synthetic``): what is timed is the work of a pass, whose cost does not depend on the weights, times the number of passes
that an acceptance length means.
"""

import faulthandler
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 512
MOST_TOKENS = 1024


def main() -> None:
    """Start the engine and time its cells."""
    faulthandler.register(signal.SIGUSR1)  # run.py asks so where an engine is stuck
    # What runs in vLLM's worker below is sent to it as a function.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    import vllm.entrypoints.llm  # noqa: F401

    Path(sys.argv[1]).touch()
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    os.environ["MXQ_GATE"] = json.dumps(order["signs"])
    llm = _engine(order)
    started_s = time.time() - Path(order["signs"]["gate"]).stat().st_mtime
    print(f"engine started in {started_s:.1f} s", flush=True)
    Path(order["signs"]["ready"]).touch()
    if not sys.stdin.readline():
        return
    about = {"engine": order["engine"], "started_s": round(started_s, 1), **_machine()}
    for concurrency in order["concurrency"]:
        _timed(llm, concurrency, seed=-1, output_tokens=64)  # warm, at the cell's own concurrency
    # Repeats are rounds over all cells, so that what drifts meanwhile is no property of a cell.
    rounds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    run = os.getppid()
    for repeat in range(order["repeats"]):
        for workload, length in order["acceptance"].items():
            if length is not None:
                _accept(llm, length, order["engine"]["num_speculative_tokens"])
            for concurrency in (c for name, c in order["cells"] if name == workload):
                if os.getppid() != run:
                    os._exit(1)  # nobody waits for it, and another run may be timing
                timed = _timed(llm, concurrency, seed=repeat, output_tokens=OUTPUT_TOKENS)
                rounds.setdefault((workload, concurrency), []).append(timed)
                _write(order, about, workload, length, concurrency, rounds[workload, concurrency])
                print(f"{workload} c{concurrency} repeat {repeat}: {timed['tokens_per_s']:.1f} tok/s", flush=True)
    os._exit(0)  # without vLLM's leave-taking of seconds: run.py ends its workers


def _wait_at_gate() -> None:
    faulthandler.register(signal.SIGUSR1)
    import vllm.v1.engine.core  # noqa: F401

    signs = json.loads(os.environ["MXQ_GATE"])
    Path(signs["here"]).touch()
    engine = os.getppid()
    while not Path(signs["gate"]).exists():
        time.sleep(0.05)
        if os.getppid() != engine or not Path(f"/proc/{signs['run']}").exists():
            os._exit(1)  # nobody will open it


def _engine(order: dict[str, Any]) -> Any:
    from vllm import LLM

    engine, most = order["engine"], max(order["concurrency"])
    speculation: dict[str, Any] | None = None
    if engine["method"] != "ar":
        tokens = engine["num_speculative_tokens"]
        speculation = {
            "method": engine["method"],
            "num_speculative_tokens": tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": next(iter(order["acceptance"].values())),
        }
        if engine["method"] == "dflash":
            speculation["model"] = order["drafter"]
            if order["drafter_attention"]:
                speculation["attention_backend"] = order["drafter_attention"]
    return LLM(
        model=order["target"],
        speculative_config=speculation,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=MOST_TOKENS,
        max_num_seqs=most,
        max_num_batched_tokens=max(8192, most * PROMPT_TOKENS),
        gpu_memory_utilization=0.02,  # of what is free as it starts; its cache has a size of its own
        language_model_only=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **order["engine_args"],
    )


def _accept(llm: Any, length: float, tokens: int) -> None:
    """Set the acceptance length of the running engine; the passes' own code reads it at each pass."""

    def set_rates(worker: Any, conditional: list[float]) -> int:
        rates = worker.model_runner.rejection_sampler.synthetic_conditional_rates
        rates.copy_(rates.new_tensor(conditional))
        return len(conditional)

    full = int(length - 1)
    # vLLM's own rates for a length: so many drafts always, the next one at times, none behind it.
    conditional = [1.0] * full + [length - 1 - full] + [0.0] * tokens
    assert llm.collective_rpc(set_rates, args=(conditional[:tokens],)) == [tokens]


def _timed(llm: Any, concurrency: int, *, seed: int, output_tokens: int) -> dict[str, Any]:
    """Answer as many prompts as are in flight at once, all of one length, and return what it took."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [{"prompt_token_ids": _ids(seed * 1000 + number, vocabulary)} for number in range(concurrency)]
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    before, begin = _counters(llm), time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    wall_s = time.perf_counter() - begin
    counted = {name: value - before[name] for name, value in _counters(llm).items()}
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert produced == concurrency * output_tokens, f"{produced} tokens"
    ttft = [output.metrics.first_token_latency for output in outputs if output.metrics is not None]
    return {
        "wall_s": round(wall_s, 5),
        "output_tokens": produced,
        "tokens_per_s": round(produced / wall_s, 2),
        "median_ttft_s": round(statistics.median(ttft), 5) if ttft else None,
        "last_ttft_s": round(max(ttft), 5) if ttft else None,  # far behind the median: not all ran at once
        **counted,
    }


def _ids(seed: int, vocabulary: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(vocabulary * 3 // 4) for _ in range(PROMPT_TOKENS)]  # special tokens are at the end


def _counters(llm: Any) -> dict[str, int]:
    names = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}
    found = dict.fromkeys(names.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += int(metric.value)
    return found


def _machine() -> dict[str, Any]:
    import torch
    import vllm

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"versions": {"vllm": vllm.__version__, "torch": torch.__version__}, "gpu": gpu}


def _write(
    order: dict[str, Any],
    about: dict[str, Any],
    workload: str,
    length: float | None,
    concurrency: int,
    repeats: list[dict[str, Any]],
) -> None:
    cell = {
        "format": 1,
        **about,
        "workload": workload,
        "acceptance_length": length,
        "concurrency": concurrency,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "engine_args": order["engine_args"],
        "env": order["env"],
        "drafter_attention": order["drafter_attention"],
        "finished": len(repeats) == order["repeats"],
        "repeats": repeats,
    }
    write_cell(Path(order["results"]) / f"{order['name']}-{workload}-c{concurrency}.json", cell)


def write_cell(path: Path, cell: dict[str, Any]) -> None:
    """Write a cell whole or not at all."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(cell, indent=1) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _wait_at_gate()
