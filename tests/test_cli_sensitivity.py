"""`mxq sensitivity` as a user types it: tables, JSON, and mistakes in a line."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from calibrated import TEXT
from click.testing import CliRunner, Result
from decoding import rewrite

from mxq import files
from mxq.calibrate.sensitivity import Probe
from mxq.cli import main
from mxq.convert import recipe


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def mxq(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["sensitivity", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def few(*arguments: object, code: int = 0) -> Result:
    return mxq(*arguments, "--samples", 4, "--length", 32, code=code)


def test_table_and_json_say_the_same(source: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    shown = few(source, "--calib", text, "--by", "layer", "--out", out).stdout
    found = json.loads(out.read_text())
    assert json.loads(few(source, "--calib", text, "--by", "layer", "--json").stdout) == found
    units = found["units"]
    assert [unit["unit"] for unit in units] == re.findall(r"^layer \d", shown, re.M)
    assert sorted(unit["unit"] for unit in units) == [f"layer {number}" for number in range(4)]
    errors = [unit["kl"]["estimate"] for unit in units]
    assert errors == sorted(errors, reverse=True)
    assert all(unit["kl"]["lower"] <= unit["kl"]["estimate"] <= unit["kl"]["upper"] for unit in units)
    assert all(0 < unit["agreement"]["estimate"] <= 1 and unit["hidden_error"] > 0 for unit in units)
    assert found["sum_of_units"]["kl"] == pytest.approx(sum(errors))
    assert found["together"]["bytes_saved"] == sum(unit["bytes_saved"] for unit in units)
    assert f"sum of these {sum(errors):.6f}" in re.sub(" +", " ", shown)
    assert f"all together {found['together']['kl']['estimate']:.6f}" in re.sub(" +", " ", shown)
    assert (found["recipe"], found["by"], found["dtype"]) == ("mxfp4", "layer", "bfloat16")
    assert (found["text"]["samples"], found["text"]["length"]) == (4, 32)


@pytest.mark.slow
def test_errors_of_a_trained_model_add_up() -> None:
    """Of the testbed, whose errors are small: those of its layers alone, and of all together."""
    found = json.loads(mxq("testbed:moe", "--by", "layer", "--samples", 12, "--dtype", "float32", "--json").stdout)
    assert found["text"]["set"] == "testbed"
    assert 0.5 < found["together"]["kl"]["estimate"] / found["sum_of_units"]["kl"] < 2


def test_the_head_for_drafts_is_left_out(dense_source: Path, text: Path) -> None:
    said = few(dense_source, "--calib", text, "--recipe", "mxfp4-mtp", "--json")
    assert "MTP is left out" in said.stderr
    assert json.loads(said.stdout) == json.loads(few(dense_source, "--calib", text, "--json").stdout) | {
        "recipe": "mxfp4-mtp"
    }


def test_recipes_with_an_algorithm_are_refused(dense_source: Path, text: Path) -> None:
    said = few(dense_source, "--calib", text, "--recipe", "mxfp4-gptq", code=2).stderr
    assert said.startswith("error: recipe mxfp4-gptq: gptq chooses codes in the whole model")


def test_one_sample_has_no_interval(dense_source: Path, text: Path) -> None:
    arguments = (dense_source, "--calib", text, "--samples", 1, "--length", 16)
    kl = json.loads(mxq(*arguments, "--json").stdout)["units"][0]["kl"]
    assert (kl["lower"], kl["upper"]) == (None, None)
    assert re.search(r"^MLP down +\d\.\d{6} +- +", mxq(*arguments).stdout, re.M)


def test_ctrl_c_shows_what_is_known(dense_source: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Probe.alone

    def stopped(self: Probe, units: Any) -> Any:
        for number, found in enumerate(real(self, units)):
            if number == 2:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(Probe, "alone", stopped)
    result = few(dense_source, "--calib", text, code=4)
    assert "interrupted; 2 of 6 units were measured" in result.stderr
    assert len(re.findall(r"^(GDN|MLP|attention)", result.stdout, re.M)) == 2
    assert few(dense_source, "--calib", text, "--json", code=4).stdout == ""


def test_mistakes_are_a_line(dense_source: Path, converted_dense: Path, text: Path, tmp_path: Path) -> None:
    nothing = recipe.load("mxfp4").as_dict()
    sections = nothing["rules"]["qwen3_5"]
    sections["keep"], sections["quantize"] = [*sections["quantize"], *sections["keep"]], []
    (tmp_path / "nothing.yaml").write_text(yaml.safe_dump(nothing))
    nan = rewrite(
        dense_source,
        tmp_path / "nan",
        lambda tensors: tensors["model.language_model.layers.0.mlp.up_proj.weight"].fill_(torch.nan),
    )
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "empty.txt").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for arguments, code, reason in [
        ((dense_source,), 2, "no calibration text for"),
        ((dense_source, "--calib", tmp_path / "short.txt"), 2, "tokens; 32 samples of 256 are 8,192"),
        ((dense_source, "--calib", tmp_path / "empty.txt"), 2, "empty"),
        ((dense_source, "--calib", "arithmetics"), 2, "arithmetics"),
        ((dense_source, "--calib", text, "--recipe", "mxfp5"), 2, "there is no recipe 'mxfp5'"),
        ((dense_source, "--calib", text, "--recipe", tmp_path / "nothing.yaml"), 2, "quantizes no module"),
        ((dense_source, "--calib", text, "--samples", 1, "--length", 4000), 2, "takes at most 2,048"),
        ((dense_source, "--calib", text, "--length", 1), 2, "--length"),
        ((dense_source, "--calib", text, "--device", "gpu9"), 2, "no device 'gpu9' here"),
        ((dense_source, "--calib", text, "--out", tmp_path), 2, "is not a file in a directory that exists"),
        ((dense_source, "--calib", text, "--out", tmp_path / "pipe"), 2, "is not a file in a directory that exists"),
        ((converted_dense, "--calib", text), 2, "already quantized"),
        ((tmp_path / "none", "--calib", text), 2, "is not a directory"),
        ((nan, "--calib", text, "--samples", 2), 1, "what the model computes is not finite"),
    ]:
        result = mxq(*arguments, code=code)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("measuring")]
        assert lines[0].startswith("error: ")
        assert reason in lines[0], lines
        assert len(lines) <= 2
        assert result.stdout == ""


def test_no_pipe_or_device_is_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is no regular file"):
        files.write_json(tmp_path / "pipe", {})
    assert (tmp_path / "pipe").is_fifo()
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]
