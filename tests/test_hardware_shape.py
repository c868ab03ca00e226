"""What the cost model counts of a model is what checkpoints hold: headers, published sizes, mxq's own plan."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import pytest
from published_shapes import config, drafter, target

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.quantization import config_for
from mxq.convert import recipe
from mxq.convert.plan import plan
from mxq.errors import UsageError
from mxq.hardware.model import facts_of
from mxq.hardware.shape import BF16, Packed, drafter_shape, packed_of, target_shape


@pytest.mark.parametrize(
    "name", [*architectures.NAMES[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in architectures.NAMES[2:])]
)
def test_bytes_are_those_of_the_plan(name: str, tmp_path: Path) -> None:
    made = plan(Checkpoint.open(architectures.write(tmp_path / name, name)), recipe.load("mxfp4"))
    shape = target(name)
    assert shape.weight_bytes(BF16) == made.bytes_before
    assert shape.weight_bytes(shape.packed_by_recipe()) == made.bytes_after
    # The comparison is exact: a norm that was forgotten shows.
    assert replace(shape, small=shape.small - shape.hidden).weight_bytes(BF16) != made.bytes_before


def test_shared_experts_are_counted_as_their_recipe_quantizes_them(tmp_path: Path) -> None:
    name = "Qwen3.5-35B-A3B"
    made = plan(Checkpoint.open(architectures.write(tmp_path / name, name)), recipe.load("mxfp4-moe-full"))
    assert target(name).weight_bytes(Packed(experts=True, shared=True)) == made.bytes_after


@pytest.mark.parametrize("name", architectures.NAMES[:2])
def test_an_mtp_layer_is_counted_as_its_recipe_quantizes_it(name: str, tmp_path: Path) -> None:
    made = plan(Checkpoint.open(architectures.write(tmp_path / name, name)), recipe.load("mxfp4-mtp"))
    quantized = config_for("quark", made.exclude, weight_only=False, rule="even")
    packed = packed_of(facts_of("m", config(name) | {"quantization_config": quantized}, "m"))
    assert packed == replace(target(name).packed_by_recipe(), mtp=True)
    assert target(name).weight_bytes(packed) == made.bytes_after


@pytest.mark.parametrize("name", architectures.NAMES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    assert target(name).parameters == sum(map(math.prod, architectures.shapes(name).values()))


def test_published_sizes() -> None:
    # The 35B-A3B's own count, and the bytes of the text part of AMD's MXFP4 checkpoint of it, which has no MTP head.
    assert target("Qwen3.5-35B-A3B").parameters == 35_951_822_704
    text = config("Qwen3.5-35B-A3B")
    del text["vision_config"]
    text["text_config"]["mtp_num_hidden_layers"] = 0
    shape = target_shape(text, "text")
    assert shape.weight_bytes(shape.packed_by_recipe()) == 22_009_481_856


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3.5-27B-DFlash", 1_730_213_120),  # 3.22 GiB
        ("Qwen3.5-35B-A3B-DFlash-v1", 473_995_264),  # 0.88 GiB
        ("Qwen3.5-35B-A3B-DFlash", 385_906_176),
    ],
)
def test_published_drafters(name: str, parameters: int) -> None:
    assert drafter(name).weight_bytes == 2 * parameters


@pytest.mark.parametrize(("name", "packed"), [("27B", Packed(linears=True)), ("35B-A3B", Packed(experts=True))])
def test_what_is_packed_is_read_from_a_checkpoint(name: str, packed: Packed, tmp_path: Path) -> None:
    source = architectures.write(tmp_path / "m", f"Qwen3.5-{name}")
    made = plan(Checkpoint.open(source), recipe.load("mxfp4"))
    quantized = config_for("quark", made.exclude, weight_only=False, rule="even")
    raw = config(f"Qwen3.5-{name}")
    assert packed_of(facts_of("m", raw | {"quantization_config": quantized}, "m")) == packed
    assert packed_of(facts_of("m", raw, "m")) == BF16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "m: hidden_size is missing"),
        ({"hidden_size": "5120"}, "m: hidden_size is '5120'"),
        ({"num_attention_heads": 1 << 40}, "m: num_attention_heads is 1099511627776"),
        ({"layer_types": ["linear_attention"]}, "m: layer_types does not say"),
        ({"layer_types": ["sliding_attention"] * 64}, "m: layer_types has others"),
    ],
)
def test_a_config_without_sizes_is_named(change: dict[str, Any], message: str) -> None:
    broken = config("Qwen3.5-27B")
    for key, value in change.items():
        broken["text_config"].pop(key)
        if value is not None:
            broken["text_config"][key] = value
    with pytest.raises(UsageError, match=message):
        target_shape(broken, "m")


def test_more_experts_per_token_than_there_are_is_named() -> None:
    broken = config("Qwen3.5-35B-A3B")
    broken["text_config"]["num_experts"] = 4
    with pytest.raises(UsageError, match="m: a token takes 8 of 4 experts"):
        target_shape(broken, "m")


def test_a_drafter_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match=r"m: config\.json has no dflash_config"):
        drafter_shape({}, "m")
    with pytest.raises(UsageError, match="m: hidden_size is 0"):
        drafter_shape(config("Qwen3.5-27B-DFlash") | {"hidden_size": 0}, "m")
