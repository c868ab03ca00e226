"""plan, quantize, verify and inspect as a user types them: output, exit codes, one line per error, Ctrl-C."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import foreign
import peak_memory
import pytest
import torch
from checkpoints import edit_json, rewrite, sparse_copy, wide_copy
from click.testing import CliRunner, Result

from mxq.cli import main
from mxq.cli.sizes import Size
from mxq.convert.recipe import directory


def mxq(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def fails(*arguments: object, code: int, reason: str) -> None:
    """One line that says what is wrong, one that says what to do, and nothing on stdout."""
    result = mxq(*arguments, code=code)
    error = [
        line for line in result.stderr.splitlines() if not line.startswith(("converting", "checksums", "not copied"))
    ]
    assert reason in error[0], result.stderr
    assert error[0].startswith("error: ")
    assert len(error) == 1 or (len(error) == 2 and error[1].startswith("  -> ")), result.stderr
    assert result.stdout == ""


def test_from_plan_to_inspect(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "my output"
    planned = mxq("plan", source)
    assert "model.*norm" in planned.stdout
    assert not list(tmp_path.iterdir())
    converted = mxq("quantize", source, out, "--recipe", "mxfp4")
    command = shlex.split(converted.stdout.splitlines()[-1].removeprefix("check it against its source: "))
    assert command == ["mxq", "verify", str(out), "--against", str(source)]
    assert "converting: 100%" in converted.stderr
    verified = mxq("verify", out, "--against", source)
    assert verified.stdout.count(" ok ") == 11
    inspected = mxq("inspect", out, "--worst", 3)
    assert "MXFP4 scales" in inspected.stdout
    assert len(re.findall(r"^layers\.\d\.\S+ +\d+\.\d\d +\d\.\d{3}% +0\.0% +-\d+ to -\d+", inspected.stdout, re.M)) == 3
    assert "not quantized" in mxq("inspect", source).stdout


def test_json_of_every_verb_agrees_with_the_files(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    planned = json.loads(mxq("plan", source, "--json", "--max-shard-size", "2MB").stdout)
    converted = json.loads(mxq("quantize", source, out, "--json", "--max-shard-size", "2MB").stdout)
    verified = json.loads(mxq("verify", out, "--against", source, "--json").stdout)
    inspected = json.loads(mxq("inspect", out, "--worst", 1000, "--json").stdout)
    tensors = {tensor["name"]: tensor for tensor in planned["tensors"]}
    assert len(tensors) == json.loads(mxq("inspect", source, "--json").stdout)["tensors"]
    assert {tensor["action"] for tensor in tensors.values()} == {"quantize", "keep"}
    assert all(tensor["rule"] for tensor in tensors.values())
    assert planned["bytes_after"] == converted["bytes_after"] == inspected["bytes"]
    assert planned["bytes_after"] == sum(tensor["bytes_after"] for tensor in tensors.values())
    assert sorted(converted["files"]) == sorted(file.name for file in out.glob("*.safetensors"))
    assert [shard["file"] for shard in planned["shards"]] == converted["files"]
    assert verified["ok"] is True
    assert len(inspected["worst"]) == converted["quantized_matrices"]
    sqnr = [layer["sqnr_db"] for layer in inspected["worst"]]
    assert sqnr == sorted(sqnr)
    assert inspected["quantization"]["activations"] == "MXFP4"


@pytest.mark.parametrize("experts", ["per-expert", "fused"])
def test_tables_fit_a_terminal_of_80_columns(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich take stdout for a terminal, as it is for a user
    out = tmp_path / "out"
    planned = mxq("plan", source, "--experts", experts)
    mxq("quantize", source, out, "--experts", experts)
    for result in (
        planned,
        mxq("plan", source, "--tensors"),
        mxq("inspect", out, "--worst", 1000),
        mxq("verify", out, "--against", source),
    ):
        tables = [line for line in result.stdout.splitlines() if not line.startswith((str(source), "note:"))]
        assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in tables) <= 80
    rules = [line.split()[1] for line in re.sub(r"\x1b\[[\d;]*m", "", planned.stdout).splitlines() if "model." in line]
    assert "model.*layers.*.linear_attn.conv1d" in rules  # at this width none needs folding


def test_plan_shows_tensors_with_their_shapes(moe_source: Path) -> None:
    shown = mxq("plan", moe_source, "--tensors").stdout
    assert "model.language_model.layers.*.mlp.experts.gate_up_proj" in shown
    assert "BF16 [4, 512, 256]" in shown


def test_a_recipe_of_ones_own(dense_source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text((directory() / "mxfp4.yaml").read_text().replace("activations: dynamic", "activations: none"))
    mxq("quantize", dense_source, tmp_path / "out", "--recipe", mine)
    assert "activations unquantized" in mxq("inspect", tmp_path / "out").stdout


def test_verification_that_fails_lists_every_problem_and_exits_with_3(dense_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    mxq("quantize", dense_source, out)
    rewrite(out, lambda tensors: tensors["mtp.fc.weight"].zero_())
    result = mxq("verify", out, "--against", dense_source, code=3)
    assert "* model.safetensors changed after it was written" in result.stdout
    assert "1 wrong" in result.stdout
    assert "* mtp.fc.weight, which is not quantized, is not the same bytes as in the source" in result.stdout
    advice = "  -> put the file back as it was, or convert it again"
    assert result.stderr.splitlines()[-2:] == [f"error: {out} has 2 problems", advice]
    report = json.loads(mxq("verify", out, "--json", code=3).stdout)
    assert report["ok"] is False


def test_options_of_a_comparison_need_a_source(converted_dense: Path) -> None:
    for option in ("--rows", "--seed"):
        fails("verify", converted_dense, option, 0, code=2, reason=f"{option} is for comparing with a source")


def foreign_defect(source: Path, tmp_path: Path) -> Path:
    """Another tool's checkpoint whose list of what is not quantized lacks the MTP head and names globs."""
    mxq("quantize", source, tmp_path / "ours")
    path = foreign.quark(tmp_path / "ours", tmp_path / "theirs")

    def edit(config: Any) -> None:
        entries = config["quantization_config"]["exclude"]
        entries[:] = [entry for entry in entries if "mtp" not in entry] + ["*mtp*"]

    edit_json(path / "config.json", edit)
    return path


