"""What the embedded models promise: the published layout, sizes that the kernels like, prompts of their own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mxq import errors, testbed
from mxq.checkpoint import Checkpoint

# The published checkpoints' names (Qwen3.5-27B and 35B-A3B), with every number as N.
_ATTENTION = {f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
_GDN = {
    *(f"linear_attn.{n}.weight" for n in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")),
    *("linear_attn.conv1d.weight", "linear_attn.norm.weight", "linear_attn.A_log", "linear_attn.dt_bias"),
}
_NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
_MLP = {f"{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
_MOE = {"mlp.gate.weight", "mlp.shared_expert_gate.weight", *(f"mlp.shared_expert.{n}" for n in _MLP)}
_VISION = {
    *(f"blocks.N.{n}.{k}" for n in ("norm1", "norm2", "attn.qkv", "attn.proj") for k in ("weight", "bias")),
    *(f"blocks.N.mlp.linear_fcN.{k}" for k in ("weight", "bias")),
    *(f"merger.{n}.{k}" for n in ("norm", "linear_fcN") for k in ("weight", "bias")),
    *("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight"),
}


def _expected_names(moe: bool) -> set[str]:
    language = _MOE | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} if moe else {f"mlp.{n}" for n in _MLP}
    mtp = _MOE | {f"mlp.experts.N.{n}" for n in _MLP} if moe else {f"mlp.{n}" for n in _MLP}
    return {
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        *(f"model.language_model.layers.N.{n}" for n in _ATTENTION | _GDN | _NORMS | language),
        *(f"model.visual.{n}" for n in _VISION),
        *(f"mtp.layers.N.{n}" for n in _ATTENTION | _NORMS | mtp),
        *(f"mtp.{n}.weight" for n in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")),
    }


@pytest.fixture(params=testbed.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target(name: str) -> Checkpoint:
    return Checkpoint.open(testbed.path(f"testbed:{name}"))


@pytest.fixture
def text(target: Checkpoint) -> dict[str, Any]:
    return dict(target.config["text_config"])


def test_tensor_names_are_those_of_the_published_checkpoints(target: Checkpoint, name: str) -> None:
    # Not a number of its own: conv1d, experts of shared_expert; a layer, block, expert or fc index is.
    generic = {re.sub(r"(?<=\.)\d+(?=\.)|(?<=linear_fc)\d", "N", tensor) for tensor in target.tensors}
    assert generic == _expected_names(moe=name == "moe")


def test_precisions_are_those_of_the_published_checkpoints(target: Checkpoint) -> None:
    full = {tensor for tensor, info in target.tensors.items() if info.dtype == "F32"}
    assert full
    assert full == {n for n in target.tensors if n.endswith((".A_log", ".linear_attn.norm.weight"))}
    assert {info.dtype for n, info in target.tensors.items() if n not in full} == {"BF16"}


def test_three_layers_of_four_are_gdn_and_every_quantized_row_is_a_multiple_of_256(
    target: Checkpoint, text: dict[str, Any]
) -> None:
    kinds = text["layer_types"]
    assert kinds == ["linear_attention"] * 3 + ["full_attention"] + kinds[4:]
    assert kinds == kinds[:4] * (len(kinds) // 4)
    assert text["linear_key_head_dim"] == text["linear_value_head_dim"] == 64
    for tensor, info in target.tensors.items():
        if tensor.startswith("model.language_model.layers.") and len(info.shape) >= 2 and "conv1d" not in tensor:
            assert info.shape[-1] % 256 == 0, tensor


def test_drafter_fits_its_target_in_vllm(name: str, text: dict[str, Any]) -> None:
    drafter = Checkpoint.open(testbed.path(f"testbed:{name}-dflash"))
    config = drafter.config
    assert config["block_size"] == 16
    assert config["num_target_layers"] == text["num_hidden_layers"]
    assert max(config["dflash_config"]["target_layer_ids"]) < text["num_hidden_layers"]
    for key in ("hidden_size", "vocab_size", "num_key_value_heads", "head_dim"):
        assert config[key] == text[key], key
    assert not any("embed_tokens" in n or "lm_head" in n for n in drafter.tensors)  # the target's are used


def test_all_of_it_stays_under_32_megabytes() -> None:
    files = [f for f in Path(testbed.__file__).parent.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert sum(f.stat().st_size for f in files) < 32_000_000


@pytest.mark.parametrize("workload", testbed.WORKLOADS)
def test_prompts_are_enough_distinct_and_never_trained_on(workload: str) -> None:
    from testbed_training import text as generator

    lines = [json.loads(line) for line in (testbed.prompts_dir() / f"{workload}.jsonl").read_text().splitlines()]
    prompts = [line["prompt"] for line in lines]
    assert len(set(prompts)) == len(prompts) >= 64
    assert len({line["id"] for line in lines}) == len(lines)
    # What the training leaves out is exactly what is shipped here.
    assert prompts == [e.prompt for e in generator.held_out(len(prompts))[workload]]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(errors.UsageError, match="there is no testbed model 'testbed:huge'; use one of testbed:dense,"):
        testbed.path("testbed:huge")
