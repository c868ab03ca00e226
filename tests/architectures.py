"""Checkpoints of the published models' real dimensions without their weights: headers alone, the files sparse."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from block_fp8 import LINEARS

NAMES = ("Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B")
_DATA = Path(__file__).parent / "data" / "architectures"
_SHARD_BYTES = 5_000_000_000
_FP8_BLOCK = 128
_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
_FULL_PRECISION = (".A_log", ".linear_attn.norm.weight")

Shapes = dict[str, tuple[int, ...]]


def config(name: str) -> dict[str, Any]:
    """Return config.json of a published model, as far as its sizes go."""
    found: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text())
    return found


def shapes(name: str) -> Shapes:
    """Return every tensor of a published model: transformers' own, and the MTP head, which transformers leaves out."""
    from transformers import (
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
    )

    values = config(name)
    moe = values["model_type"] == "qwen3_5_moe"
    model_class = Qwen3_5MoeForConditionalGeneration if moe else Qwen3_5ForConditionalGeneration
    with torch.device("meta"):
        model = model_class((Qwen3_5MoeConfig if moe else Qwen3_5Config).from_dict(values))
    found = {tensor: tuple(value.shape) for tensor, value in model.state_dict().items()}
    return found | dict(_mtp(found, values["text_config"]["hidden_size"]))


def _mtp(found: Shapes, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The head's layer is one of full attention, its experts stored one by one."""
    layer = "model.language_model.layers.3."
    for name, shape in found.items():
        if not name.startswith(layer):
            continue
        rest = name.removeprefix(layer)
        if rest == "mlp.experts.gate_up_proj":
            for expert in range(shape[0]):
                for half in ("gate", "up"):
                    yield f"mtp.layers.0.mlp.experts.{expert}.{half}_proj.weight", (shape[1] // 2, shape[2])
        elif rest == "mlp.experts.down_proj":
            for expert in range(shape[0]):
                yield f"mtp.layers.0.mlp.experts.{expert}.down_proj.weight", shape[1:]
        else:
            yield f"mtp.layers.0.{rest}", shape
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{norm}.weight", (hidden,)


def _in_bfloat16(found: Shapes) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for name, shape in found.items():
        yield name, "F32" if name.endswith(_FULL_PRECISION) else "BF16", shape


def _in_fp8(found: Shapes) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for name, dtype, shape in _in_bfloat16(found):
        for one, matrix in _one_by_one(name, shape):
            if LINEARS.fullmatch(one):
                yield one, "F8_E4M3", matrix
                yield f"{one}_scale_inv", "BF16", tuple(-(-size // _FP8_BLOCK) for size in matrix)
            else:
                yield one, dtype, matrix


def _one_by_one(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts, _, last = name.rpartition(".")
    if not experts.endswith(".experts"):
        yield name, shape
        return
    for expert in range(shape[0]):
        for part in ("gate", "up") if last == "gate_up_proj" else ("down",):
            rows = shape[1] // 2 if last == "gate_up_proj" else shape[1]
            yield f"{experts}.{expert}.{part}_proj.weight", (rows, shape[2])


def write(directory: Path, name: str, *, fp8: bool = False) -> Path:
    """Write the checkpoint: config.json, index, and shards whose data is a hole; returns ``directory``.

    It is in bfloat16, or in block-FP8 with experts one by one, as such checkpoints are published.
    """
    directory.mkdir(parents=True)
    values = config(name)
    if fp8:
        values["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
        }
    (directory / "config.json").write_text(json.dumps(values))
    parts: list[dict[str, Any]] = [{}]
    sizes = [0]
    for tensor, dtype, shape in _in_fp8(shapes(name)) if fp8 else _in_bfloat16(shapes(name)):
        size = math.prod(shape) * _BYTES[dtype]
        if sizes[-1] and sizes[-1] + size > _SHARD_BYTES:
            parts.append({})
            sizes.append(0)
        parts[-1][tensor] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [sizes[-1], sizes[-1] + size],
        }
        sizes[-1] += size
    weight_map: dict[str, str] = {}
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True), start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        header = json.dumps({"__metadata__": {"format": "pt"}} | part).encode()
        header += b" " * (-len(header) % 8)
        with (directory / file).open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.truncate(8 + len(header) + size)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
