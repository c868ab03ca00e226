"""The built wheel, installed where the checkout cannot be seen, holds recipes and testbed and runs."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import mxq

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow

Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel's mxq; its dependencies are those of the environment that runs this test."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    site_packages = next(home.glob("lib/python*/site-packages"))
    # A .pth file inside a folder that a .pth file names is not read, so the editable checkout stays out of sight.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    def run(program: str, *arguments: str) -> str:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        result = subprocess.run(
            [environment / "bin" / program, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert f"mxq/recipes/{recipe.name}" in names
    assert "mxq/recipes/mxfp4.yaml" in names
    for hardware in (ROOT / "recipes" / "hardware").glob("*.yaml"):
        assert f"mxq/recipes/hardware/{hardware.name}" in names
    assert "mxq/py.typed" in names
    assert {"mxq/report/page/page.html.jinja", "mxq/report/page/page.css"} <= names
    assert any(name.startswith("mxq/testbed/") and name.endswith(".safetensors") for name in names)
    assert f"mxq-{mxq.__version__}.dist-info/licenses/LICENSE" in names
    assert not [name for name in names if name.startswith(("tests/", "tools/", "notebooks/"))]
    assert wheel.stat().st_size < 40_000_000


def test_it_is_the_wheel_that_runs(run: Run, environment: Path) -> None:
    assert Path(run("python", "-c", "import mxq; print(mxq.__file__)").strip()).is_relative_to(environment)
    assert run("mxq", "--version").strip() == f"mxq, version {mxq.__version__}"


def test_recipes_are_found(run: Run) -> None:
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        plan = json.loads(run("mxq", "plan", "testbed:moe", "--recipe", recipe.stem, "--json"))
        assert any(tensor["action"] == "quantize" for tensor in plan["tensors"])


def test_hardware_is_found(run: Run) -> None:
    found = json.loads(run("mxq", "predict", "testbed:dense", "--hardware", "mi355x", "--json"))
    assert found["predictions"][0]["tokens_per_s"] > 0


def test_the_testbed_is_converted_and_verified(run: Run, tmp_path: Path) -> None:
    run("mxq", "quantize", "testbed:dense", "converted", "--recipe", "mxfp4")
    manifest = json.loads((tmp_path / "converted/mxq_manifest.json").read_text())
    assert manifest["versions"]["mxq"] == mxq.__version__
    run("mxq", "verify", "converted", "--against", "testbed:dense")


def test_the_testbed_is_evaluated(run: Run, tmp_path: Path) -> None:
    arguments = ["--spec", "dflash", "-k", "3", "--workload", "arithmetic", "--limit", "1", "--max-tokens", "16"]
    run("mxq", "eval", "--bf16", "testbed:dense", *arguments, "--out", "run")
    assert len(list((tmp_path / "run/cells").glob("*/records.jsonl"))) == 2
