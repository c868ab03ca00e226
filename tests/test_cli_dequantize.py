"""``mxq dequantize`` as a user types it: output, notes, exit codes; and what other verbs say of what it makes."""

import json
import math
import shutil
import sys
from pathlib import Path

import foreign
import peak_memory
import pytest
from checkpoints import edit_json, raw_headers, read_all, write_safetensors
from click.testing import CliRunner, Result
from conversion import convert

from mxq.cli import main


def mxq(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_it_says_what_it_did_and_what_it_did_not(converted_moe: Path, moe_source: Path, tmp_path: Path) -> None:
    done = mxq("dequantize", converted_moe, tmp_path / "out", "--max-shard-size", "4MB", "--jobs", 2)
    assert done.stdout.startswith(f"{tmp_path / 'out'}: ")
    assert "48 matrices in bf16, 114 tensors copied" in done.stdout
    assert (
        "note: this checkpoint quantizes activations too, as the model runs, and that is not simulated" in done.stderr
    )
    assert "dequantizing: 100%" in done.stderr
    weight_only = convert(moe_source, tmp_path / "weight-only", "mxfp4-weight-only")
    done = mxq("dequantize", weight_only, tmp_path / "json", "--json", "--experts", "per-expert")
    assert "activations" not in done.stderr
    said = json.loads(done.stdout)
    assert said["activations"] == "unquantized"
    assert said["bytes_after"] == sum(tensor.nbytes for tensor in read_all(tmp_path / "json").values())
    assert said["files"] == ["model.safetensors"]
    assert said["dequantized_matrices"] == 48


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ("not quantized", 2, "is not quantized, so there is nothing to dequantize"),
        ("fp8", 1, "is quantized with 'fp8', which mxq does not read"),
        ("another model", 2, "config.json names LlamaForCausalLM"),
        ("no config", 2, "holds no config.json"),
        ("cut", 1, "is truncated"),
        ("out", 2, "is not empty"),
    ],
)
def test_what_cannot_be_dequantized_is_a_line_and_an_exit_code(
    converted_dense: Path, tmp_path: Path, change: str, code: int, reason: str
) -> None:
    path = foreign.quark(converted_dense, tmp_path / "path")
    if change == "not quantized":
        edit_json(path / "config.json", lambda config: config.pop("quantization_config"))
    elif change == "fp8":
        edit_json(path / "config.json", lambda config: config["quantization_config"].update(quant_method="fp8"))
    elif change == "another model":
        edit_json(path / "config.json", lambda config: config.update(architectures=["LlamaForCausalLM"]))
    elif change == "no config":
        (path / "config.json").unlink()
    elif change == "cut":
        content = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(content[:-1])
    else:
        shutil.copytree(path, tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    failed = mxq("dequantize", path, tmp_path / "out", code=code)
    assert failed.stdout == ""
    first, *rest = failed.stderr.splitlines()
    assert first.startswith("error: ")
    assert reason in first
    assert len(rest) == 1
    assert rest[0].startswith("  -> ")
    assert sorted(tmp_path.rglob("*")) == before


def test_other_verbs_know_it(converted_dense: Path, dense_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    mxq("dequantize", converted_dense, out)
    assert "was made by mxq dequantize and holds no MXFP4" in mxq("verify", out, code=2).stderr
    assert "not quantized" in mxq("inspect", out).stdout
    assert "note: mxq dequantize made this from MXFP4 weights" in mxq("plan", out).stdout
    words = ["--spec", "ar", "--workload", "arithmetic", "--limit", 1, "--max-tokens", 1, "--out"]
    for number, (bf16, mxfp4, said) in enumerate(
        (
            (out, None, "what is called bf16 here has their error already"),
            (out, converted_dense, f"of {converted_dense}: both targets have the same weights"),
            (dense_source, out, "what is called mxfp4 here has their error, with activations unquantized (W4A16)"),
        )
    ):
        targets = ["--bf16", bf16] if mxfp4 is None else ["--bf16", bf16, "--mxfp4", mxfp4]
        run = mxq("eval", *targets, *words, tmp_path / f"run{number}")
        assert f"warning: {out} holds MXFP4 weights, written as bf16 by `mxq dequantize`" in run.stderr
        assert said in run.stderr
        assert run.stderr.count("warning: ") == 1
        assert f"WARNING: {out} holds" in " ".join(run.stdout.split())


def widened(path: Path, wide: int) -> Path:
    """Make a dense MXFP4 checkpoint one of zeros with an MLP of another size; it takes no room on the disk."""
    header, offset = {}, 0
    for name, entry in raw_headers(path)["model.safetensors"].items():
        rows, columns = (*entry["shape"], 0, 0)[:2]
        if ".mlp." in name:
            entry["shape"] = [rows, columns * wide // 512] if "down_proj" in name else [wide, columns]
        nbytes = math.prod(entry["shape"]) * {"U8": 1, "BF16": 2, "F32": 4}[entry["dtype"]]
        header[name] = entry | {"data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    file = write_safetensors(path / "model.safetensors", {"__metadata__": {"format": "pt"}} | header)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + offset)
    edit_json(path / "config.json", lambda config: config["text_config"].update(intermediate_size=wide))
    return path


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(converted_dense: Path, tmp_path: Path) -> None:
    """Peak memory of writing 2 GB, the MLP's matrices of 134 MB each, against writing 8 MB."""

    def peak(path: Path, out: Path) -> int:
        program = Path(sys.executable).with_name("mxq")
        done, peak = peak_memory.measured([program, "dequantize", path, out, "--jobs", "2"])
        assert done.returncode == 0, done.stderr
        return peak

    small = peak(converted_dense, tmp_path / "small")
    large = peak(widened(foreign.quark(converted_dense, tmp_path / "wide"), 1 << 18), tmp_path / "large")
    assert large - small < 150_000_000
