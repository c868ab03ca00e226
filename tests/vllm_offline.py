"""Answers of the real vLLM, several engines one after the other in one process: what costs most is to import it.

``python vllm_offline.py FILE``: FILE has jobs, a list of objects, and gets what they gave, under ``answers``::

    model        a directory
    speculation  vLLM's speculative_config, or null
    prompts      lists of token ids
    tokens       how many an answer has
    without      parts of the plugin to be undone first: what a test proves must fail without it
    answers      [{tokens, logprobs: of each token, accepted: per verify pass or null}, ...]
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # processors may be fewer, and others', in CI
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["QUARK_DISABLE_VLLM_PLUGIN"] = "1"


def ask(jobs: list[dict[str, Any]], directory: Path, timeout_s: float = 600) -> str:
    """Run jobs in a process of their own, give each its ``answers``, and return the log."""
    file, log = directory / "jobs.json", directory / "vllm.log"
    file.write_text(json.dumps(jobs))
    with log.open("wb") as stream:
        result = subprocess.run(
            [sys.executable, __file__, file], stdout=stream, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    text = log.read_text(errors="replace")
    assert result.returncode == 0, text[-4000:]
    for job, done in zip(jobs, json.loads(file.read_text()), strict=True):
        job.update(done)
    return text


def main(file: Path) -> None:
    jobs = json.loads(file.read_text())
    for job in jobs:
        with _without(job["without"]):
            job["answers"] = _answers(job)
        gc.collect()
    file.write_text(json.dumps(jobs))


def _answers(job: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"],
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=1,
        limit_mm_per_prompt={"image": 0, "video": 0},
        speculative_config=job["speculation"],
        per_request_spec_decode_metrics="detailed" if job["speculation"] else "none",
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=0)
    answers = []
    for prompt in job["prompts"]:  # one at a time: what is beside a request changes how it is rounded
        (done,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        output = done.outputs[0]
        metrics = output.spec_decode_metrics.to_dict() if job["speculation"] else None
        answers.append(
            {
                "tokens": list(output.token_ids),
                "logprobs": [
                    position[token].logprob for position, token in zip(output.logprobs, output.token_ids, strict=True)
                ],
                "accepted": metrics and metrics["per_step_accepted"],
            }
        )
    return answers


@contextmanager
def _without(parts: list[str]) -> Iterator[None]:
    from vllm import _custom_ops as operators
    from vllm.plugins import load_general_plugins

    from mxq.engines.plugin import experts

    load_general_plugins()
    with pytest.MonkeyPatch.context() as patch:
        if "rounded experts" in parts:
            patch.setattr(experts, "fake_quantize", lambda x: x)
        if "norms" in parts:
            patch.setattr(operators, "rms_norm", operators.rms_norm.__wrapped__)
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]))
