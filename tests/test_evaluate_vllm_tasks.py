"""lm-eval's tasks on the real vLLM: likelihoods of prompts, and generated text."""

import json
import math
from pathlib import Path

import pytest
import torch
from decoding import reference, reference_logits
from lm_tasks import write_tasks

from mxq import testbed
from mxq.analysis.tasks import task_scores
from mxq.evaluate import Request
from mxq.evaluate.fleet import Servers
from mxq.evaluate.servers import measure_on_servers
from mxq.evaluate.tasks import Asked

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]


def test_likelihoods_are_the_models_own(tmp_path: Path) -> None:
    request = Request(
        targets={"bf16": "testbed:dense"},
        methods=["ar"],
        budgets=[],
        workloads=["chat"],
        limit=1,
        max_tokens=4,
        device="cpu",
        concurrencies=[4],
        engine_args=("language-model-only", "max-model-len=512", "max-num-seqs=4"),
        engine_env=("VLLM_CPU_KVCACHE_SPACE=1",),
    )
    asked = Asked(("toy_choice", "toy_text"), write_tasks(tmp_path / "tasks", samples=4))
    run = measure_on_servers(request, Servers(hardware="cpu"), tmp_path / "run", asked)
    assert [(score.task, score.scores["bf16"].samples) for score in task_scores(run)] == [
        ("toy_choice", 4),
        ("toy_choice", 4),
        ("toy_text", 4),
    ]
    path = testbed.path("testbed:dense")
    model = reference(path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    lines = (tmp_path / "run/lm-eval/bf16/toy_choice/samples_toy_choice.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        for (context, continuation), ((said, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            ids = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
            begin = len(tokenizer(context, add_special_tokens=False)["input_ids"])
            assert begin < len(ids)
            logs = torch.log_softmax(reference_logits(model, ids).double(), dim=-1)
            own = math.fsum(float(logs[at - 1, ids[at]]) for at in range(begin, len(ids)))
            assert said == pytest.approx(own, rel=0.05, abs=0.5), (context, continuation)
