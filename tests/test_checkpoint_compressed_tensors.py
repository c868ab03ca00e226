"""The form of compressed-tensors, as its own library and llm-compressor have it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import read_all
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from conversion import convert

from mxq.checkpoint.compressed_tensors import FORMAT, compressed_tensors_config
from mxq.formats import mxfp4

CASE = json.loads((Path(__file__).parent / "data" / "llm_compressor_mxfp4.json").read_text())
SCHEMES = {"MXFP4": False, "MXFP4A16": True}  # llm-compressor's name -> whether only weights are quantized


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("converted") / source.name, form="compressed-tensors")


def parsed(raw: dict[str, Any]) -> QuantizationConfig:
    """By the library, without the keys that are not its."""
    theirs = {key: value for key, value in raw.items() if key not in ("version", "transform_config")}
    return QuantizationConfig.model_validate(theirs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fields_are_those_that_llm_compressor_writes(scheme: str) -> None:
    theirs = CASE["configs"][scheme]
    group = theirs["config_groups"].pop(scheme)
    ours = compressed_tensors_config(theirs["ignore"], weight_only=SCHEMES[scheme])
    assert ours == theirs | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_library_reads_its_own_scheme(scheme: str) -> None:
    read = parsed(compressed_tensors_config(["lm_head"], weight_only=SCHEMES[scheme]))
    preset = preset_name_to_scheme(scheme, ["Linear"]).model_copy(update={"format": FORMAT})
    theirs = QuantizationConfig(
        config_groups={"group_0": preset}, format=FORMAT, quantization_status="compressed", ignore=["lm_head"]
    )
    assert read.model_dump() == theirs.model_dump()


def test_the_library_decompresses_to_what_mxq_means(converted: Path) -> None:
    read = parsed(json.loads((converted / "config.json").read_text())["quantization_config"])
    scheme = read.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(read.format)
    tensors = read_all(converted)
    packed = [name.removesuffix("weight_packed") for name in tensors if name.endswith("weight_packed")]
    assert len(packed) >= 25
    for module in packed:
        codes, scale = tensors[f"{module}weight_packed"], tensors[f"{module}weight_scale"]
        weight = compressor.decompress({"weight_packed": codes, "weight_scale": scale}, scheme)["weight"]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, mxfp4.dequantize(codes, scale, torch.bfloat16)), module


def test_names_types_and_shapes_are_those_that_llm_compressor_writes(converted: Path) -> None:
    """Of the same random target, by patterns that leave unquantized what mxq's recipe does."""
    ours = {
        name: f"{str(tensor.dtype).replace('torch.uint8', 'U8')} {list(tensor.shape)}"
        for name, tensor in read_all(converted).items()
        if name.endswith(("_packed", "_scale"))
    }
    assert ours == CASE["packed"][converted.name]
