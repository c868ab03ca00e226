"""Calibration with the real AMD Quark: its own bytes, block by block, and what differs from it on purpose."""

import contextlib
import re
from pathlib import Path
from typing import Any

import block_fp8
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mxq import files, testbed
from mxq.calibrate import OPTIONS, Calibration, quark
from mxq.calibrate.blocks import Blocks
from mxq.calibrate.engine import calibrate
from mxq.calibrate.text import Samples, tokens
from mxq.checkpoint import Checkpoint, fp8
from mxq.errors import MxqError, UsageError
from mxq.formats.mxfp4 import dequantize, quantize
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


def in_float32(checkpoint: Checkpoint, directory: Path, layers: int = 4) -> Checkpoint:
    """A copy of its first layers whose norms lose nothing: there mxq scales exactly as Quark alone does."""
    directory.mkdir()
    beyond = re.compile(rf"model\.language_model\.layers\.[{layers}-9]\.")
    held = {name: checkpoint.read(name).float() for name in checkpoint.tensors if not beyond.match(name)}
    save_file(held, directory / "model.safetensors", {"format": "pt"})
    inner = checkpoint.config["text_config"]
    inner = inner | {"num_hidden_layers": layers, "layer_types": inner["layer_types"][:layers]}
    files.write_json(directory / "config.json", checkpoint.config | {"text_config": inner})
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
    checkpoint = in_float32(source(name), tmp_path / "source", 4 if name == "dense" else 2)
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


def in_layers(found: list[Piece], *indices: int) -> list[Piece]:
    return [piece for piece in found if int(piece.module.split(".layers.")[1].split(".")[0]) in indices]


def weight(checkpoint: Checkpoint, piece: Piece) -> Tensor:
    return checkpoint.read_rows(piece.tensor, piece.start, piece.stop)


def test_an_expert_without_tokens_is_rounded_to_nearest_where_quark_alone_sets_it_to_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = source("moe")
    wanted = in_layers(pieces(checkpoint), 0)
    samples = text(1, 1)
    made = calibrate(checkpoint, wanted, "gptq", OPTIONS["gptq"], samples, tmp_path / "ours")
    seen = made.tokens_seen
    assert sorted(seen.values()) == [0, 0, 1, 1]  # one token, two of four experts
    unseen = {piece.module: piece for piece in wanted if seen[piece.module.rpartition(".")[0]] == 0}
    assert set(made.fallback) == set(unseen)
    assert len(unseen) == 6
    for module, piece in unseen.items():
        assert all(map(torch.equal, made.codes(module), quantize(weight(checkpoint, piece)))), module
    smooth = calibrate(checkpoint, wanted, "smoothquant", OPTIONS["smoothquant"], samples, tmp_path / "smooth")
    for module in smooth.fallback:
        assert all(map(torch.equal, smooth.codes(module), quantize(weight(checkpoint, unseen[module])))), module
        assert module not in {**smooth.row_scales, **smooth.column_scales}
    monkeypatch.setattr(quark, "_altered", lambda *args: contextlib.nullcontext())
    alone = calibrate(checkpoint, wanted, "gptq", OPTIONS["gptq"], samples, tmp_path / "alone")
    for module in made.modules:
        assert alone.codes(module)[0].any() == (module not in unseen), module


def test_gptq_keeps_the_function_better_than_rounding_on_text_it_has_not_seen(tmp_path: Path) -> None:
    checkpoint = source("dense")
    wanted = in_layers(pieces(checkpoint), 0, 1, 2, 3)
    made = calibrate(checkpoint, wanted, "gptq", OPTIONS["gptq"], text(16, 128), tmp_path)
    held_out = Calibration(",".join(testbed.WORKLOADS), 4, 128, 0)
    ids = tokens(held_out, "", testbed.path("testbed:dense"), 768).ids
    blocks = Blocks(checkpoint, torch.device("cpu"))
    values = {"as it was": blocks.embed(ids), "rounded": blocks.embed(ids), "calibrated": blocks.embed(ids)}
    errors = []
    for index in range(4):
        for how in values:
            model = blocks.load(index)
            for piece in in_layers(wanted, index) if how != "as it was" else []:
                before = weight(checkpoint, piece)
                after = made.codes(piece.module) if how == "calibrated" else quantize(before)
                linear = model.layers[0].get_submodule(piece.module.removeprefix(blocks.name(index)))
                linear.weight.copy_(dequantize(*after, torch.float32))
            values[how] = blocks.run(model, [values[how]])[0]
        errors.append([(values[how] - values["as it was"]).square().mean() for how in ("calibrated", "rounded")])
    for calibrated, rounded in errors:
        assert calibrated < 0.8 * rounded, errors


@pytest.mark.parametrize(("name", "algorithm"), [("dense", "smoothquant"), ("moe", "smoothquant"), ("dense", "awq")])
def test_scaled_weights_and_stored_norms_leave_the_function_as_it_was(
    name: str, algorithm: str, tmp_path: Path
) -> None:
    checkpoint = source(name)
    wanted = in_layers(pieces(checkpoint, Role.EXPERT if name == "moe" else Role.MLP), 0)
    samples = text(1, 32)
    made = calibrate(checkpoint, wanted, algorithm, OPTIONS[algorithm], samples, tmp_path)
    assert made.row_scales
    assert len(made.kept) == (0 if name == "moe" else 1)
    blocks = Blocks(checkpoint, torch.device("cpu"))
    plain, scaled = blocks.load(0), blocks.load(0)
    quark.unfuse(scaled)
    for piece in wanted:
        linear = scaled.layers[0].get_submodule(piece.module.removeprefix(blocks.name(0)))
        if (rows := made.row_scales.get(piece.module)) is not None:
            linear.weight.div_(rows[:, None])
        if (columns := made.column_scales.get(piece.module)) is not None:
            linear.weight.mul_(columns)
    for tensor, value in made.kept.items():
        assert value.dtype == torch.bfloat16
        scaled.get_parameter(f"layers.0.{tensor.removeprefix(blocks.name(0))}").copy_(value)
    hidden = blocks.embed(samples.ids)
    before, after = (blocks.run(model, [hidden])[0] for model in (plain, scaled))
    assert (before - after).abs().max() < 1e-5 * before.abs().max()
    assert made.facts["clips"] == (algorithm == "awq")


