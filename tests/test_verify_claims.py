"""What a config of compressed-tensors or AutoRound says of each module: what vLLM's own functions say."""

from collections.abc import Callable
from typing import Any

import pytest
import vllm_matching as vllm
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint_quantization import MTP, TARGET

from mxq.checkpoint.compressed_tensors import CompressedTensors
from mxq.checkpoint.quantization import Claims, exclude_entries
from mxq.checkpoint.quark import Quark, quark_config
from mxq.errors import MxqError
from mxq.models import qwen35
from mxq.verify.claims import AutoRound, claims_of

WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
MODULES = [*TARGET, *(name for name in MTP if not name.endswith("gate_up_proj"))]
# Text that a tool could write for a module: its own name, vLLM's, its block's, a glob, a pattern of each sort.
PATTERNS = [
    "re:.*mtp.*",
    "re:.*visual.*",
    "re:.*linear_attn.*",
    "re:.*self_attn.*",
    "re:.*qkv_proj",
    "re:.*experts.*",
    "re:.*gate$",
    "re:mtp",
    "re:layers",
    "*mtp*",
    "*.self_attn.*",
    "mtp",
    "model.visual",
    "lm_head",
]
entries = st.lists(st.sampled_from([*MODULES, *TARGET.values(), *MTP.values(), *PATTERNS]), max_size=6, unique=True)


def compressed_tensors(ignore: list[str], targets: list[str] | None = None) -> dict[str, Any]:
    group = {"targets": targets or ["Linear"], "weights": WEIGHTS, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def autoround(extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "data_type": "mx_fp",
        "group_size": 32,
        "packing_format": "auto_round:llm_compressor",
        "extra_config": extra,
        **more,
    }


def claims(raw: dict[str, Any]) -> Claims:
    found = claims_of({"quantization_config": raw}, "a/checkpoint")
    assert found is not None
    return found


def compare(ours: Claims, theirs: Callable[[str, dict[str, str]], bool]) -> None:
    """Every module that vLLM merges as a whole is claimed as vLLM builds it; where it refuses, we claim a part only."""
    built: dict[str, list[str]] = {}
    for module in MODULES:
        built.setdefault((MTP | TARGET)[module], []).append(module)
    for whole, parts in built.items():
        names = {part for part in parts if qwen35.experts_module(part) is None} or set(parts)
        block = qwen35.experts_module(parts[0])
        if block is not None:
            names = {f"{block}.0.{projection}_proj" for projection in ("gate", "up", "down")}
        elif (fused := qwen35.fused_module(parts[0])) is not None:
            names = {f"{fused.rpartition('.')[0]}.{name}" for name in qwen35.FUSED[fused.rpartition(".")[2]]}
        said = {ours.is_quantized(name) for name in names}
        try:
            expected = {theirs(whole, vllm.MTP if whole.startswith("mtp") else vllm.MULTIMODAL)}
        except ValueError:
            expected = {True, False}
        assert said == expected, whole


@given(entries)
def test_ignore_means_to_us_what_it_means_to_vllm(ignore: list[str]) -> None:
    ignore = [entry for entry in ignore if entry != "lm_head"]  # vLLM's renaming misses the plain name
    ours = claims(compressed_tensors(ignore))
    compare(ours, lambda whole, renames: vllm.compressed_tensors_quantized(ignore, whole, renames))


@given(entries, st.sampled_from([[], ["model.language_model.layers"], ["model.language_model.layers", "mtp.layers"]]))
def test_extra_config_means_to_us_what_it_means_to_vllm(keys: list[str], blocks: list[str]) -> None:
    keys = [key.removeprefix("re:") for key in keys if key != "lm_head" and not key.startswith("*")]
    extra = {key: {"bits": 16, "data_type": "float"} for key in keys}
    ours = claims(autoround(extra, block_name_to_quantize=blocks))
    compare(ours, lambda whole, renames: vllm.autoround_quantized(extra, blocks, whole, renames))


@pytest.mark.parametrize("method", ["quark", "compressed-tensors"])
def test_what_mxq_lists_is_understood_in_both_forms(method: str) -> None:
    quantized = {name for name in TARGET if ".experts." in name}
    listed = exclude_entries([name for name in MODULES if name not in quantized], quantized)
    raw = (
        compressed_tensors(listed)
        if method == "compressed-tensors"
        else quark_config(listed, weight_only=False, rule="even")
    )
    for module in MODULES:
        assert claims(raw).is_quantized(module) == (module in quantized), module


def test_targets_name_modules_too() -> None:
    ours = claims(compressed_tensors([], targets=["re:.*mlp.experts.*", "RoutedExperts"]))
    assert ours.is_quantized("model.language_model.layers.0.mlp.experts.3.up_proj")
    assert not ours.is_quantized("model.language_model.layers.0.linear_attn.out_proj")


def test_which_form_it_is() -> None:
    assert isinstance(claims(quark_config([], weight_only=True, rule="mse")), Quark)
    assert claims(quark_config([], weight_only=True, rule="mse")).rule == "mse"
    assert isinstance(claims(compressed_tensors(["lm_head"])), CompressedTensors)
    assert claims(compressed_tensors(["lm_head"])).entries == ("lm_head",)
    assert isinstance(claims(autoround({})), AutoRound)
    assert claims_of({}, "here") is None


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("fp8", "quantized with 'fp8', which mxq does not read"),
        ({"quant_method": "awq"}, "quantized with 'awq', which mxq does not read"),
        (compressed_tensors([]) | {"config_groups": {}}, "has no config_groups"),
        (compressed_tensors([]) | {"format": "float-quantized"}, "has the format 'float-quantized'"),
        (compressed_tensors([]) | {"ignore": "lm_head"}, "ignore is not a list of names"),
        (compressed_tensors(["re:["]), "not a regular expression"),
        (
            compressed_tensors([]) | {"config_groups": {"a": {"weights": WEIGHTS | {"group_size": 16}}}},
            "group_size is 16",
        ),
        (compressed_tensors([]) | {"config_groups": {"a": {"weights": None}}}, "a of quantization_config is not MXFP4"),
        (autoround({}, bits=8), "has bits 8, not 4"),
        (autoround({"x": 16}), "extra_config is not a table of layers"),
        (autoround({"x": {"bits": "16"}}), "gives bits that are no number"),
        (autoround({"(": {"bits": 16}}), "not a regular expression"),
    ],
)
def test_what_is_no_mxfp4_is_refused_in_words(raw: Any, reason: str) -> None:
    with pytest.raises(MxqError) as error:
        claims_of({"quantization_config": raw}, "a/checkpoint")
    assert reason in error.value.message
    assert error.value.message.startswith("a/checkpoint")
