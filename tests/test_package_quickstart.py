"""tools/quickstart.sh, as a person runs it."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


def quickstart(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = ["bash", str(ROOT / "tools/quickstart.sh"), *arguments]
    return subprocess.run(
        script, cwd=cwd, env=dict(os.environ, HOME=str(cwd)), capture_output=True, text=True, check=True
    )


def tables(result: subprocess.CompletedProcess[str]) -> str:
    return result.stdout[result.stdout.index("Acceptance length") :]


@pytest.mark.timeout(1200)
def test_it_prints_the_comparison_and_can_be_run_again(tmp_path: Path) -> None:
    first = quickstart(tmp_path, "out")
    for said in ("Acceptance length", "Survival", "tokens per second", "dflash-15", "mtp-15", "arithmetic", "chat"):
        assert said in first.stdout
    records = {path: path.read_bytes() for path in (tmp_path / "out/run").rglob("records.jsonl")}
    assert records

    second = quickstart(tmp_path, "out")
    assert "already in out/dense-mxfp4" in second.stderr
    assert tables(second) == tables(first)
    assert {path: path.read_bytes() for path in (tmp_path / "out/run").rglob("records.jsonl")} == records
