"""No verb fails for what stdout and stderr are: a reader that has left, nothing, or one without letters."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import edit_json

MXQ = str(Path(sys.executable).with_name("mxq"))


def mxq(
    *arguments: str | Path, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE, **environment: str
) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([MXQ, *arguments], check=False, stdout=stdout, stderr=stderr, env=os.environ | environment)


@pytest.fixture
def nobody() -> int:
    """A pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_a_reader_that_has_left_changes_neither_the_work_nor_its_exit_code(
    converted_dense: Path, dense_source: Path, tmp_path: Path, nobody: int
) -> None:
    wrong = shutil.copytree(converted_dense, tmp_path / "wrong")
    edit_json(wrong / "config.json", lambda config: config.pop("quantization_config"))
    for words, code in (
        (("--help",), 0),
        (("inspect", converted_dense), 0),
        (("verify", wrong, "--quiet"), 3),
        (("inspect", tmp_path / "none"), 2),
    ):
        done = mxq(*words, stdout=nobody)
        assert done.returncode == code
        assert done.stderr == b"" or (code and done.stderr.startswith(b"error: "))
    assert mxq("quantize", dense_source, tmp_path / "out", stderr=nobody).returncode == 0
    assert (tmp_path / "out/mxq_manifest.json").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_one_error(converted_dense: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = mxq("inspect", converted_dense, stdout=full.fileno())
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device: standard output\n")


def test_neither_stdout_nor_stderr(dense_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", MXQ, "quantize", str(dense_source), str(out)]
    assert subprocess.run(shell, check=False).returncode == 0
    assert json.loads(mxq("verify", out, "--json").stdout)["ok"]  # no file became stdout


def test_names_that_stdout_or_a_file_cannot_hold(dense_source: Path, tmp_path: Path) -> None:
    """Of characters that are not ASCII, and of bytes that are no characters."""
    source = shutil.copytree(dense_source, tmp_path / os.fsdecode(b"\xe2\x9c\x93\xff"))
    out = tmp_path / "out"
    converted = mxq("quantize", source, out, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert converted.returncode == 0, converted.stderr
    assert json.loads((out / "mxq_manifest.json").read_text())["source"]["name"] == "✓\\xff"
    verified = mxq("verify", out, "--against", source, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.isascii()
