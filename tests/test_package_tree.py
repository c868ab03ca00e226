"""The repository itself: its size, no traces of the machine it was made on, scripts and pins that hold."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
MB = 1_000_000


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_repository_stays_light(tracked: list[Path]) -> None:
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in tracked}
    assert sum(sizes.values()) < 40 * MB
    assert sum(size for path, size in sizes.items() if path.is_relative_to("mxq/testbed")) < 32 * MB


def test_no_file_names_a_place_on_a_machine(tracked: list[Path]) -> None:
    places = {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix} - {"/", "/usr"}
    pattern = re.compile(
        rb"(?<![\w./-])/(?:home|Users|root|work|workspace)/\w|"
        + b"|".join(re.escape(place.encode()) for place in places)
    )
    found = [
        f"{path.relative_to(ROOT)}: {match[0].decode(errors='replace')}"
        for path in tracked
        for match in pattern.finditer(path.read_bytes())
    ]
    assert found == []


def test_links_between_documents_lead_somewhere(tracked: list[Path]) -> None:
    known = {*tracked, *(parent for path in tracked for parent in path.parents)}
    for document in (path for path in tracked if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).resolve() in known, f"{document.name} links to {target}"


def pins(file: str = "constraints.txt") -> dict[str, Version]:
    lines = (ROOT / "tools" / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_declared_dependency_is_pinned_to_a_version_it_admits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["project"]["dependencies"] + project["build-system"]["requires"]
    extras = project["project"]["optional-dependencies"]
    # No script installs vLLM for GPUs.
    declared += [line for extra, lines in extras.items() if extra != "vllm" for line in lines]
    pinned = pins("constraints-vllm.txt") | pins()
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        if name != "mxq":
            assert pinned[name] in requirement.specifier, requirement


def test_the_environment_is_the_pinned_one() -> None:
    differing = {}
    for name, version in pins().items():
        try:
            installed = Version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue  # a part of torch's CUDA build
        if installed.public != version.public:
            differing[name] = f"{installed}, pinned {version}"
    assert differing == {}


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "tools").glob("*.sh")))
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / "tools" / script], check=True)


@pytest.mark.parametrize("python", ["no-such-python", "/bin/false"])
def test_without_a_usable_python_the_scripts_say_what_to_install(python: str, tmp_path: Path) -> None:
    code = f"set -euo pipefail; source '{ROOT}/tools/lib.sh'; VENV=$PWD/.venv; install_mxq plot"
    result = subprocess.run(
        ["bash", "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(
        f"error: no Python 3.11 or newer found (tried: {python})\n  -> on Debian and Ubuntu: "
    )
    assert list(tmp_path.iterdir()) == []