def test_another_tools_checkpoint_is_judged_and_put_right(moe_source: Path, tmp_path: Path) -> None:
    path, out = foreign_defect(moe_source, tmp_path).rename(tmp_path / "their's"), tmp_path / "right"
    judged = mxq("verify", path, "--against", moe_source, code=3)
    assert "* the exclude entry '*mtp*' is a glob, and matches nothing" in judged.stdout
    assert "without mxq_manifest.json no checksum" in " ".join(judged.stdout.split())
    hint = judged.stderr.splitlines()[-1].removesuffix(" OUT writes a copy without")
    assert shlex.split(hint) == ["->", "mxq", "verify", str(path), "--fix"]
    put_right = mxq("verify", path, "--against", moe_source, "--fix", out)
    assert put_right.stdout.splitlines()[-1].startswith(f"{out} is verified and has none of these problems: exclude ")
    assert mxq("verify", out, "--against", moe_source).stdout.count(" ok ") == 10  # and the manifest "not done"
    shutil.rmtree(out)
    report = json.loads(mxq("verify", path, "--json", "--fix", out).stdout)
    assert report["ok"] is False
    assert report["fixed"].startswith("exclude written anew")
    problem = report["checks"][2]["problems"][1]
    assert problem["rewritable"] is True
    assert len(problem["places"]) == 12
    refused = mxq("verify", out, "--json", "--fix", tmp_path / "again", code=2)
    assert json.loads(refused.stdout) | {"checks": []} == {"ok": True, "checks": [], "fixed": None}
    assert "there is nothing to fix" in refused.stderr


