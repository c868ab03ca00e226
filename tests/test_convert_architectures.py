"""Plans at the published models' real dimensions, from headers alone."""

import json
import math
import sys
from pathlib import Path

import architectures
import peak_memory
import pytest

_PLAN = """
import sys
from pathlib import Path
from mxq.checkpoint import Checkpoint
from mxq.convert import recipe
from mxq.convert.plan import plan
made = plan(Checkpoint.open(Path(sys.argv[1])), recipe.load("mxfp4"))
import json
print(json.dumps({
    "before": made.bytes_before,
    "after": made.bytes_after,
    "quantized": [[d.tensor.name, list(d.tensor.shape)] for d in made.decisions if d.action == "quantize"],
    "written": sum(len(shard.tensors) for shard in made.shards),
    "exclude": made.exclude,
}))
"""
PARAMETERS = {  # in thousand million, with vision tower and MTP head
    "Qwen3.5-27B": (27, 28),
    "Qwen3.5-35B-A3B": (35, 37),
    "Qwen3.5-122B-A10B": (122, 126),
    "Qwen3.5-397B-A17B": (397, 404),
}


@pytest.mark.parametrize(
    "name", [*architectures.NAMES[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in architectures.NAMES[2:])]
)
def test_plan_of_a_published_model(name: str, tmp_path: Path) -> None:
    source = architectures.write(tmp_path / name, name)
    low, high = PARAMETERS[name]
    assert low < sum(map(math.prod, architectures.shapes(name).values())) / 1e9 < high
    done, peak = peak_memory.measured([sys.executable, "-c", _PLAN, source])
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    text = architectures.config(name)["text_config"]
    layers, experts = text["num_hidden_layers"], text.get("num_experts")
    full = text["layer_types"].count("full_attention")
    # Dense: q, k, v, o; in_proj_qkv, in_proj_z, out_proj; gate, up, down. MoE: the routed experts' two fused tensors.
    assert len(made["quantized"]) == (2 * layers if experts else 4 * full + 3 * (layers - full) + 3 * layers)
    weights = sum(math.prod(shape) for _, shape in made["quantized"])
    assert made["after"] == made["before"] - 2 * weights + weights // 2 + weights // 32
    split = 3 * layers * experts if experts else len(made["quantized"])
    assert made["written"] == len(architectures.shapes(name)) - len(made["quantized"]) + 2 * split
    assert any(entry.startswith("mtp.") for entry in made["exclude"])
    assert peak < 2**30


@pytest.mark.slow
def test_plan_of_the_largest_in_fp8_is_that_of_its_bfloat16_form(tmp_path: Path) -> None:
    """190,000 tensors, experts one by one with their scales."""
    made = []
    for fp8 in (False, True):
        source = architectures.write(tmp_path / str(fp8), architectures.NAMES[-1], fp8=fp8)
        done, peak = peak_memory.measured([sys.executable, "-c", _PLAN, source])
        assert done.returncode == 0, done.stderr
        assert peak < 2**30
        made.append(json.loads(done.stdout))
    plain, packed = made
    assert packed["after"] == plain["after"]
    assert packed["written"] == plain["written"]
    assert packed["exclude"] == plain["exclude"]
