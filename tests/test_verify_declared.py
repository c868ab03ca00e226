"""What config.json says against what the tensors are: plan and quantize refuse a contradiction, verify reports it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import Tensors, edit_json, reseal, rewrite
from conversion import convert
from safetensors.torch import save_file

from mxq import testbed
from mxq.checkpoint import Checkpoint, TensorInfo
from mxq.convert import recipe
from mxq.convert.plan import plan
from mxq.errors import UsageError
from mxq.verify.declared import contradictions
from mxq.verify.run import verify

EMBEDDING = "model.language_model.embed_tokens.weight"


def set_sizes(path: Path, sizes: dict[str, Any]) -> None:
    edit_json(path / "config.json", lambda config: config["text_config"].update(sizes))


def test_sound_checkpoints_have_none(source: Path, tmp_path: Path) -> None:
    assert contradictions(Checkpoint.open(source)) == []
    for experts in ("per-expert", "fused"):
        assert contradictions(Checkpoint.open(convert(source, tmp_path / experts, experts=experts))) == []
    assert contradictions(Checkpoint.open(testbed.path("testbed:dense"))) == []


DENSE = [
    ("hidden_size", 512, "embed_tokens is [512, 256], by config.json (hidden_size 512, vocab_size 512)"),
    ("vocab_size", 1024, "embed_tokens is [512, 256], by config.json (hidden_size 256, vocab_size 1024)"),
    ("num_attention_heads", 8, "q_proj is [512, 256]"),
    ("num_key_value_heads", 4, "k_proj is [128, 256]"),
    ("head_dim", 128, "q_norm is [64], by config.json (head_dim 128) it would be [128]"),
    ("intermediate_size", 1024, "down_proj is [256, 512]"),
    ("linear_num_key_heads", 4, "in_proj_qkv is [512, 256]"),
    ("linear_num_value_heads", 8, "A_log is [4], by config.json (linear_num_value_heads 8) it would be [8]"),
    ("linear_key_head_dim", 32, "in_proj_qkv is [512, 256]"),
    ("linear_value_head_dim", 32, "in_proj_z is [256, 256]"),
    ("hidden_size", "lots", "hidden_size in config.json is 'lots', which is no size"),
    ("vocab_size", None, "vocab_size in config.json is None, which is no size"),
    ("head_dim", 64.0, "head_dim in config.json is 64.0, which is no size"),
    ("intermediate_size", 0, "intermediate_size in config.json is 0, which is no size"),
    ("num_attention_heads", True, "num_attention_heads in config.json is True, which is no size"),
    ("layer_types", ["linear_attention"] * 3, "layer_types in config.json is of 3 layers, the tensors are of 4"),
    ("layer_types", ["linear_attention"] * 4, "layer 3 is of full_attention, by layer_types in config.json of 'linear"),
    ("layer_types", "full_attention", "layer_types in config.json is 'full_attention', which is no list"),
    ("mtp_num_hidden_layers", 2, "mtp_num_hidden_layers in config.json is 2, the tensors of MTP are of 1"),
]
MOE = [
    ("moe_intermediate_size", 128, "gate_proj is [256, 256]"),
    ("shared_expert_intermediate_size", 128, "shared_expert.gate_proj is [256, 256]"),
    ("num_experts", 2, "mlp.gate is [4, 256]"),
]


@pytest.mark.parametrize(("key", "value", "reason"), DENSE)
def test_sizes_that_are_not_those_of_the_tensors(
    dense_source: Path, tmp_path: Path, key: str, value: object, reason: str
) -> None:
    refused_and_reported(dense_source, tmp_path, key, value, reason)


@pytest.mark.parametrize(("key", "value", "reason"), MOE)
def test_sizes_of_experts_that_are_not_those_of_the_tensors(
    moe_source: Path, tmp_path: Path, key: str, value: object, reason: str
) -> None:
    refused_and_reported(moe_source, tmp_path, key, value, reason)


def refused_and_reported(source: Path, tmp_path: Path, key: str, value: object, reason: str) -> None:
    lying = shutil.copytree(source, tmp_path / "lying")
    out = convert(source, tmp_path / "out")
    for path in (lying, out):
        set_sizes(path, {key: value})
        assert any(reason in line for line in contradictions(Checkpoint.open(path)))
    with pytest.raises(UsageError, match=r"config\.json"):
        plan(Checkpoint.open(lying), recipe.load("mxfp4"))
    reseal(out)
    assert any(reason in problem.what for problem in verify(out).problems)


def test_a_text_config_that_is_no_object(dense_source: Path, tmp_path: Path) -> None:
    out = convert(dense_source, tmp_path / "out")
    edit_json(out / "config.json", lambda config: config.update(text_config=[1]))
    reseal(out)
    assert [problem.what for problem in verify(out).problems] == ["text_config in config.json is not an object"]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures in config.json is ['LlamaForCausalLM'], the tensors are",
        ),
        (
            {"architectures": ["Qwen3_5ForCausalLM"]},
            "are of Qwen3_5MoeForConditionalGeneration or Qwen3_5MoeForCausalLM",
        ),
        ({"architectures": None}, "architectures in config.json is None"),
        ({"model_type": "qwen3_5"}, "model_type in config.json is 'qwen3_5', the tensors are of qwen3_5_moe"),
    ],
)
def test_a_config_that_names_another_model(
    converted_moe: Path, tmp_path: Path, edit: dict[str, Any], reason: str
) -> None:
    out = shutil.copytree(converted_moe, tmp_path / "out")
    edit_json(out / "config.json", lambda config: config.update(edit))
    reseal(out)
    (problem,) = verify(out).problems
    assert reason in problem.what


def test_a_model_that_mxq_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"config\.json names LlamaForCausalLM"):
        verify(tmp_path)


def test_layers_and_experts_that_are_not_there(moe_source: Path, tmp_path: Path) -> None:
    out = convert(moe_source, tmp_path / "out")
    rewrite(out, lambda tensors: [tensors.pop(name) for name in [*tensors] if ".layers.3.mlp.experts.2.up" in name])
    reseal(out)
    (problem,) = verify(out).problems
    assert "layers.3.mlp.experts.2.up_proj is missing" in problem.what
    set_sizes(out, {"num_hidden_layers": 9})
    reseal(out)
    (problem,) = verify(out).problems
    assert "config.json says 9 layers, the tensors are of 4" in problem.what


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # Of Qwen3.5-27B and Qwen3.5-35B-A3B, with fewer layers.
        (
            "Qwen3_5",
            {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 48},
        ),
        (
            "Qwen3_5Moe",
            {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256}
            | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        ),
    ],
)
def test_the_shapes_are_those_that_transformers_builds(name: str, sizes: dict[str, int]) -> None:
    common = {"head_dim": 256, "vocab_size": 248320, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config = getattr(transformers, f"{name}Config")(text_config=sizes | common | {"num_hidden_layers": 4})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    tensors = {
        name: TensorInfo(name, "BF16", tuple(tensor.shape), Path(), 0, 0) for name, tensor in model.state_dict().items()
    }
    said = config.to_dict() | {"architectures": [type(model).__name__]}
    said["text_config"].pop("tie_word_embeddings", None)  # there are no weights to compare
    assert contradictions(Checkpoint(Path(), said, tensors, {}, None, {})) == []
    said["text_config"]["linear_num_value_heads"] += 16
    assert len(contradictions(Checkpoint(Path(), said, tensors, {}, None, {}))) >= 5


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_tied_embeddings_stored_twice(dense_source: Path, tmp_path: Path, where: str) -> None:
    """Identical is fine; different, an engine would drop the one that counts."""

    def tie(config: dict[str, Any]) -> None:
        (config if where == "top" else config["text_config"]).update(tie_word_embeddings=True)
        if where == "text_config":
            del config["tie_word_embeddings"]

    def same(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()

    def different(tensors: Tensors) -> None:
        tensors["lm_head.weight"][-1, -1] += 1

    tied = shutil.copytree(dense_source, tmp_path / "tied")
    edit_json(tied / "config.json", tie)
    rewrite(tied, same)
    out = convert(tied, tmp_path / "out")
    assert verify(out, tied).problems == []
    for path in (tied, out):
        rewrite(path, different)
    with pytest.raises(UsageError, match=r"tie_word_embeddings, but lm_head\.weight is stored and differs from \S+"):
        convert(tied, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()
    reseal(out)
    (problem,) = verify(out).problems
    assert "lm_head.weight is stored and differs" in problem.what
