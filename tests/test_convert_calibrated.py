"""Converting by a calibrated recipe: what is the calibration's, what the source's, and what is said of it."""

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import block_fp8
import calibrated
import numpy as np
import pytest
import torch
import yaml
from checkpoints import metadata, read_all, reseal, rewrite
from click.testing import CliRunner
from conversion import convert
from killing import digests

from mxq.calibrate import quark
from mxq.checkpoint import Checkpoint
from mxq.cli import main
from mxq.convert.calibration import pieces
from mxq.convert.plan import plan
from mxq.convert.recipe import load
from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.formats import mxfp4
from mxq.verify.run import verify

LOAD = quark.load


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated.fake(monkeypatch)


def made(source: Path, directory: Path, algorithm: str) -> calibrated.Fake:
    """What the calibration returns for a source."""
    planned = plan(Checkpoint.open(source), load(f"mxfp4-{algorithm}"))
    return calibrated.calibrate(planned.source, pieces(planned), algorithm, {}, None, directory)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
@pytest.mark.parametrize("form", [("quark", "per-expert", 10**6), ("compressed-tensors", "fused", 10**10)])
def test_codes_scales_and_norms_are_the_calibrations_and_all_else_the_sources(
    source: Path, tmp_path: Path, algorithm: str, form: tuple[str, str, int]
) -> None:
    name, experts, shard = form
    out = calibrated.convert(source, tmp_path / "out", algorithm, form=name, experts=experts, max_shard_size=shard)
    expected, before, after = made(source, tmp_path / "work", algorithm), read_all(source), read_all(out)
    weight = "weight_packed" if name == "compressed-tensors" else "weight"
    for module, (packed, scale) in expected.bytes_of.items():
        if experts == "fused" and ".experts." in module:
            continue
        assert torch.equal(after.pop(f"{module}.{weight}"), packed), module
        assert torch.equal(after.pop(f"{module}.weight_scale"), scale), module
    if experts == "fused":
        for block in {module.partition(".experts.")[0] for module in expected.bytes_of if ".experts." in module}:
            for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                codes, scales = (
                    torch.stack(
                        [
                            torch.cat([expected.bytes_of[f"{block}.experts.{e}.{part}"][i] for part in parts])
                            for e in range(4)
                        ]
                    )
                    for i in (0, 1)
                )
                suffix = "_packed" if name == "compressed-tensors" else ""
                assert torch.equal(after.pop(f"{block}.experts.{fused}{suffix}"), codes)
                assert torch.equal(after.pop(f"{block}.experts.{fused}_scale"), scales)
    assert len(expected.kept) == (4 if algorithm != "gptq" and source.name == "dense" else 0)
    for tensor, values in after.items():
        wanted = expected.kept.get(tensor, before[tensor])
        assert values.dtype == wanted.dtype
        assert torch.equal(values.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)), tensor
    assert {name for name in before if name.startswith(("mtp.", "model.visual.", "lm_head"))} <= after.keys()
    assert all(metadata(file) == {"format": "pt"} for file in out.glob("*.safetensors"))
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]
    report = verify(out, source, rows=0)
    assert report.problems == []
    assert all(check.done for check in report.checks)


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_manifest_card_and_errors_say_how_it_was_made(source: Path, tmp_path: Path, algorithm: str) -> None:
    out = calibrated.convert(source, tmp_path / "out", algorithm)
    expected = made(source, tmp_path / "work", algorithm)
    manifest = json.loads((out / "mxq_manifest.json").read_text())
    assert manifest["recipe"] == load(f"mxfp4-{algorithm}").as_dict()
    assert manifest["recipe"]["algorithm"] == algorithm
    text = {"set": "fake", "samples": 2, "length": 8, "seed": 0, "documents": 1, "sha256": "0" * 64, "device": "cpu"}
    assert manifest["calibration"] == text
    assert {"amd-quark", "transformers", "torch"} <= manifest["versions"].keys()
    assert manifest["calibrated"]["folded"] == sorted(expected.kept)
    assert manifest["calibrated"]["rounded_to_nearest"] == sorted(expected.fallback)
    assert {name for name, tensor in manifest["tensors"].items() if tensor["action"] == "fold"} == expected.kept.keys()
    seen = manifest["calibrated"]["tokens_per_expert"]
    card = (out / "README.md").read_text()
    assert f"| calibrated by | {algorithm.upper()} of AMD Quark " in card
    assert "| calibration text | fake: 2 samples of 8 tokens (16 tokens), seed 0 |" in card
    if source.name == "moe":
        assert seen[calibrated.UNSEEN.rpartition(".")[0]] == [7, 0, 7, 7]
        assert "| routed experts by tokens of it | 0 to 7; 1 saw none, and are rounded to the nearest |" in card
    else:
        assert seen == {}
        assert ("but 4 norms, which undo what columns behind them were scaled by" in card) == (algorithm == "awq")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["algo_config"] is None  # a list of tables, which vLLM before 0.32 takes for names of layers
    lines = [json.loads(line) for line in (out / "layers.jsonl").read_text().splitlines()]
    assert {line["module"] for line in lines} == expected.modules.keys()
    checkpoint = calibrated.original(source)
    planned = {piece.module: piece for piece in pieces(plan(Checkpoint.open(source), load("mxfp4")))}
    for line in lines[::5]:
        module = line["module"]
        piece = planned[module]
        x = checkpoint.read_rows(piece.tensor, piece.start, piece.stop).double()
        decoded = mxfp4.dequantize(*expected.bytes_of[module], torch.float32).double()
        if module in expected.column_scales:
            decoded = decoded / expected.column_scales[module].double()
        if module in expected.row_scales:
            decoded = decoded * expected.row_scales[module].double()[:, None]
        error = float((decoded - x).norm() / x.norm())
        assert line["relative_error"] == pytest.approx(error, abs=1e-6)
        assert line["shape"] == list(x.shape)


