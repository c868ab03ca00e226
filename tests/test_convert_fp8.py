"""Block-FP8 sources: what is read, what becomes of it, and what is wrong with one that is refused."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import block_fp8
import foreign
import pytest
import torch
from block_fp8 import SCALE
from checkpoints import edit_json, read_all
from click.testing import CliRunner
from conversion import convert
from hub import Hub
from hub_runner import Runner
from killing import digests
from safetensors.torch import save_file

from mxq import decode
from mxq.checkpoint import Checkpoint, fp8
from mxq.checkpoint.identity import fingerprint
from mxq.cli import main
from mxq.convert import ray_worker, recipe
from mxq.convert.plan import plan
from mxq.convert.work import Work
from mxq.errors import MxqError, UsageError
from mxq.formats import mxfp4
from mxq.models import qwen35
from mxq.verify.run import verify

LAYER = "model.language_model.layers.0."
OUT_PROJ = f"{LAYER}linear_attn.out_proj.weight"  # [256, 256]: quantized in dense models, kept in MoE


@pytest.fixture(scope="session")
def dense_fp8(dense_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: scales in bfloat16. Not to be changed: copy it."""
    return block_fp8.write(dense_source, tmp_path_factory.mktemp("fp8") / "dense")


@pytest.fixture(scope="session")
def moe_fp8(moe_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: routed experts one by one. Not to be changed: copy it."""
    return block_fp8.write(moe_source, tmp_path_factory.mktemp("fp8") / "moe")


@pytest.fixture(scope="session")
def odd_fp8(moe_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers holds it: fused experts, float32 scales; blocks that no matrix is a multiple of."""
    directory = tmp_path_factory.mktemp("fp8") / "odd"
    return block_fp8.write(moe_source, directory, scales=torch.float32, fused=True, block=(48, 80))


def changed(source: Path, place: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """A copy with one tensor changed or, where ``change`` returns None, removed."""
    shutil.copytree(source, place)
    block_fp8.edit(place, 2 if name.endswith(SCALE) else 1, name, change(read_all(source)[name]))
    return place


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", ["dense_fp8", "moe_fp8", "odd_fp8"])
def test_mxfp4_is_made_of_products_and_what_is_kept_is_them_as_bf16(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(kind)
    out = convert(source, tmp_path / "out", max_shard_size=1_000_000)
    numbers, stored, written = block_fp8.numbers(source), read_all(source), read_all(out)
    manifest = json.loads((out / "mxq_manifest.json").read_text())
    actions = {name: entry["action"] for name, entry in manifest["tensors"].items()}
    expected = set()
    for name, value in numbers.items():
        pieces = qwen35.pieces(name, value.shape)
        packed = [f"{piece.module}.weight" for piece in pieces if f"{piece.module}.weight_scale" in written]
        for piece, weight in zip(pieces, packed, strict=True) if packed else ():
            codes, scales = mxfp4.quantize(value.reshape(-1, value.shape[-1])[piece.start : piece.stop], "even")
            assert same_bits(written[weight], codes), weight
            assert same_bits(written[f"{weight}_scale"], scales), weight
            expected |= {weight, f"{weight}_scale"}
            assert actions[weight] == "quantize"
        if not packed:
            was_fp8 = name + SCALE in stored
            assert same_bits(written[name], value.bfloat16() if was_fp8 else value), name
            assert actions[name] == ("dequantize" if was_fp8 else "keep")
            expected.add(name)
    assert written.keys() == expected
    assert set(actions.values()) == {"quantize", "keep", "dequantize"}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "quark"
    assert "weight_block_size" not in str(config)
    assert manifest["source"]["fp8_blocks"] == ([48, 80] if kind == "odd_fp8" else [128, 128])
    assert manifest["source"]["bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert "| dequantize |" in (out / "README.md").read_text()
    report = verify(out, source, rows=0)
    assert not report.problems
    assert "FP8 in the source as bf16" in str(report.as_dict())


def test_plan_counts_scales_and_what_grows(moe_fp8: Path) -> None:
    made = plan(Checkpoint.open(moe_fp8), recipe.load("mxfp4"))
    stored = read_all(moe_fp8)
    decisions = {decision.tensor.name: decision for decision in made.decisions}
    assert decisions.keys() == {name for name in stored if not name.endswith(SCALE)}
    assert made.bytes_before == sum(tensor.nbytes for tensor in stored.values())
    kept, expert = decisions[OUT_PROJ], decisions[f"{LAYER}mlp.experts.1.up_proj.weight"]
    assert (kept.action, kept.tensor.dtype, kept.bytes_before, kept.bytes_after) == (
        "dequantize",
        "F8_E4M3",
        256 * 256 + 2 * 2 * 2,
        2 * 256 * 256,
    )
    assert (expert.action, expert.bytes_after) == ("quantize", 256 * 128 + 256 * 8)
    assert decisions[f"{LAYER}mlp.gate.weight"].action == "keep"
    grown = [decision for decision in made.decisions if decision.action == "dequantize"]
    assert any(f"{len(grown)} FP8 tensors that the recipe keeps" in lint for lint in made.lints)
    shown = CliRunner().invoke(main, ["plan", str(moe_fp8)])
    assert shown.exit_code == 0
    assert any(
        line.split()[:2] == ["dequantize", "model.*layers.*.self_attn.[qkvo]_proj"]
        for line in shown.output.splitlines()
    )


class OneFile:
    """A file as if it were elsewhere."""

    def __init__(self, file: Path) -> None:
        self._data = file.read_bytes()
        self.size = len(self._data)

    def read(self, start: int, count: int) -> bytes:
        return self._data[start : start + count]


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
def test_any_part_of_any_shape_is_read(scales: torch.dtype, tmp_path: Path) -> None:
    """Rows and columns that are no multiples of 128; bytes from any on, to any."""
    torch.manual_seed(0)
    tensors = {}
    for name, shape in {"a.weight": (200, 300), "b.experts.gate_up_proj": (3, 130, 160), "c.weight": (1, 32)}.items():
        tensors[name], tensors[name + SCALE] = block_fp8.quantize(torch.randn(shape), (128, 128), scales)
    save_file(tensors | {"d": torch.ones(3)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = block_fp8.numbers(tmp_path)
    source = copy.deepcopy(fp8.numbers(Checkpoint.open(tmp_path)))  # as another process would get it
    for view, kind in ((source, torch.float32), (fp8.rounded(source), torch.bfloat16)):
        assert view.tensors.keys() == expected.keys()
        for name, value in expected.items():
            value = value.to(kind) if name != "d" else value
            assert same_bits(view.read(name), value)
            data = value.view(torch.uint8).reshape(-1)
            for start, stop in ((0, 0), (1, 2), (3, 7), (len(data) // 3, len(data) - 1)):
                assert torch.equal(view.read_part(name, start, stop), data[start:stop])
        rows = view.read_rows("b.experts.gate_up_proj", 120, 300)
        assert same_bits(rows, expected["b.experts.gate_up_proj"].view(-1, 160)[120:300].to(kind))
    far = fp8.numbers(Checkpoint.open(tmp_path, {"model.safetensors": OneFile(tmp_path / "model.safetensors")}))
    (tmp_path / "model.safetensors").rename(tmp_path / "away")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert same_bits(far.read("a.weight"), expected["a.weight"])
    assert "quantization_config" not in source.config
    assert fp8.stored(source).tensors.keys() == tensors.keys() | {"d"}


def quantization(**change: Any) -> Callable[[Path], None]:
    """Change the quantization_config; None removes a key."""

    def apply(source: Path) -> None:
        def config(content: Any) -> None:
            held = content["quantization_config"] | change
            content["quantization_config"] = {key: value for key, value in held.items() if value is not None}

        edit_json(source / "config.json", config)

    return apply


def other(method: str, **keys: Any) -> Callable[[Path], None]:
    replaced = {"quant_method": method, **keys}
    return lambda source: edit_json(source / "config.json", lambda c: c.update(quantization_config=replaced))


def scale(change: Callable[[torch.Tensor], torch.Tensor | None], name: str = OUT_PROJ) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        block_fp8.edit(source, 2, name + SCALE, change(read_all(source)[name + SCALE]))

    return apply


def in_text_config(source: Path) -> None:
    def config(content: Any) -> None:
        content["text_config"]["quantization_config"] = {"quant_method": "gptq", "bits": 4}

    edit_json(source / "config.json", config)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (scale(lambda s: None), rf"{OUT_PROJ} F8_E4M3 \[256, 256\] has no {OUT_PROJ}{SCALE}"),
        (scale(lambda s: s[:1]), r"has scales \[1, 2\], by weight_block_size \[128, 128\] they would be \[2, 2\]"),
        (scale(lambda s: s.T, f"{LAYER}mlp.up_proj.weight"), r"has scales \[2, 4\], .* they would be \[4, 2\]"),
        (scale(lambda s: s.half()), "has scales of F16"),
        (
            lambda s: block_fp8.edit(s, 2, "x.weight_scale_inv", torch.ones(1, 1)),
            "x.weight_scale_inv belongs to no FP8",
        ),
        (lambda s: block_fp8.edit(s, 1, OUT_PROJ, None), rf"{OUT_PROJ}{SCALE} belongs to no FP8"),
        (quantization(weight_block_size=[64, 128]), r"by weight_block_size \[64, 128\]"),
        (quantization(weight_block_size=[128]), r"weight_block_size in config.json is \[128\]"),
        (quantization(weight_block_size=[0, 128]), r"weight_block_size in config.json is \[0, 128\]"),
        (quantization(weight_block_size=None), "without weight_block_size: one scale for each tensor"),
        (quantization(fmt="e5m2"), "FP8 of fmt 'e5m2'"),
        (quantization(activation_scheme="static"), "activation_scheme 'static'"),
        (other("gptq", bits=4), r"is already quantized \('gptq', bits 4\)"),
        (other("modelopt", quant_algo="NVFP4"), r"is already quantized \('modelopt', quant_algo 'NVFP4'\)"),
        (in_text_config, "two quantization_configs that differ"),
        (lambda s: edit_json(s / "config.json", lambda c: c.pop("quantization_config")), "has no quantization_config"),
    ],
)
def test_what_cannot_be_right_is_refused_before_a_byte_is_written(
    damage: Callable[[Path], None], reason: str, dense_fp8: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(dense_fp8, tmp_path / "source")
    damage(source)
    with pytest.raises(UsageError, match=reason):
        convert(source, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def set_to(value: float, row: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8)[row, 7] = int(value)
        else:
            tensor[row, 1] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("kind", "name", "change", "reason"),
    [
        ("dense_fp8", OUT_PROJ, set_to(0x7F, 130), rf"{OUT_PROJ} holds 1 values that are NaN or infinite, .* row 130"),
        ("moe_fp8", OUT_PROJ, set_to(0xFF, 5), rf"{OUT_PROJ} holds 1 values that are NaN or infinite, .* row 5"),
        ("dense_fp8", OUT_PROJ + SCALE, set_to(float("inf"), 1), rf"{OUT_PROJ}{SCALE} holds 1 scales .* row 1"),
        ("moe_fp8", OUT_PROJ + SCALE, set_to(float("nan"), 0), rf"{OUT_PROJ}{SCALE} holds 1 scales .* row 0"),
        ("moe_fp8", OUT_PROJ + SCALE, set_to(2.0**127, 0), rf"{OUT_PROJ} holds \d+ values that are NaN or infinite"),
    ],
    ids=["NaN quantized", "NaN kept", "infinite scale quantized", "NaN scale kept", "overflow"],
)
def test_numbers_that_are_none_are_named(
    kind: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    source = changed(request.getfixturevalue(kind), tmp_path / "source", name, change)
    with pytest.raises(MxqError, match=reason) as error:
        convert(source, tmp_path / "out")
    assert "nothing was left behind" in (error.value.hint or "")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("dense_fp8", "linear_attn.out_proj row 0 is not what the source's row quantizes to"),
        ("moe_fp8", f"{OUT_PROJ} is not what the source's FP8 weight is in bf16"),
    ],
)
def test_verify_finds_scales_that_were_transposed(
    kind: str, what: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of a square matrix, where no shape tells."""
    source = request.getfixturevalue(kind)
    out = convert(changed(source, tmp_path / "source", OUT_PROJ + SCALE, lambda s: s.T.clone()), tmp_path / "out")
    (problem,) = verify(out, source, rows=0).problems
    assert what in problem.what


def test_verify_takes_other_tools_conversions_of_it(dense_fp8: Path, tmp_path: Path) -> None:
    """Quark makes MXFP4 of the products, llm-compressor of them as bfloat16: a few codes are others."""
    ours = convert(dense_fp8, tmp_path / "ours")
    report = verify(foreign.quark(ours, tmp_path / "quark"), dense_fp8, rows=0)
    assert not report.problems
    assert "the scale rule even makes 100.00% of the blocks" in str(report.as_dict())
    between = shutil.copytree(dense_fp8, tmp_path / "between", ignore=shutil.ignore_patterns("*.safetensors*"))
    stored = read_all(dense_fp8)
    tensors = {
        name: value.bfloat16() if name + SCALE in stored else value
        for name, value in block_fp8.numbers(dense_fp8).items()
    }
    save_file(tensors, between / "model.safetensors", {"format": "pt"})
    edit_json(between / "config.json", lambda config: config.pop("quantization_config"))
    made = convert(between, tmp_path / "made")
    a, b = read_all(made), read_all(ours)
    assert a.keys() == b.keys()
    assert any(not torch.equal(a[name], b[name]) for name in a)
    report = verify(foreign.quark(made, tmp_path / "foreign"), dense_fp8, rows=0)
    assert not report.problems
    assert "the scale rule even makes 100.00% of the blocks" in str(report.as_dict())


def test_killed_and_run_again_it_ends_with_the_same_bytes(moe_fp8: Path, tmp_path: Path) -> None:
    undisturbed = convert(moe_fp8, tmp_path / "undisturbed", max_shard_size=3_000_000)
    script = Path(__file__).with_name("killing.py")
    words = [script, "before_recording", 3, tmp_path, "quantize", moe_fp8, "--max-shard-size", 3_000_000]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=True)
    *stops, undone = [json.loads(line) for line in done.stdout.splitlines()]
    assert any(run["recorded"] for run in stops)
    assert all(run["code"] == 0 for run in stops)
    assert all(run["files"] == digests(undisturbed) for run in (*stops, undone))


def test_streamed_from_the_hub_with_scales_in_another_file(
    dense_fp8: Path, hub: Hub, mxq: Runner, tmp_path: Path
) -> None:
    hub.add("org/fp8", dense_fp8)
    planned = mxq("plan", "org/fp8", "--json")
    assert json.loads(planned.stdout)["bytes_before"] == sum(t.nbytes for t in read_all(dense_fp8).values())
    mxq("quantize", "org/fp8", tmp_path / "out", "--stream")
    ours = convert(dense_fp8, tmp_path / "ours")
    for name in ("model.safetensors", "config.json", "layers.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (ours / name).read_bytes()


def test_another_node_makes_the_same_file(moe_fp8: Path, tmp_path: Path) -> None:
    made = plan(Checkpoint.open(moe_fp8), recipe.load("mxfp4"))
    (shard,) = made.shards
    work = Work(made.source, "even", shard, tuple(made.groups[outputs[0].name] for outputs in shard.groups))
    order = ray_worker.Order.of(work, fingerprint(made.source), tmp_path / "attempt", 1)
    assert len(order.states) == 2  # weights and scales
    answer = ray_worker.make(order)
    assert answer["checksum"]["sha256"] == digests(convert(moe_fp8, tmp_path / "out"))[shard.file]


def test_decoded_it_is_its_numbers_as_bf16(moe_fp8: Path, tmp_path: Path) -> None:
    """The source itself as the bf16 target, and its conversion, which knows it as its source."""
    parameters = dict(decode.load_target(moe_fp8).model.named_parameters())
    numbers = block_fp8.numbers(moe_fp8)
    assert torch.equal(parameters["layers.0.linear_attn.out_proj.weight"], numbers[OUT_PROJ].bfloat16())
    expert = torch.cat([numbers[f"{LAYER}mlp.experts.2.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(parameters["layers.0.mlp.experts.gate_up_proj"][2], expert.bfloat16())
    out = convert(moe_fp8, tmp_path / "out")
    words = ["eval", "--bf16", moe_fp8, "--mxfp4", out, "--spec", "mtp", "-k", 2, "--workload", "arithmetic"]
    words += ["--limit", 1, "--max-tokens", 4, "--out", tmp_path / "run"]
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    assert "is block-FP8: what is called bf16 here" in done.stderr
    assert "converted from another model" not in done.stderr
    wrong = CliRunner().invoke(main, [*map(str, ["eval", "--mxfp4", moe_fp8, *words[5:-1], tmp_path / "run2"])])
    assert wrong.exit_code == 2
    assert "is not the MXFP4 target" in wrong.stderr


def test_inspect_names_it(dense_fp8: Path) -> None:
    shown = CliRunner().invoke(main, ["inspect", str(dense_fp8)])
    assert shown.exit_code == 0
    assert "weights in FP8 (F8_E4M3), a scale for blocks of 128 x 128" in shown.output
    assert "FP8 scales" in shown.output
