"""Models whose large files lie in Xet storage, as most do: fetched by hf_xet instead of over plain HTTP."""

import shutil
from pathlib import Path

import pytest
from hub import Answer, Hub, cut, read, status
from hub_runner import Runner

ONCE = {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1", "HF_XET_CLIENT_RETRY_BASE_DELAY": "1ms"}


def test_converted_as_from_a_directory(dense_source: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/tiny", dense_source).xet = True
    mxq("plan", "org/tiny")
    assert hub.sent("xorbs") == 0
    said = mxq("quantize", "org/tiny", tmp_path / "out")
    assert all(line.startswith(("downloading", "checksums", "converting")) for line in said.stderr.splitlines())
    assert said.stderr.count("downloading org/tiny: 100% (7.5/7.5 MB") == 1
    assert hub.sent("xorbs") > 7_000_000
    (snapshot,) = (mxq.home / "hub/models--org--tiny/snapshots").iterdir()
    assert (snapshot / "model.safetensors").resolve().is_relative_to(mxq.home / "hub/blobs")  # shared by all models
    mxq("quantize", dense_source, tmp_path / "local")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "local/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("reconstructions", status(404)),
        ("xorbs", status(403)),
        ("xorbs", cut(100_000)),
        ("xet-read-token", status(404)),
    ],
)
def test_a_download_that_fails_leaves_nothing_and_can_be_repeated(
    hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path, fault: str, answer: Answer
) -> None:
    hub.add("org/tiny", dense_source).xet = True
    hub.fail(fault, answer)
    said = mxq("quantize", "org/tiny", tmp_path / "out", code=1, environment=ONCE)
    *progress, error, hint = said.stderr.splitlines()
    assert all(line.startswith("downloading") for line in progress)
    assert error.startswith("error: ")
    assert "org/tiny" in error
    assert hint.startswith("  -> ")
    assert not (tmp_path / "out").exists()
    assert not [file for file in mxq.home.rglob("*") if file.is_file() and file.stat().st_size > 100_000]
    hub.faults.clear()
    mxq("quantize", "org/tiny", tmp_path / "out")


def test_content_that_is_not_what_the_hub_lists(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path) -> None:
    right = read(dense_source)["model.safetensors"]
    assert isinstance(right, bytes)
    wrong = right[:-1000] + bytes([right[-1000] ^ 1]) + right[-999:]
    for xet in (False, True):
        shutil.rmtree(mxq.home, ignore_errors=True)
        repository = hub.add("org/tiny", dense_source)
        repository.xet = xet
        hub.swapped = {right: wrong}
        said = mxq("quantize", "org/tiny", tmp_path / "out", code=1)
        assert said.stderr.splitlines()[-2:] == [
            "error: model.safetensors of org/tiny came damaged: it has another sha256 than the hub lists",
            "  -> it was removed: run the same command again",
        ]
        assert not [file for file in mxq.home.rglob("*") if file.is_file() and file.stat().st_size > 100_000]
        assert not (tmp_path / "out").exists()
        hub.swapped = {}
        mxq("quantize", "org/tiny", tmp_path / f"out-{xet}")