def test_codes_that_are_rounded_never_go_by_the_name_of_an_algorithm(dense_source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recipe mxfp4-gptq and its calibration do not go together"):
        convert(dense_source, tmp_path / "out", "mxfp4-gptq")
    assert not list(tmp_path.iterdir())


def test_what_was_scaled_by_what_is_kept_where_engines_do_not_look(dense_source: Path, tmp_path: Path) -> None:
    out = calibrated.convert(dense_source, tmp_path / "out", "awq")
    expected = made(dense_source, tmp_path / "work", "awq")
    with np.load(out / "mxq_scales.npz") as scales:
        assert set(scales.files) == {
            *(f"{name}.columns" for name in expected.column_scales),
            *(f"{name}.rows" for name in expected.row_scales),
        }
        for name, values in expected.column_scales.items():
            np.testing.assert_array_equal(scales[f"{name}.columns"], values.numpy())
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
    assert not (calibrated.convert(dense_source, tmp_path / "gptq", "gptq") / "mxq_scales.npz").exists()


def test_the_model_computes_the_same_but_for_the_rounding(dense_source: Path, tmp_path: Path) -> None:
    """With the scales undone in the weights, and without rounding, logits are the source's."""
    from mxq import decode

    expected = made(dense_source, tmp_path / "work", "awq")
    target, scaled = (decode.load_target(dense_source, dtype=torch.float32) for _ in range(2))
    parameters = dict(scaled.model.named_parameters())
    for name in {*expected.column_scales, *expected.row_scales}:
        weight = next(value for key, value in parameters.items() if name.partition("layers.")[2] in key)
        with torch.no_grad():
            if name in expected.column_scales:
                weight.mul_(expected.column_scales[name])
            if name in expected.row_scales:
                weight.div_(expected.row_scales[name][:, None])
    for name, value in expected.kept.items():
        norm = next(part for key, part in parameters.items() if name.partition("layers.")[2] in key)
        norm.data = value.float()
    ids = torch.arange(24).view(1, -1)
    with torch.no_grad():
        a, b = (one.model(input_ids=ids).last_hidden_state for one in (target, scaled))
    assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)


