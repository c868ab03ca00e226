"""Verbs on broken checkpoints: a documented exit code, an error in two lines, and no pass of what was changed."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mutation import mutate, seeds, telling

from mxq.cli import main

ERROR = re.compile(r"(?:^|\n)error: [^\n]+(\n  -> [^\n]+)?\n\Z")
COUNTS = pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(100_000, 120, marks=pytest.mark.slow)], ids=["few", "many"]
)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code in (0, 1, 2, 3), result.output
    assert all(sign.isprintable() or sign == "\n" for sign in result.output), ascii(result.output)
    assert "did not expect" not in result.output, result.output
    assert result.exit_code == 0 or ERROR.search(result.stderr), result.output
    return result


def is_as_its_manifest_says(directory: Path) -> bool:
    listed = json.loads((directory / "mxq_manifest.json").read_bytes())["files"]
    present = {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "mxq_manifest.json"}
    return {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in present.items()} == {
        name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()
    }


@COUNTS
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_plan_of_a_broken_source(dense_source: Path, tmp_path: Path, name: str, first: int, count: int) -> None:
    source = shutil.copytree(dense_source, tmp_path / "source")
    content = (source / name).read_bytes()
    for seed, rng in seeds(first, count):
        with telling(seed):
            (source / name).unlink()
            (source / name).write_bytes(mutate(rng, content, 8 if name == "model.safetensors" else 0))
            run("plan", source)


@COUNTS
@pytest.mark.parametrize("name", ["config.json", "layers.jsonl"])
def test_inspect_of_a_broken_checkpoint(
    converted_dense: Path, tmp_path: Path, name: str, first: int, count: int
) -> None:
    out = shutil.copytree(converted_dense, tmp_path / "out")
    content = (out / name).read_bytes().splitlines()[0] if name == "layers.jsonl" else (out / name).read_bytes()
    for seed, rng in seeds(first, count):
        with telling(seed):
            (out / name).unlink()
            (out / name).write_bytes(mutate(rng, content))
            run("inspect", out, "--worst", 3)


@COUNTS
@pytest.mark.parametrize("name", ["config.json", "mxq_manifest.json", "layers.jsonl", "model.safetensors"])
def test_verify_passes_nothing_that_is_not_as_its_manifest_says(
    converted_dense: Path, tmp_path: Path, name: str, first: int, count: int
) -> None:
    out = shutil.copytree(converted_dense, tmp_path / "out")
    content = (out / name).read_bytes()
    for seed, rng in seeds(first, count // 2):
        with telling(seed):
            (out / name).unlink()
            if name == "layers.jsonl":
                line, _, rest = content.partition(b"\n")
                (out / name).write_bytes(mutate(rng, line) + b"\n" + rest)
            else:
                (out / name).write_bytes(mutate(rng, content, 8 if name == "model.safetensors" else 0))
            if run("verify", out).exit_code == 0:
                assert is_as_its_manifest_says(out)
