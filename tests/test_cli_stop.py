"""SIGTERM does to a real process what Ctrl-C does, while it downloads, converts or evaluates, and exits with 143."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from checkpoints import wide_copy
from hub import running, slow

STOPS = [(signal.SIGINT, 4), (signal.SIGTERM, 143)]


def started(*arguments: object, **environment: str) -> "subprocess.Popen[str]":
    command = [str(Path(sys.executable).with_name("mxq")), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )


def wait(process: "subprocess.Popen[str]", reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def converting(directory: Path) -> bool:
    return any(file.stat().st_blocks > 0 for file in directory.glob("out.partial/checkpoint/*.safetensors"))


def test_a_conversion_leaves_nothing_behind(dense_source: Path, tmp_path: Path) -> None:
    source = wide_copy(dense_source, tmp_path / "source", 512, 1 << 19)  # 4 GB of zeros: many seconds
    with started("quantize", source, tmp_path / "out") as process:
        wait(process, lambda: converting(tmp_path))
        while process.poll() is None:  # whoever is impatient does not break off the cleaning up
            process.terminate()
            time.sleep(0.002)
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 143
    assert stdout == ""
    assert stderr.splitlines()[-2:] == [
        f"error: interrupted; {tmp_path / 'out'} was not written",
        "  -> run the same command again to start over",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_conversion_of_which_files_are_complete_is_continued(dense_source: Path, tmp_path: Path) -> None:
    source = wide_copy(dense_source, tmp_path / "source", 512, 1 << 15)  # 0.3 GB of zeros
    words = ("quantize", source, tmp_path / "out", "--max-shard-size", "10MB")
    partial = tmp_path / "out.partial"

    def recorded() -> int:
        journal = partial / "journal.jsonl"
        return journal.read_bytes().count(b'\n{"shard"') if journal.exists() else 0

    with started(*words) as process:
        wait(process, lambda: recorded() > 0)
        process.terminate()
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 143
    assert stdout == ""
    complete = recorded()
    said = re.search(r"error: interrupted; (\d+) of (\d+) files are complete in (.*)\n  -> (.*)\n$", stderr)
    assert said is not None, stderr
    assert said.groups()[::3] == (str(complete), "run the same command again to continue")
    assert said[3] == str(partial)
    assert len(list((partial / "checkpoint").iterdir())) == complete
    with started(*words) as process:
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert f"continuing: {complete} of {said[2]} files are complete in {partial}\n" in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_process_told_to_ignore_it_goes_on(dense_source: Path, tmp_path: Path) -> None:
    source = wide_copy(dense_source, tmp_path / "source", 512, 1 << 15)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a child inherits
    try:
        process = started("quantize", source, tmp_path / "out")
    finally:
        signal.signal(signal.SIGTERM, before)
    with process:
        wait(process, lambda: converting(tmp_path))
        process.terminate()
        _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr


@pytest.mark.parametrize("xet", [False, True])
@pytest.mark.parametrize(("stop", "code"), STOPS)
def test_a_download_stops_at_the_next_piece(
    dense_source: Path, tmp_path: Path, stop: signal.Signals, code: int, xet: bool
) -> None:
    source = wide_copy(dense_source, tmp_path / "source", 512, 1 << 12)  # 37 MB
    with running() as hub:
        hub.add("org/tiny", source).xet = xet
        hub.fail("GET .*Signature", lambda handler: handler.reply(), times=1)  # of the header
        hub.fail("GET .*Signature", slow(pieces=400, pause=0.02))
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        with started("quantize", "org/tiny", tmp_path / "out", NO_PROXY="127.0.0.1", **environment) as process:
            wait(process, lambda: hub.sent("Signature") > 1_000_000)
            process.send_signal(stop)
            stdout, stderr = process.communicate(timeout=600)
        assert hub.sent("Signature") < 30_000_000
    assert process.returncode == code
    assert stdout == ""
    assert stderr.splitlines() == [
        "stopping; files that are complete stay in the hub's cache",
        "interrupted",
        "  -> run the same command again",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "source"]
    assert not list((tmp_path / "home").rglob("*.incomplete"))


@pytest.mark.slow
def test_an_evaluation_can_be_continued(dense_source: Path, tmp_path: Path) -> None:
    tiny.write_drafter(tmp_path / "drafter", dense_source)
    prompts = [json.dumps({"prompt": f"Ann has {i} apples."}) + "\n" for i in range(40)]
    (tmp_path / "many.jsonl").write_text("".join(prompts))
    models = ("--bf16", dense_source, "--drafter", tmp_path / "drafter", "--workload", tmp_path / "many.jsonl")
    words = ("eval", *models, "-k", 3, "--max-tokens", 12, "--out", tmp_path / "run")

    def records() -> int:
        return sum(file.read_bytes().count(b"\n") for file in (tmp_path / "run").rglob("records.jsonl"))

    with started(*words) as process:
        wait(process, lambda: records() >= 5)
        process.terminate()
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 143
    assert stdout == ""
    assert "of 80 requests are recorded\n  -> run the same command again to continue" in stderr
    assert 5 <= records() < 80
    with started(*words) as process:
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert records() == 80
