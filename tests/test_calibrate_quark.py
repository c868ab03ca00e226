"""Calibration with the real AMD Quark: its own bytes, block by block, and what differs from it on purpose."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mxq import files, testbed
from mxq.calibrate import OPTIONS, Calibration, quark
from mxq.calibrate.engine import calibrate
from mxq.calibrate.text import Samples, tokens
from mxq.checkpoint import Checkpoint
from mxq.models import qwen35
from mxq.models.qwen35 import Piece, Role

pytest.importorskip("quark")
pytestmark = pytest.mark.slow

LENGTH = 64


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    quark.load()


def source(name: str) -> Checkpoint:
    return Checkpoint.open(testbed.path(f"testbed:{name}"))


def pieces(checkpoint: Checkpoint, *roles: Role) -> list[Piece]:
    moe = qwen35.family(checkpoint.config, "") == "qwen3_5_moe"
    roles = roles or ((Role.EXPERT,) if moe else (Role.ATTENTION, Role.GDN, Role.MLP))
    return [
        piece
        for name, tensor in checkpoint.tensors.items()
        if qwen35.part(name) == "text" and qwen35.role(name) in roles
        for piece in qwen35.pieces(name, tensor.shape)
    ]


def text(samples: int, length: int = LENGTH, seed: int = 0) -> Samples:
    return tokens(Calibration(None, samples, length, seed), "testbed:", testbed.path("testbed:dense"), 768)


def in_float32(checkpoint: Checkpoint, directory: Path) -> Checkpoint:
    """A copy of four layers whose norms lose nothing: there mxq scales exactly as Quark alone does."""
    shutil.copytree(checkpoint.path, directory)
    (directory / "model.safetensors.index.json").unlink()
    for file in directory.glob("*.safetensors"):
        file.unlink()
    beyond = re.compile(r"model\.language_model\.layers\.[4-9]\.")
    held = {name: checkpoint.read(name).float() for name in checkpoint.tensors if not beyond.match(name)}
    save_file(held, directory / "model.safetensors", {"format": "pt"})
    config = checkpoint.config | {"text_config": checkpoint.config["text_config"] | {"num_hidden_layers": 4}}
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:4]
    files.write_json(directory / "config.json", config)
    return Checkpoint.open(directory)


def whole_model(
    checkpoint: Checkpoint, modules: set[str], algorithm: str, ids: Tensor, batch: int, out: Path
) -> Checkpoint:
    """What Quark alone makes of the whole model: its own tables, its own order, its own export."""
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.api import export_safetensors
    from quark.torch.utils.llm.model_preparation import preprocess_for_quantization
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    preprocess_for_quantization(model)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = LLMTemplate.get(model.config.model_type).get_config(
        scheme="mxfp4", algorithm=[algorithm], exclude_layers=[name for name in linears if name not in modules]
    )
    quantizer = ModelQuantizer(config)
    loader: Any = torch.utils.data.DataLoader(ids, batch_size=batch)  # type: ignore[arg-type]
    with quark._quiet():
        model = quantizer.freeze(quantizer.quantize_model(model, loader))
        export_safetensors(model, str(out))
    return Checkpoint.open(out)


@pytest.mark.parametrize("algorithm", ["gptq", "awq", "smoothquant"])
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_block_by_block_makes_the_bytes_of_quark_over_the_whole_model(
    name: str, algorithm: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = in_float32(source(name), tmp_path / "source")
    wanted = pieces(checkpoint)
    samples = text(2, 24) if algorithm == "awq" else text(4)  # its search for clips takes long
    made = calibrate(checkpoint, wanted, algorithm, OPTIONS[algorithm], samples, tmp_path / "calibration")
    assert capfd.readouterr().out == ""
    theirs = whole_model(
        checkpoint, {piece.module for piece in wanted}, algorithm, samples.ids, len(samples.ids), tmp_path / "theirs"
    )
    assert set(made.modules) == {piece.module for piece in wanted}
    differing = [
        module
        for module in made.modules
        if not torch.equal(made.codes(module)[0], theirs.read(f"{module}.weight"))
        or not torch.equal(made.codes(module)[1], theirs.read(f"{module}.weight_scale"))
    ]
    assert differing == []
    for tensor, value in made.kept.items():
        assert torch.equal(value, theirs.read(tensor)), tensor
