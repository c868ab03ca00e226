"""`mxq compare` on broken run directories: a documented exit code, an error in two lines, and never a traceback."""

import shutil
from pathlib import Path

import pytest
from compared import compared_run, losing
from mutation import mutate, seeds, telling
from test_cli_fuzz import COUNTS, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared_run(tmp_path_factory.mktemp("runs") / "whole", losing(0.2), prompts=12).path


@COUNTS
@pytest.mark.parametrize("name", ["run.json", "cell.json", "records.jsonl"])
def test_a_broken_run(whole: Path, tmp_path: Path, name: str, first: int, count: int) -> None:
    path = shutil.copytree(whole, tmp_path / "run")
    file = path / name if name == "run.json" else next(path.glob(f"cells/mxfp4-dflash-*/{name}"))
    content = file.read_bytes()
    for seed, rng in seeds(first, count):
        with telling(seed):
            line, _, rest = content.partition(b"\n") if name == "records.jsonl" else (content, b"", b"")
            file.write_bytes(mutate(rng, line) + (b"\n" + rest if rest else b""))
            for words in (("compare", path), ("compare", path, "--sweep"), ("compare", path, "--published")):
                run(*words, "--resamples", 200) if name != "run.json" or seed % 3 else run(*words, "--json")
