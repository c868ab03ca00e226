"""What a GPU has of a layer is what vLLM's own classes load there; sizes that vLLM refuses are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mxq.layouts import split
from mxq.layouts.paths import Deployment

VLLM = json.loads((Path(__file__).parent / "data" / "vllm_split.json").read_text())
RUNS = [pytest.param(run, id=f"{run['case']}-tp{run['tp']}-dp{run['dp']}{'-ep' * run['ep']}") for run in VLLM["runs"]]


def whole(case: str, module: str) -> tuple[int, int]:
    """N and K of a module: all rows and columns that it has on a single GPU; of experts they are alike."""
    (run,) = (run for run in VLLM["runs"] if run["case"] == case and (run["tp"], run["dp"]) == (1, 1))
    module = re.sub(r"(?<=\.experts\.)\d+", "0", module)
    for held in run["ranks"][0].values():
        for one in held[:-1] if isinstance(held, list) else [held]:
            rows = [stop for name, _, stop in one["rows"] if name == module]
            if rows:
                return max(rows), one["columns"][1]
    raise AssertionError(module)


@pytest.mark.parametrize("run", RUNS)
def test_a_gpu_has_what_vllm_loads_there(run: dict[str, Any]) -> None:
    config = VLLM["configs"][run["case"]]
    on = Deployment(run["tp"], run["tp"] * run["dp"] if run["ep"] else 1)
    found = split.indivisible(config, {}, on.tp)
    if "refused" in run:
        assert any(one.verdict == "refused" for one, _ in found), run["refused"]
        return
    assert not [one for one, _ in found if one.verdict == "refused"]
    if "ranks" not in run:
        return
    assert not found
    assert len(run["ranks"]) == on.gpus
    for rank, modules in enumerate(run["ranks"]):
        for name, held in modules.items():
            ones = held[:-1] if isinstance(held, list) else [held]
            tp = on.tp
            if ".experts." in name:
                tp = on.of_expert
                count = config["num_experts"] // on.ep
                assert held[-1] == count
                first = count * rank if run["ep"] else 0
                assert {e.split(".experts.")[1].split(".")[0] for one in ones for e, *_ in one["rows"]} == {
                    str(first),
                    str(first + count - 1),
                }
            elif ".shared_expert." in name:
                tp = on.of_shared_expert(config["shared_expert_intermediate_size"], packed=False)
            for one in ones:
                for source in dict.fromkeys(module for module, *_ in one["rows"]):
                    part = split.part(source, *whole(run["case"], source), config, tp, rank % tp)
                    assert [[source, *rows] for rows in part.rows] == [row for row in one["rows"] if row[0] == source]
                    assert [*part.columns] == one["columns"]


def test_the_oracle_covers_what_matters() -> None:
    """Of heads repeated, experts whole, a shared expert whole, and refusals of every kind there are cases."""
    refused = [run for run in VLLM["runs"] if "refused" in run]
    keys = {one.key for run in refused for one, _ in split.indivisible(VLLM["configs"][run["case"]], {}, run["tp"])}
    assert {"num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "vocab_size"} <= keys
    (half,) = (run for run in VLLM["runs"] if run["tp"] == 16)
    assert "refused" not in half  # half a key head on each GPU, and vLLM does not mind
    assert [one.verdict for one, _ in split.indivisible(VLLM["configs"]["moe"], {}, 16)] == ["wrong"]
    assert Deployment(2, 8).of_shared_expert(48, packed=False) == 1
    assert Deployment(8, 8).of_shared_expert(48, packed=False) == 8
    assert Deployment(8, 8).of_shared_expert(48, packed=True) == 1


@pytest.mark.parametrize(
    ("module", "n", "k", "rule"),
    [
        ("x.linear_attn.in_proj_z", 96, 64, "linear_num_value_heads = 6"),
        ("x.linear_attn.in_proj_qkv", 2 * 128 + 96, 64, "linear_num_value_heads = 6"),
        ("x.linear_attn.out_proj", 64, 96, "linear_num_value_heads = 6"),
        ("x.self_attn.k_proj", 96, 64, "num_key_value_heads = 6"),
        ("x.mlp.down_proj", 64, 98, "K = 98"),
        ("x.mlp.gate_proj", 98, 64, "N = 98"),
    ],
)
def test_half_a_head_is_refused_though_its_rows_divide(module: str, n: int, k: int, rule: str) -> None:
    text = {"linear_num_value_heads": 6, "linear_value_head_dim": 16, "num_key_value_heads": 6}
    text |= {"linear_num_key_heads": 8, "linear_key_head_dim": 16}
    with pytest.raises(split.IndivisibleError, match=f"{rule} is not a multiple of 4"):
        split.part(module, n, k, text, 4)
    assert split.part(module, n, k, text, 2).sizes in ((n // 2, k), (n, k // 2))
