"""Calibrated recipes with the real AMD Quark on the testbeds, as a user types them: killed, continued, verified."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import calibrated
import pytest
from killing import digests, forked, kill, patch

from mxq.calibrate import quark
from mxq.calibrate.results import Block

pytest.importorskip("quark")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Have it imported once, for all processes that are forked from this one."""
    quark.load()


def killing_behind(blocks: int) -> Callable[[], None]:
    """What makes a process end when so many blocks are written, and the text behind the next one is."""
    write = Block.write
    written: list[Path] = []

    def killed(block: Block, path: Path) -> None:
        if len(written) == blocks:
            kill()
        write(block, path)
        written.append(path)

    return lambda: patch(Block, "write", killed)


@pytest.fixture
def mxq(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs mxq in a process of its own, and returns what it says."""

    def run(*words: object, before: Callable[[], None] = lambda: None, code: int = 0) -> str:
        found, _ = forked([*map(str, words)], before)
        said = "".join(capfd.readouterr())
        assert found == code, said
        return said

    return run


def test_killed_and_run_again_it_ends_with_the_same_bytes(tmp_path: Path, mxq: Callable[..., str]) -> None:
    recipe = calibrated.recipe(tmp_path, "gptq", samples=4, length=64)
    options = ["--recipe", recipe, "--max-shard-size", "2MB", "--experts", "fused"]
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    mxq("quantize", "testbed:moe", undisturbed, *options)
    mxq("quantize", "testbed:moe", out, *options, before=killing_behind(2), code=-signal.SIGKILL)
    assert not out.exists()
    assert "continuing: 2 blocks are calibrated and 0 of" in mxq("quantize", "testbed:moe", out, *options)
    assert digests(out) == digests(undisturbed)
    mxq("verify", out, "--against", "testbed:moe", "--rows", 0)
    manifest = json.loads((out / "mxq_manifest.json").read_text())
    assert manifest["calibration"]["set"] == "testbed"
    assert manifest["versions"]["amd-quark"].startswith("0.13")
    seen = manifest["calibrated"]["tokens_per_expert"].values()
    assert [sum(counts) for counts in seen] == [4 * 64 * 2] * 4  # of two experts for every token


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("dense", "gptq"), ("dense", "awq"), ("dense", "smoothquant"), ("moe", "awq"), ("moe", "smoothquant")],
)
def test_what_is_calibrated_verifies(kind: str, algorithm: str, tmp_path: Path, mxq: Callable[..., str]) -> None:
    source, out = f"testbed:{kind}", tmp_path / "out"
    recipe = calibrated.recipe(tmp_path, algorithm, samples=1, length=24)
    mxq("quantize", source, out, "--recipe", recipe)
    verified = mxq("verify", out, "--against", source, "--rows", 0)
    folded = json.loads((out / "mxq_manifest.json").read_text())["calibrated"]["folded"]
    scaled = algorithm != "gptq"
    assert (out / "mxq_scales.npz").is_file() == ("each undone" in verified) == scaled
    assert (len(folded) > 4) == (scaled and kind == "dense")  # AWQ may find that it is best to scale nothing


def test_experts_that_no_token_reached_are_rounded_and_reported(tmp_path: Path, mxq: Callable[..., str]) -> None:
    out = tmp_path / "out"
    said = mxq("quantize", "testbed:moe", out, "--recipe", calibrated.recipe(tmp_path, "gptq", samples=1, length=1))
    manifest = json.loads((out / "mxq_manifest.json").read_text())
    seen = [count for counts in manifest["calibrated"]["tokens_per_expert"].values() for count in counts]
    unseen = seen.count(0)
    assert unseen > 0
    assert f"{unseen} of {len(seen)} routed experts saw no token of the calibration text" in said
    assert len(manifest["calibrated"]["rounded_to_nearest"]) == 3 * unseen
    mxq("verify", out, "--against", "testbed:moe", "--rows", 0)
