"""Checkpoints as other tools write them, made from one of mxq's: the same weights under their names and configs."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from checkpoints import Tensors, edit_json, read_all, rewrite
from safetensors.torch import save_file

from mxq.models import qwen35

CT_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}


def quark(converted: Path, directory: Path) -> Path:
    """Quark's: mxq's form without mxq's own files."""
    shutil.copytree(converted, directory)
    for name in ("mxq_manifest.json", "layers.jsonl", "README.md"):
        (directory / name).unlink()
    return directory


def compressed_tensors(converted: Path, directory: Path, *, sign_of_zero: bool = True) -> Path:
    """llm-compressor's: weight_packed, ignore, and -0 where a negative number rounds to zero."""
    quark(converted, directory)
    rewrite(directory, lambda tensors: _packed_names(tensors, sign_of_zero))

    def config(content: Any) -> None:
        content["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": CT_WEIGHTS, "input_activations": None}},
            "ignore": content["quantization_config"]["exclude"],
            "quantization_status": "compressed",
        }

    edit_json(directory / "config.json", config)
    return directory


def autoround(converted: Path, directory: Path) -> Path:
    """AutoRound's: the same tensors, and a table of the layers that have sixteen bits."""
    compressed_tensors(converted, directory)

    def config(content: Any) -> None:
        kept = [name for name in content["quantization_config"]["ignore"] if not name.startswith("re:")]
        content["quantization_config"] = {
            "quant_method": "auto-round",
            "packing_format": "auto_round:llm_compressor",
            "bits": 4,
            "act_bits": 4,
            "data_type": "mx_fp",
            "group_size": 32,
            "sym": True,
            "block_name_to_quantize": "model.language_model.layers",
            "extra_config": {name: {"bits": 16, "data_type": "float"} for name in kept},
        }

    edit_json(directory / "config.json", config)
    return directory


def shards(directory: Path, count: int) -> Path:
    """Split a checkpoint of one file, in place, with an index."""
    tensors = read_all(directory)
    (directory / "model.safetensors").unlink()
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def fuse_experts(tensors: Tensors, block: str) -> None:
    """Store the experts of a block together, as Quark leaves those of MTP in memory."""
    count = sum(name.startswith(f"{block}.") and name.endswith(".up_proj.weight") for name in tensors)
    gate, up, down = (
        [tensors.pop(f"{block}.{expert}.{projection}_proj.weight") for expert in range(count)]
        for projection in ("gate", "up", "down")
    )
    tensors[f"{block}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
    tensors[f"{block}.down_proj"] = torch.stack(down)


def _packed_names(tensors: Tensors, sign_of_zero: bool) -> None:
    for name in list(tensors):
        if name.endswith(".weight") and qwen35.scale_name(name) in tensors:
            codes = tensors.pop(name)
            if sign_of_zero:  # in every other low code that is 0
                zeros = (codes & 15) == 0
                zeros[:, ::2] = False
                codes = torch.where(zeros, codes | 8, codes)
            tensors[f"{name}_packed"] = codes
