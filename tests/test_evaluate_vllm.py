"""The testbed on the real vLLM: started by mxq, its answers those of decoding in process but for near-ties."""

from pathlib import Path

import pytest
import torch

from mxq import decode, testbed
from mxq.decode.ties import parting
from mxq.evaluate import Request, measure
from mxq.evaluate.fleet import Servers
from mxq.evaluate.servers import measure_on_servers

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

LIGHT = ("language-model-only", "max-model-len=512", "max-num-seqs=4")
SMALL = ("VLLM_CPU_KVCACHE_SPACE=1",)
"""What makes servers start sooner, and two of them fit; no answer changes."""


def test_a_server_answers_as_decoding_in_process(tmp_path: Path) -> None:
    request = Request(
        targets={"bf16": "testbed:dense"},
        methods=["dflash"],
        budgets=[15],
        workloads=["chat"],
        limit=4,
        max_tokens=48,
    )
    here = {cell.arm: cell for cell in measure(request, tmp_path / "here").cells}
    asked = Request(
        **(vars(request) | {"concurrencies": [1, 4], "device": "cpu", "engine_args": LIGHT, "engine_env": SMALL})
    )
    run = measure_on_servers(asked, Servers(hardware="cpu", at_once=2), tmp_path / "there")
    path = testbed.path("testbed:dense")
    exact, served = (decode.load_target(path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    template = template_of(path)
    assert run.finished
    for cell in run.cells:
        assert [check for check in cell.facts["checks"] if not check["ok"]] == []
        assert (cell.facts["counters"] or {})["requests"] == 4
        assert cell.facts["server"]["build"] == "vllm-cpu"
        assert cell.facts["passes_from"] == "server"
        assert (cell.facts["lost"], cell.facts["server"]["started"]) == ([], 1)
        for record, other, prompt in zip(cell.records, here[cell.arm].records, template, strict=True):
            assert record.prompt_tokens == other.prompt_tokens == len(prompt)
            apart = parting(exact, served, prompt, record.token_ids, other.token_ids)
            assert apart is None or apart.near_tie, f"{cell.arm.label} on {record.prompt_id}: {apart}"
            if apart is None:
                assert record.text == other.text
    for cell in run.cells:
        if cell.arm.method == "dflash":
            assert cell.facts["near_ties"] is not None
            assert all(tie["gap"] < 0.5 for tie in cell.facts["near_ties"])
            accepted = [count for record in cell.records for count in record.accepted or ()]
            assert 1 + sum(accepted) / len(accepted) > 2


def template_of(path: Path) -> list[list[int]]:
    """Return the prompts as token ids."""
    from mxq.workloads import ChatTemplate, load

    template = ChatTemplate(path, thinking=False)
    return [template.encode(prompt.messages) for prompt in load("chat", 4).prompts]
