"""Calibrations without Quark, made in no time: what they return has the form, and the meaning, of real ones'."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from mxq.calibrate.results import Calibrated
from mxq.calibrate.text import Samples
from mxq.checkpoint import Checkpoint, fp8
from mxq.convert.calibration import Stage
from mxq.convert.plan import plan
from mxq.convert.recipe import load
from mxq.convert.run import run
from mxq.formats import elements, mxfp4
from mxq.models import qwen35
from mxq.models.qwen35 import Piece

Bytes = tuple[torch.Tensor, torch.Tensor]
UNSEEN = "model.language_model.layers.0.mlp.experts.1"
"""The expert that no token reaches."""

TEXT = "".join(
    f"Line {number} of a text that says {number * number}, and then {number % 7}.\n" for number in range(400)
)
"""Enough for a few samples."""


@dataclass(frozen=True)
class Fake(Calibrated):
    """A calibration whose codes are in memory."""

    bytes_of: Mapping[str, Bytes] = field(default_factory=dict)

    def codes(self, module: str) -> Bytes:
        return self.bytes_of[module]


def scale(name: str, count: int) -> torch.Tensor:
    """What columns are multiplied by: between a half and two, no powers of two."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.exp2(torch.rand(count, generator=generator) * 2 - 1)


def clip(name: str, count: int) -> torch.Tensor:
    """What the largest of each block of a row is multiplied by, before all beyond it is made that."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.55 + 0.05 * torch.randint(0, 10, (count, 1, 1), generator=generator)


def tuned(name: str, x: torch.Tensor) -> Bytes:
    """Codes beside the nearest, as GPTQ has them, under the scales of rounding."""
    scales = mxfp4.quantize(x)[1]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    y = x.float().view(*scales.shape, 32) / mxfp4.scale_values(scales).unsqueeze(-1)
    codes = elements.encode(y + (torch.rand(y.shape, generator=generator) - 0.5) * 0.6, signed_zero=False)
    pairs = codes.to(torch.uint8).view(x.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def calibrate(
    source: Checkpoint,
    pieces: Sequence[Piece],
    algorithm: str,
    options: Mapping[str, Any],
    samples: Samples,
    directory: Path,
    *,
    device: str = "cpu",
    after_block: Callable[[int], None] = lambda _: None,
) -> Fake:
    """As :func:`mxq.calibrate.engine.calibrate`; ``after_block`` is called when a block's file is there."""
    held = {piece.module: piece for piece in pieces}
    kept, columns, rows = {}, {}, {}
    for module, piece in held.items() if algorithm != "gptq" else ():
        prefix, _, last = module.rpartition(".")
        if last == "down_proj":
            count = source.tensors[piece.tensor].shape[-1]
            columns[module] = rows[f"{prefix}.up_proj"] = scale(module, count)
        if last == "up_proj" and prefix.endswith(".mlp"):
            norm = f"{prefix.removesuffix('.mlp')}.post_attention_layernorm.weight"
            weight = source.read(norm)
            gain = 1 + weight.float()
            kept[norm] = (gain / scale(prefix, len(gain)) - 1).to(weight.dtype)
            columns[module] = columns[f"{prefix}.gate_proj"] = gain / (1 + kept[norm].float())
    made = {}
    for module, piece in held.items():
        x = source.read_rows(piece.tensor, piece.start, piece.stop).float()
        x = x * columns[module] if module in columns else x
        x = x / rows[module][:, None] if module in rows else x
        unseen = module.startswith(UNSEEN + ".")
        is_rounded = algorithm != "gptq" or unseen
        if algorithm == "awq" and not unseen:
            blocks_of = x.view(len(x), -1, 32)
            most = blocks_of.abs().amax(dim=-1, keepdim=True) * clip(module, len(x))
            x = torch.where(blocks_of.abs() > most, most.copysign(blocks_of), blocks_of).view(x.shape)
        made[module] = mxfp4.quantize(x) if is_rounded else tuned(module, x)
    blocks = sorted({module.split(".layers.")[1].split(".")[0] for module in held}, key=int)
    directory.mkdir(exist_ok=True)
    for block in map(int, blocks):
        file = directory / f"block-{block:05}.safetensors"
        if not file.exists():
            save_file({"x": torch.zeros(1)}, file)
            after_block(block)
    experts = {module.rpartition(".")[0] for module in held if qwen35.experts_module(module)}
    return Fake(
        directory=directory,
        modules=dict.fromkeys(held, directory),
        kept=kept,
        column_scales=columns,
        row_scales=rows,
        fallback=tuple(module for module in held if module.startswith(UNSEEN + ".")),
        tokens_seen={expert: 0 if expert == UNSEEN else 7 for expert in experts},
        facts={"seconds": 1.0},
        bytes_of=made,
    )


def fake(monkeypatch: pytest.MonkeyPatch, after_block: Callable[[int], None] = lambda _: None) -> None:
    """Put it in the real one's place."""

    def replaced(*arguments: Any, **options: Any) -> Fake:
        return calibrate(*arguments, **options, after_block=after_block)

    monkeypatch.setattr("mxq.calibrate.engine.calibrate", replaced)
    monkeypatch.setattr("mxq.calibrate.quark.load", lambda: "0.0")
    monkeypatch.setattr("mxq.calibrate.quark.check_algorithm", lambda family, algorithm: None)


def recipe(directory: Path, kind: str, samples: int = 2, length: int = 16, **changes: Any) -> str:
    """A recipe that asks for little text."""
    content = {
        "name": f"little-{kind}",
        "description": "little text",
        "extends": "mxfp4",
        "algorithm": kind,
        "calibration": {"set": None, "samples": samples, "length": length, "seed": 0},
    }
    file = directory / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(content | changes))
    return str(file)


def text(directory: Path) -> Path:
    """A file with text enough for it."""
    file = directory / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    return file


def convert(source: Path, out: Path, algorithm: str, *, sha256: str = "0" * 64, **options: Any) -> Path:
    """Convert ``source`` by ``mxfp4-ALGORITHM``, without text of any kind; returns ``out``."""
    chosen = load(f"mxfp4-{algorithm}")
    facts = {"set": "fake", "samples": 2, "length": 8, "seed": 0, "documents": 1, "sha256": sha256}
    stage = Stage(algorithm, dict(chosen.options), Samples(torch.zeros(2, 8, dtype=torch.int64), facts), "cpu")
    run(plan(Checkpoint.open(source), chosen, **options), out, str(source), stage=stage)
    return out


def original(source: Path) -> Checkpoint:
    """The checkpoint as the numbers that it means."""
    return fp8.numbers(Checkpoint.open(source))