def test_a_calibration_that_was_stopped_goes_on_at_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = source("dense")
    wanted = in_layers(pieces(checkpoint, Role.MLP), 0, 2, 3)  # nothing is quantized in block 1
    arguments = (checkpoint, wanted, "smoothquant", OPTIONS["smoothquant"], text(2, 16))
    whole = calibrate(*arguments, tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors")) == [
        f"block-0000{index}.safetensors" for index in range(4)
    ]
    loaded: list[int] = []
    load = Blocks.load

    def stops(self: Blocks, index: int) -> Any:
        if index == 2 and not loaded.count(2):
            loaded.append(2)
            raise KeyboardInterrupt
        loaded.append(index)
        return load(self, index)

    monkeypatch.setattr(Blocks, "load", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate(*arguments, tmp_path / "stopped")
    (tmp_path / "stopped" / ".block-00002.safetensors.tmp").write_bytes(b"half")
    loaded[:] = [2]
    again = calibrate(*arguments, tmp_path / "stopped")
    assert loaded == [2, 2, 3]
    assert not list((tmp_path / "stopped").glob(".*"))
    for path in (tmp_path / "whole").glob("block-*"):
        ours, theirs = (load_file(directory / path.name) for directory in (tmp_path / "whole", tmp_path / "stopped"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    loaded.clear()
    assert calibrate(*arguments, tmp_path / "stopped").modules.keys() == again.modules.keys() == whole.modules.keys()
    assert loaded == []
    with pytest.raises(UsageError, match="holds a calibration that differs in options; delete it"):
        calibrate(*arguments[:3], {"alpha": 0.6, "scale_clamp_min": 1e-3}, arguments[4], tmp_path / "stopped")
    (tmp_path / "stopped" / "block-00001.safetensors").write_bytes(b"damaged")
    with pytest.raises(MxqError, match=r"block-00001\.safetensors cannot be read: .*; delete .*stopped"):
        calibrate(*arguments, tmp_path / "stopped")


def test_block_fp8_is_calibrated_from_its_products(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(block_fp8.write(testbed.path("testbed:moe"), tmp_path / "fp8"))
    numbers = fp8.numbers(checkpoint)
    wanted = in_layers(pieces(numbers), 0)
    made = calibrate(checkpoint, wanted, "gptq", OPTIONS["gptq"], text(1, 1), tmp_path / "calibration")
    assert made.fallback
    for piece in wanted:
        if piece.module in made.fallback:
            assert torch.equal(made.codes(piece.module)[0], quantize(weight(numbers, piece))[0])


def test_what_cannot_be_calibrated_is_refused_in_one_line(tmp_path: Path) -> None:
    checkpoint = source("moe")
    mtp = Piece("mtp.layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.q_proj.weight", 0, 512)
    norm = "model.language_model.layers.0.input_layernorm"
    for wanted, complaint in (
        ([mtp], "mtp.layers.0.self_attn.q_proj is in no decoder layer"),
        ([], "the recipe quantizes nothing"),
        ([Piece(norm, f"{norm}.weight", 0, 1)], "input_layernorm is no linear"),
        ([Piece(norm.replace("0.input_layernorm", "0.mlp.gate"), "", 0, 1)], "mlp.gate is no linear"),
        ([Piece(norm.replace("layers.0", "layers.99"), "", 0, 1)], "is in no decoder layer"),
    ):
        with pytest.raises(UsageError, match=complaint) as caught:
            calibrate(checkpoint, wanted, "gptq", OPTIONS["gptq"], text(1, 4), tmp_path / complaint[:12])
        assert "\n" not in str(caught.value)


def test_an_algorithm_that_quark_does_not_have_for_the_architecture_names_those_it_has() -> None:
    quark.check_algorithm("qwen3_5", "gptaq")
    for algorithm in ("gptaq", "rotation", "autoround"):
        with pytest.raises(UsageError) as caught:
            quark.check_algorithm("qwen3_5_moe", algorithm)
        assert str(caught.value) == (
            f"AMD Quark has no {algorithm} for qwen3_5_moe; "
            "it has autosmoothquant, awq, gptq, qronos, smoothquant there"
        )


def test_numbers_that_are_not_finite_are_errors(tmp_path: Path) -> None:
    checkpoint = in_float32(source("dense"), tmp_path / "source")
    held = load_file(checkpoint.path / "model.safetensors")
    wanted = in_layers(pieces(checkpoint, Role.MLP), 1)
    name = "model.language_model.layers.{}.mlp.up_proj.weight"
    for layer, value, complaint in (
        (1, float("nan"), r"layers\.1\.mlp\.up_proj\.weight holds values that are NaN"),
        (0, 3e38, r"calibrating model\.language_model\.layers\.0: its output became NaN or infinite"),
    ):
        damaged = held | {name.format(layer): torch.full_like(held[name.format(layer)], value)}
        save_file(damaged, checkpoint.path / "model.safetensors", {"format": "pt"})
        with pytest.raises(MxqError, match=complaint):
            calibrate(checkpoint, wanted, "gptq", OPTIONS["gptq"], text(1, 8), tmp_path / str(layer))