def test_problems_fit_a_terminal_of_80_columns(
    moe_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = foreign_defect(moe_source, tmp_path)
    for name, value in (("COLUMNS", "80"), ("TERM", "dumb"), ("FORCE_COLOR", "1")):
        monkeypatch.setenv(name, value)
    lines = re.sub(r"\x1b\[[\d;]*m", "", mxq("verify", path, code=3).stdout).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("* ") for line in lines) == sum(line.startswith("  -> ") for line in lines) == 3


def test_models_that_are_none(dense_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    empty, other, pickled = (tmp_path / name for name in ("empty", "other", "pickled"))
    for path in (empty, other, pickled):
        path.mkdir()
    (other / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    shutil.copy(dense_source / "model.safetensors", other)
    shutil.copy(dense_source / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"cposix\nmkdir\n(S'exploded'\ntR.")
    for verb in (("quantize", out), ("plan",)):
        for model, reason in (
            (tmp_path / "none", "none is not a directory"),
            (empty, "empty holds no config.json"),
            (other, "other: config.json names LlamaForCausalLM"),
            (pickled, "pytorch_model.bin, a pickle, which mxq never opens"),
            ("testbed:huge", "there is no testbed model 'testbed:huge'"),
        ):
            fails(verb[0], model, *verb[1:], code=2, reason=reason)
    assert not out.exists()
    assert not Path("exploded").exists()


def test_shards_that_are_missing_truncated_or_lie(dense_source: Path, tmp_path: Path) -> None:
    mxq("quantize", dense_source, tmp_path / "any", "--max-shard-size", "1MB")
    content = sorted((tmp_path / "any").glob("*.safetensors"))[1].read_bytes()
    for damaged, reason in (
        (None, "is missing"),
        (content[: len(content) // 2], "is truncated"),
        (content[:9] + b"!" + content[10:], "is not valid JSON"),
        (content.replace(b'"U8"', b'"I4"', 1), "is of unknown type 'I4'"),
    ):
        path = shutil.copytree(tmp_path / "any", tmp_path / reason)
        file = sorted(path.glob("*.safetensors"))[1]
        file.unlink() if damaged is None else file.write_bytes(damaged)
        fails("inspect", path, code=1, reason=reason)
        fails("quantize", path, tmp_path / "out", code=1, reason=reason)
        assert reason in mxq("verify", path, code=3).stdout
    assert not (tmp_path / "out").exists()


def test_experts_with_an_odd_number_of_rows(moe_source: Path, tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    odd = sparse_copy(moe_source, tmp_path / "odd", {name: [4, 511, 256]})
    for arguments in (("plan", odd), ("quantize", odd, tmp_path / "out"), ("inspect", odd)):
        fails(*arguments, code=1, reason=f"{name} has 511 rows per expert")
    assert f"{name} has 511 rows per expert" in mxq("verify", odd, code=3).stdout


@pytest.mark.parametrize(
    "line",
    ['{"sqnr_db": 1}', "[1]", '{"sqnr_db": "1"}', '{"sqnr_db": NaN}', "[" * 5000, '{"a": ' * 5000, "SHOWN-0"],
    ids=range(7),
)
def test_errors_of_layers_that_mxq_did_not_write(dense_source: Path, tmp_path: Path, line: str) -> None:
    out = tmp_path / "out"
    mxq("quantize", dense_source, out)
    if line == "SHOWN-0":
        line = json.dumps(json.loads((out / "layers.jsonl").read_text().splitlines()[0]) | {"blocks": 0})
    (out / "layers.jsonl").write_text(line + "\n")
    fails("inspect", out, "--worst", 3, code=2, reason="layers.jsonl is not as mxq wrote it")


@pytest.mark.parametrize("named", [["Qwen3_5ForConditionalGeneration", 5], 7, {"a": 1}, ["Qwen3_5\u202e\u001b[2J"]])
def test_architectures_that_are_no_names(dense_source: Path, tmp_path: Path, named: object) -> None:
    path = shutil.copytree(dense_source, tmp_path / "model")
    edit_json(path / "config.json", lambda config: config.update(architectures=named))
    fails("plan", path, code=2, reason="config.json names no architecture")
    assert mxq("inspect", path).stdout.replace("\n", "").isprintable()


def test_a_layer_with_a_number_that_no_computer_has(dense_source: Path, tmp_path: Path) -> None:
    for number in ("9" * 5000, "00", "٣"):
        path = shutil.copytree(dense_source, tmp_path / number[:5])
        added = {f"model.language_model.layers.{number}.input_layernorm.weight": torch.ones(256)}
        rewrite(path, lambda tensors, added=added: tensors.update(added))  # type: ignore[misc]
        fails("plan", path, code=2, reason="config.json says 4 layers, the tensors are of 5")


def test_outputs_and_arguments_that_cannot_be(dense_source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    fails("quantize", dense_source, tmp_path, code=2, reason="is not empty")
    fails("quantize", dense_source, tmp_path / "x", "--recipe", "mxfp5", code=2, reason="there is no recipe 'mxfp5'")
    result = mxq("quantize", dense_source, tmp_path / "x", "--max-shard-size", "5 apples", code=2)
    assert "'5 apples' is not a size; write it as 5GB" in result.stderr
    fails("inspect", dense_source, "--worst", 3, code=2, reason="holds no layers.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("text", "count"), [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("2 GiB", 2**31), ("1.5kB", 1500), ("12345", 12345)]
)
def test_sizes(text: str, count: int) -> None:
    assert Size().convert(text, None, None) == count


def started(source: Path, out: Path) -> "subprocess.Popen[str]":
    command = [str(Path(sys.executable).with_name("mxq")), "quantize", str(source), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_in_the_middle_leaves_nothing_behind(dense_source: Path, tmp_path: Path) -> None:
    source = wide_copy(dense_source, tmp_path / "source", 512, 1 << 19)  # 4 GB of zeros: many seconds
    process = started(source, tmp_path / "out")
    deadline = time.monotonic() + 600
    while not any(file.stat().st_blocks > 0 for file in tmp_path.glob("out.partial/checkpoint/*.safetensors")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 4
    assert stdout == ""
    assert stderr.splitlines()[-2:] == [
        f"error: interrupted; {tmp_path / 'out'} was not written",
        "  -> run the same command again to start over",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
def test_memory_is_as_planned_and_does_not_grow_with_the_tensors(dense_source: Path, tmp_path: Path) -> None:
    """Peak memory of converting 4.5 GB, every large tensor of 268 MB, against 8 MB, and against what plan expects."""
    wide = wide_copy(dense_source, tmp_path / "source", 1 << 19, 1 << 19)
    peaks = []
    for source, out in ((dense_source, tmp_path / "small"), (wide, tmp_path / "large")):
        command = [str(Path(sys.executable).with_name("mxq")), "quantize", str(source), str(out), "--jobs", "3"]
        done, peak = peak_memory.measured(command)
        assert done.returncode == 0, done.stderr
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 150_000_000
    expected = json.loads(mxq("plan", wide, "--jobs", "3", "--json").stdout)["expected"]
    assert expected["jobs"] == 3
    assert 0.6 < peaks[1] / expected["peak_bytes"] < 1.05
    assert expected["seconds"] > 0


def test_a_plan_says_what_the_conversion_will_need(dense_source: Path) -> None:
    assert re.search(
        r"^expected with 2 thread\(s\): \d+\.\d\d MB of memory at most, \d+ s or",
        mxq("plan", dense_source, "--jobs", "2").stdout,
        re.M,
    )