def test_block_fp8_is_calibrated_as_the_numbers_that_it_means(dense_source: Path, tmp_path: Path) -> None:
    source = block_fp8.write(dense_source, tmp_path / "fp8")
    out = calibrated.convert(source, tmp_path / "out", "gptq")
    assert verify(out, source, rows=0).problems == []
    expected = made(source, tmp_path / "work", "gptq")
    after = read_all(out)
    for module, (packed, _) in expected.bytes_of.items():
        assert torch.equal(after[f"{module}.weight"], packed)


@pytest.mark.parametrize("stop", ["block", "shard"])
def test_stopped_at_a_block_or_a_file_it_continues_to_the_same_bytes(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    undisturbed = calibrated.convert(dense_source, tmp_path / "undisturbed", "awq", max_shard_size=10**6)
    blocks: list[int] = []

    def interrupted(block: int) -> None:
        blocks.append(block)
        if block == 1 and stop == "block":
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        calibrated.fake(patch, interrupted)
        if stop == "shard":
            from test_convert_resume import interrupt_after

            interrupt_after(patch, 2)
        with pytest.raises(InterruptedRunError) as error:
            calibrated.convert(dense_source, out, "awq", max_shard_size=10**6)
    calibrating = 2 if stop == "block" else 4
    assert f"interrupted; {calibrating} blocks are calibrated and {0 if stop == 'block' else 2} of" in str(error.value)
    assert error.value.exit_code == 4
    for change, said in (({"sha256": "1" * 64}, "calibration.sha256 is 0000"), ({"experts": "fused"}, "experts")):
        with pytest.raises(UsageError, match="is of another conversion: ") as other:
            calibrated.convert(dense_source, out, "awq", max_shard_size=10**6, **change)
        assert said in other.value.message
    with pytest.raises(UsageError, match=r"recipe.algorithm is awq there, gptq now"):
        calibrated.convert(dense_source, out, "gptq", max_shard_size=10**6)
    blocks.clear()
    with monkeypatch.context() as patch:
        calibrated.fake(patch, blocks.append)
        calibrated.convert(dense_source, out, "awq", max_shard_size=10**6)
    assert blocks == ([2, 3] if stop == "block" else [])
    assert digests(out) == digests(undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "undisturbed"]


def test_a_calibration_that_fails_leaves_nothing_and_one_that_has_blocks_leaves_them(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(block: int) -> None:
        raise MxqError(f"block {block} is not finite")

    def refused(*arguments: Any, **options: Any) -> None:
        raise UsageError("there is no compiler")

    monkeypatch.setattr("mxq.calibrate.engine.calibrate", refused)
    with pytest.raises(UsageError, match="no compiler"):
        calibrated.convert(dense_source, tmp_path / "out", "gptq")
    assert not list(tmp_path.iterdir())
    calibrated.fake(monkeypatch, failing)
    with pytest.raises(MxqError, match="block 0 is not finite"):
        calibrated.convert(dense_source, tmp_path / "out", "gptq")
    assert (tmp_path / "out.partial" / "calibration" / "block-00000.safetensors").is_file()


def test_a_directory_of_others_in_the_calibrations_place_stays(dense_source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out.partial" / "calibration"
    mine.mkdir(parents=True)
    (mine / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds no journal.jsonl that says what is in it"):
        calibrated.convert(dense_source, tmp_path / "out", "gptq")
    assert (mine / "mine.txt").read_text() == "mine"
    shutil.rmtree(mine)
    mine.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="holds what mxq did not write: calibration"):
        calibrated.convert(dense_source, tmp_path / "out", "gptq")


def test_dequantized_it_is_what_its_codes_mean(dense_source: Path, tmp_path: Path) -> None:
    from mxq.convert.dequantize import plan as plan_back
    from mxq.convert.dequantize_run import run as run_back

    out = calibrated.convert(dense_source, tmp_path / "out", "awq")
    run_back(plan_back(out), tmp_path / "back", str(out))
    packed, back = read_all(out), read_all(tmp_path / "back")
    for name, values in back.items():
        wanted = packed[name]
        if f"{name}_scale" in packed:
            wanted = mxfp4.dequantize(wanted, packed[f"{name}_scale"])
        assert torch.equal(values, wanted), name


@pytest.mark.parametrize(
    ("changes", "reason", "hint"),
    [
        ({"algorithm": "gptp"}, "algorithm is 'gptp'", "did you mean gptq?"),
        ({"algorithm": None}, "calibration is for an algorithm, and there is none", "add algorithm: gptq or awq"),
        ({"options": {"damp": 1}}, "gptq has no option 'damp'", "it has block_size"),
        ({"options": {"damp_percent": 7}}, "damp_percent is 7", "between 0 and 1"),
        ({"options": []}, "options is missing or not a table", None),
        ({"calibration": None}, "calibration is missing or not a table", None),
        ({"calibration": {"sampels": 1}}, "calibration: unknown key 'sampels'", "did you mean samples?"),
        ({"calibration": {"samples": 0, "length": 1, "seed": 0}}, "samples is 0", "at least 1"),
        ({"calibration": {"samples": 1, "length": True, "seed": 0}}, "length is True", "at least 1"),
        ({"calibration": {"samples": 1, "length": 1}}, "seed is None", "at least 0"),
        ({"calibration": {"set": [], "samples": 1, "length": 1, "seed": 0}}, "set is neither", "give a name"),
        ({"scale_rule": "mse"}, "gptq takes scale_rule even, not mse", "change it"),
    ],
)
def test_mistakes_in_a_recipe_are_named(tmp_path: Path, changes: dict[str, Any], reason: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as error:
        load(calibrated.recipe(tmp_path, "gptq", **changes))
    assert reason in error.value.message
    assert hint is None or hint in (error.value.hint or "")


def test_a_recipe_is_what_its_dictionary_says(tmp_path: Path) -> None:
    for algorithm in ("gptq", "awq", "smoothquant"):
        chosen = load(f"mxfp4-{algorithm}")
        assert chosen.algorithm == algorithm
        file = tmp_path / "again.yaml"
        file.write_text(yaml.safe_dump(chosen.as_dict()))
        assert load(str(file)) == chosen
    assert load("mxfp4").calibration is None
    assert "algorithm" not in load("mxfp4").as_dict()
    assert load(calibrated.recipe(tmp_path, "gptq", options={"desc_act": False})).options["desc_act"] is False


class Cli:
    """``mxq`` as a user types it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch

    def __call__(self, *arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(main, [*map(str, arguments)])
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.stderr


@pytest.fixture
def mxq(monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(monkeypatch)


def test_quantize_verify_and_inspect_as_a_user_types_them(source: Path, tmp_path: Path, mxq: Cli) -> None:
    out, calib = tmp_path / "out", calibrated.text(tmp_path)
    recipe = calibrated.recipe(tmp_path, "awq")
    mxq("quantize", source, out, "--recipe", recipe, "--calib", calib)
    assert mxq("verify", out, "--against", source).count(" ok ") == 12
    assert mxq("verify", out).count(" ok ") > 5
    assert "MXFP4 scales" in mxq("inspect", out)
    text = json.loads((out / "mxq_manifest.json").read_text())["calibration"]
    assert (text["set"], text["samples"], text["length"], text["seed"]) == ("text.txt", 2, 16, 0)
    mxq.patch.setattr("mxq.calibrate.quark.load", lambda: pytest.fail("it takes long, and this is known before"))
    again = mxq("quantize", source, out, "--recipe", recipe, "--calib", calib, code=2)
    assert "is not empty" in again


def test_a_recipe_with_mtp_in_it_rounds_that(source: Path, tmp_path: Path, mxq: Cli) -> None:
    out, recipe = tmp_path / "out", calibrated.recipe(tmp_path, "gptq", extends="mxfp4-mtp")
    calib = calibrated.text(tmp_path)
    said = json.loads(mxq("quantize", source, out, "--recipe", recipe, "--calib", calib, "--json"))
    assert said["calibration"]["set"] == "text.txt"
    plain = read_all(convert(source, tmp_path / "plain", "mxfp4-mtp"))
    after = read_all(out)
    mtp = [name for name in after if name.startswith("mtp.") and name.endswith("_scale")]
    assert mtp
    assert all(torch.equal(after[name], plain[name]) for name in after if name.startswith("mtp."))
    assert verify(out, source, rows=0).problems == []
    name = mtp[0].removesuffix("_scale")
    rewrite(out, lambda tensors: tensors[name].__setitem__((2, 3), tensors[name][2, 3] ^ 1))
    reseal(out)
    (problem,) = verify(out, source, rows=0).problems
    assert problem.what == f"{name.removesuffix('.weight')} row 2 is not what the source's row quantizes to"


@pytest.mark.parametrize(
    ("recipe", "options", "reason"),
    [
        ("mxfp4", ["--calib", "text.txt"], "--calib is for a recipe that reads a text, and mxfp4 does not"),
        ("mxfp4-gptq", [], "no calibration text for "),
        ("mxfp4-gptq", ["--calib", "nowhere.txt"], "nowhere.txt"),
        ("mxfp4-gptq", ["--calib", "text.txt"], "128 samples of 512 are 65,536"),
        ("mxfp4-gptq", ["--calib", "text.txt", "--executor", "ray"], "--executor ray is for recipes without algorithm"),
        ("mxfp4-gptq", ["--calib", "text.txt", "--stream"], "--stream is for recipes that read no text"),
        ("mxfp4-gtpq", [], "there is no recipe 'mxfp4-gtpq'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_byte_is_written(
    dense_source: Path, tmp_path: Path, mxq: Cli, recipe: str, options: list[str], reason: str
) -> None:
    calibrated.text(tmp_path)
    mxq.patch.chdir(tmp_path)
    said = mxq("quantize", dense_source, tmp_path / "out", "--recipe", recipe, *options, code=2)
    assert said.startswith("error: ")
    assert reason in said
    assert [file.name for file in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("base", ["mxfp4-gptq", "mxfp4-mixed"])
def test_samples_longer_than_what_the_model_takes_are_refused(
    dense_source: Path, tmp_path: Path, mxq: Cli, base: str
) -> None:
    calibration = {"set": str(calibrated.text(tmp_path)), "samples": 1, "length": 10**6, "seed": 0}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump({"extends": base, "name": "long", "calibration": calibration}))
    said = mxq("quantize", dense_source, tmp_path / "out", "--recipe", tmp_path / "long.yaml", code=2)
    assert "samples of 1,000,000 tokens" in said
    assert "takes at most" in said
    assert not list(tmp_path.glob("out*"))


def test_without_quark_the_extra_is_named(dense_source: Path, tmp_path: Path, mxq: Cli) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    mxq.patch.setattr("mxq.calibrate.quark.load", LOAD)
    mxq.patch.setattr("importlib.metadata.version", missing)
    recipe, calib = calibrated.recipe(tmp_path, "awq"), calibrated.text(tmp_path)
    said = mxq("quantize", dense_source, tmp_path / "out", "--recipe", recipe, "--calib", calib, code=2)
    assert "AMD Quark, which is not installed" in said
    assert "pip install 'mxq[quark]'" in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["awq.yaml", "text.txt"]


def test_plan_says_that_calibration_comes(source: Path, mxq: Cli) -> None:
    assert "calibration" not in mxq("plan", source)
    said = mxq("plan", source, "--recipe", "mxfp4-gptq")
    assert "calibration by gptq on 128 samples of 512 tokens" in said
    facts = json.loads(mxq("plan", source, "--recipe", "mxfp4-gptq", "--json"))
    assert facts["calibration"]["samples"] == 128
    assert facts["calibration"]["peak_bytes"] > facts["expected"]["peak_bytes"]
