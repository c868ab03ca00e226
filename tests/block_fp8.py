"""Block-FP8 checkpoints with what the published ones have in FP8, made of bf16 ones, and their numbers: by torch."""

import json
import re
import shutil
from pathlib import Path

import torch
from checkpoints import Tensors, edit_json, read_all
from safetensors.torch import save_file

SCALE = "_scale_inv"
_MAX = 448.0
LINEARS = re.compile(
    r"(model\.language_model|mtp)\.layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp\.(shared_expert\.|experts\.\d+\.)?(gate|up|down)_proj)\.weight|.*\.mlp\.experts\.(gate_up|down)_proj"
)


def write(
    source: Path,
    directory: Path,
    *,
    scales: torch.dtype = torch.bfloat16,
    fused: bool = False,
    block: tuple[int, int] = (128, 128),
) -> Path:
    """Write ``source`` in block-FP8; routed experts one by one as published, or ``fused`` as transformers has them.

    Weights and their scales are in files of their own, with an index.
    """
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights: Tensors = {}
    for name, tensor in read_all(source).items():
        weights |= {name: tensor} if fused else _one_by_one(name, tensor)
    held: Tensors = {}
    for name in list(weights):
        if LINEARS.fullmatch(name):
            weights[name], held[name + SCALE] = quantize(weights[name], block, scales)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((weights, held), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(part, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for part in (weights, held) for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head", "model.language_model.layers.0.linear_attn.in_proj_ba", "mtp.fc"],
    }
    edit_json(directory / "config.json", lambda content: content.update(quantization_config=config))
    return directory


def edit(directory: Path, number: int, change: str, value: torch.Tensor | None) -> None:
    """Change or, by None, remove a tensor in one of the two files, and bring the index in line."""
    file = directory / f"model-{number:05}-of-00002.safetensors"
    tensors = {name: tensor.clone() for name, tensor in read_all(directory).items() if _in(directory, name, file.name)}
    if value is None:
        del tensors[change]
    else:
        tensors[change] = value.contiguous()
    save_file(tensors, file, {"format": "pt"})

    def index(content: dict[str, dict[str, str]]) -> None:
        content["weight_map"].pop(change, None)
        content["weight_map"] |= dict.fromkeys(tensors, file.name)

    edit_json(directory / "model.safetensors.index.json", index)


def quantize(x: torch.Tensor, block: tuple[int, int], scales: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x`` [..., N, K] and its scales, the largest element of every block at the largest code."""
    *axes, rows, columns = x.shape
    count = (-(-rows // block[0]), -(-columns // block[1]))
    padded = torch.zeros(*axes, count[0] * block[0], count[1] * block[1])
    padded[..., :rows, :columns] = x
    largest = padded.view(*axes, count[0], block[0], count[1], block[1]).abs().amax(dim=(-3, -1))
    scale = (largest / _MAX).clamp(min=2**-40).to(scales)
    codes = (x.float() / _spread(scale, block, x)).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)
    return codes, scale


def numbers(directory: Path) -> Tensors:
    """Every tensor of a checkpoint, block-FP8 as float32 products."""
    tensors = read_all(directory)
    block = json.loads((directory / "config.json").read_text())["quantization_config"]["weight_block_size"]
    return {
        name: tensor.float() * _spread(tensors[name + SCALE], block, tensor) if name + SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }


def _spread(scale: torch.Tensor, block: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
    """Return the scale of every element of ``x``."""
    spread = scale.float().repeat_interleave(block[0], dim=-2).repeat_interleave(block[1], dim=-1)
    return spread[..., : x.shape[-2], : x.shape[-1]]


def _one_by_one(name: str, tensor: torch.Tensor) -> Tensors:
    block, _, last = name.rpartition(".")
    if not block.endswith(".experts"):
        return {name: tensor}
    parts = ("gate", "up") if last == "gate_up_proj" else ("down",)
    return {
        f"{block}.{expert}.{part}_proj.weight": half.clone()
        for expert, weight in enumerate(tensor)
        for part, half in zip(parts, weight.chunk(len(parts)), strict=True)
    }


def _in(directory: Path, name: str, file: str) -> bool:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return bool(index["weight_map"][name] == file)
