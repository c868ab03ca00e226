"""quantization_config: as Quark writes it, and read as vLLM's own functions read it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm_matching as vllm

from mxq.checkpoint.quantization import QuantizationConfig, exclude_entries, quantization_of
from mxq.checkpoint.quark import quark_config
from mxq.errors import MxqError
from mxq.models import qwen35

# Module in the checkpoint -> the module that vLLM builds for it, in its model of the target or of MTP.
TARGET = {
    "model.language_model.layers.0.linear_attn.in_proj_qkv": "language_model.model.layers.0.linear_attn.in_proj_qkvz",
    "model.language_model.layers.0.linear_attn.in_proj_z": "language_model.model.layers.0.linear_attn.in_proj_qkvz",
    "model.language_model.layers.0.linear_attn.in_proj_a": "language_model.model.layers.0.linear_attn.in_proj_ba",
    "model.language_model.layers.0.linear_attn.in_proj_b": "language_model.model.layers.0.linear_attn.in_proj_ba",
    "model.language_model.layers.0.linear_attn.out_proj": "language_model.model.layers.0.linear_attn.out_proj",
    "model.language_model.layers.3.self_attn.q_proj": "language_model.model.layers.3.self_attn.qkv_proj",
    "model.language_model.layers.3.self_attn.k_proj": "language_model.model.layers.3.self_attn.qkv_proj",
    "model.language_model.layers.3.self_attn.v_proj": "language_model.model.layers.3.self_attn.qkv_proj",
    "model.language_model.layers.3.self_attn.o_proj": "language_model.model.layers.3.self_attn.o_proj",
    "model.language_model.layers.3.mlp.experts.0.gate_proj": "language_model.model.layers.3.mlp.experts",
    "model.language_model.layers.3.mlp.experts.0.down_proj": "language_model.model.layers.3.mlp.experts",
    "model.language_model.layers.3.mlp.shared_expert.up_proj": (
        "language_model.model.layers.3.mlp.shared_expert.gate_up_proj"
    ),
    "model.language_model.layers.3.mlp.shared_expert.gate_proj": (
        "language_model.model.layers.3.mlp.shared_expert.gate_up_proj"
    ),
    "model.language_model.layers.3.mlp.gate": "language_model.model.layers.3.mlp.gate",
    "model.language_model.layers.3.mlp.shared_expert_gate": "language_model.model.layers.3.mlp.shared_expert_gate",
    "model.visual.blocks.0.attn.qkv": "visual.blocks.0.attn.qkv",
    "model.visual.merger.linear_fc1": "visual.merger.linear_fc1",
    "lm_head": "language_model.lm_head",
}
MTP = {
    "mtp.fc": "mtp.fc",
    "mtp.layers.0.self_attn.q_proj": "mtp.layers.0.self_attn.qkv_proj",
    "mtp.layers.0.self_attn.k_proj": "mtp.layers.0.self_attn.qkv_proj",
    "mtp.layers.0.self_attn.v_proj": "mtp.layers.0.self_attn.qkv_proj",
    "mtp.layers.0.mlp.experts.1.up_proj": "mtp.layers.0.mlp.experts",
    "mtp.layers.0.mlp.experts.gate_up_proj": "mtp.layers.0.mlp.experts",
}
EXPERTS = {name for name in TARGET if ".experts." in name}


def config(exclude: list[str], weight_only: bool = False) -> QuantizationConfig:
    raw = {"quantization_config": quark_config(exclude, weight_only=weight_only, rule="even")}
    parsed = quantization_of(raw, "here")
    assert parsed is not None
    return parsed


def vllm_says(exclude: list[str], module: str) -> bool:
    names, renames = (MTP, vllm.MTP) if module in MTP else (TARGET, vllm.MULTIMODAL)
    return vllm.quantized(exclude, names[module], renames)


@pytest.mark.parametrize(
    "quantized",
    [
        EXPERTS,
        {name for name in TARGET if ".layers." in name and "in_proj_a" not in name and "in_proj_b" not in name},
        EXPERTS | {name for name in MTP if name != "mtp.fc"},
        set(),
    ],
    ids=["experts", "most", "experts-and-mtp", "none"],
)
def test_what_is_excluded_is_what_vllm_leaves_unquantized(quantized: set[str]) -> None:
    modules = [*TARGET, *MTP]
    exclude = exclude_entries([module for module in modules if module not in quantized], quantized)
    parsed = config(exclude)
    for module in modules:
        assert vllm_says(exclude, module) == (module in quantized), module
        assert parsed.is_quantized(module) == (module in quantized), module


def test_a_text_only_checkpoint_is_matched_too() -> None:
    kept = ["model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_b", "lm_head"]
    exclude = exclude_entries(kept, ["model.layers.0.mlp.gate_proj"])
    for module, built in ((kept[0], "in_proj_ba"), ("model.layers.0.linear_attn.out_proj", "out_proj")):
        name = f"model.layers.0.linear_attn.{built}"
        expected = vllm.quantized(exclude, name, vllm.TEXT_ONLY)
        assert config(exclude).is_quantized(module) == expected == (built == "out_proj")


def test_engines_that_rename_mtp_and_vision_find_a_pattern_where_all_of_it_is_kept() -> None:
    def built(exclude: list[str], name: str) -> bool:
        return vllm.quantized(exclude, name, {})

    exclude = exclude_entries(["mtp.fc", "model.visual.merger.linear_fc1"], ["model.layers.0.mlp.up_proj"])
    assert not built(exclude, "draft.mtp.layers.1.eh_proj")
    assert not built(exclude, "tower.visual.merger.fc1")
    assert built(exclude, "draft.layers.0.mlp.up_proj")
    in_part = exclude_entries(["mtp.fc"], ["mtp.layers.0.mlp.up_proj"])
    assert built(in_part, "mtp.layers.0.mlp.up_proj")
    assert not built(in_part, "mtp.fc")


@pytest.mark.parametrize(
    "entry",
    [
        "re:.*mtp\\..*",
        "re:mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.7.down_proj",  # one child speaks for the block
        "mtp.*",  # a glob, which matches nothing
        "re:.*experts\\.1\\.up_proj",  # a pattern for a child, which is never looked up
        "re:layers.0.mlp",  # patterns match from the start
        "mtp.layers.0.mlp",
        "re:.*qkv_proj",
        "re:.*[qkv]_proj",
        "re:.*self_attn",
        "model.language_model.layers.3.self_attn.qkv_proj",
        "language_model.model.layers.3.mlp.gate",
        "lm_head",
        "visual.merger.linear_fc1",
    ],
)
def test_any_entry_means_to_us_what_it_means_to_vllm(entry: str) -> None:
    for module in [*TARGET, *MTP]:
        if module == "lm_head":  # never looked up: no linear in vLLM, whose renaming would miss the plain name
            continue
        assert config([entry]).is_quantized(module) == vllm_says([entry], module), module


def test_fields_are_those_that_quark_writes() -> None:
    """The file is what Quark 0.13 wrote into config.json for a dense model and, but for exclude, for an MoE model."""
    expected = json.loads((Path(__file__).parent / "data" / "quark_quantization_config.json").read_text())
    assert quark_config(["lm_head"], weight_only=False, rule="even") == expected | {"exclude": ["lm_head"]}
    expected["global_quant_config"]["input_tensors"] = None
    assert quark_config([], weight_only=True, rule="even") == expected | {"exclude": []}
    assert config([], weight_only=True).weight_only
    assert not config([]).weight_only
    assert quantization_of({}, "here") is None


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda q: q.update(quant_method="fp8"), "quantized with 'fp8', which mxq does not read"),
        (lambda q: q["global_quant_config"]["weight"].update(dtype="fp8_e4m3"), "weight is not MXFP4"),
        (lambda q: q["global_quant_config"]["weight"].update(ch_axis=0), "weight is not MXFP4: ch_axis is 0, not -1"),
        (lambda q: q["global_quant_config"]["weight"].update(group_size=16), "MXFP4: group_size is 16, not 32"),
        (lambda q: q["global_quant_config"]["input_tensors"].update(block_size=[1]), r"block_size is \[1\], not None"),
        (lambda q: q["global_quant_config"]["weight"].update(is_dynamic=True), "weight is not static MXFP4"),
        (lambda q: q.update(global_quant_config=None), "weight is not MXFP4"),
        (lambda q: q["global_quant_config"]["input_tensors"].update(is_dynamic=False), "is not dynamic MXFP4"),
        (lambda q: q.update(exclude="lm_head"), "exclude is not a list"),
        (lambda q: q.update(exclude=["re:["]), "not a regular expression"),
        (lambda q: q.update(layer_quant_config={"*mtp*": {}}), "settings per layer"),
    ],
)
def test_other_kinds_of_quantization_are_refused_in_words(edit: Callable[[Any], object], reason: str) -> None:
    raw = quark_config([], weight_only=False, rule="even")
    edit(raw)
    with pytest.raises(MxqError, match=reason) as error:
        quantization_of({"quantization_config": raw}, "a/checkpoint")
    assert "a/checkpoint" in error.value.message


def test_fused_modules_are_vllms() -> None:
    assert {fused: list(members) for fused, members in qwen35.FUSED.items()} == vllm.PACKED_MODULES
