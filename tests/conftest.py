"""Models that several test files decode with."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from browser import chromium
from conversion import convert
from decoding import Models
from hub import Hub, running
from hub_runner import Runner
from on_servers import Fakes

from mxq import decode, testbed

# These models gain nothing from a second thread, and threads that wait for a core that another process has cost
# twenty times the work itself. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

KINDS = ("dense", "moe")

# Files whose one or many long tests are begun first, because what begins last has a processor to itself.
LONG = ("test_decode_lossless.py", "test_package_quickstart.py", "test_notebooks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what needs the real vLLM, or a browser, where it is not installed; in CI it must be."""
    if item.get_closest_marker("browser") and chromium() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Chromium is not installed here")
        pytest.skip("Chromium is not installed here: bash tools/test.sh --all")
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("vLLM is not installed here")
        pytest.skip("vLLM is not installed here: bash tools/test.sh --all")


@pytest.fixture(scope="session", params=KINDS)
def tiny_models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A random target of each kind with a random drafter."""
    root = tmp_path_factory.mktemp(f"tiny-{request.param}")
    target = tiny.write_target(root / "target", moe=request.param == "moe")
    return Models(target, tiny.write_drafter(root / "drafter", target, layers=2))


@pytest.fixture(scope="session")
def dense_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A random dense target and drafter, for what does not depend on the kind."""
    root = tmp_path_factory.mktemp("tiny")
    target = tiny.write_target(root / "target")
    return Models(target, tiny.write_drafter(root / "drafter", target, layers=2))


@pytest.fixture(scope="session")
def target(tiny_models: Models) -> decode.Target:
    """The random target in float32."""
    return decode.load_target(tiny_models.target, dtype=torch.float32)


@pytest.fixture(scope="session")
def dense_target(dense_models: Models) -> decode.Target:
    """The random dense target in float32."""
    return decode.load_target(dense_models.target, dtype=torch.float32)


@pytest.fixture(scope="session", params=testbed.NAMES)
def trained(request: pytest.FixtureRequest) -> Models:
    """The testbed's targets and their drafters."""
    return Models(testbed.path(f"testbed:{request.param}"), testbed.path(f"testbed:{request.param}-dflash"))


@pytest.fixture(scope="session")
def trained_dense() -> Models:
    """Of them the dense one, for what does not depend on the kind."""
    return Models(testbed.path("testbed:dense"), testbed.path("testbed:dense-dflash"))


@pytest.fixture(scope="session", params=KINDS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a random target, in one file. Not to be changed: copy it."""
    return tiny.write_target(tmp_path_factory.mktemp("source") / request.param, moe=request.param == "moe")


@pytest.fixture(scope="session")
def dense_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``source``, for what does not depend on the kind."""
    return tiny.write_target(tmp_path_factory.mktemp("source") / "dense")


@pytest.fixture(scope="session")
def moe_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``source``, for what only MoE models have."""
    return tiny.write_target(tmp_path_factory.mktemp("source") / "moe", moe=True)


@pytest.fixture(scope="session")
def converted_dense(dense_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``mxq quantize`` makes of ``dense_source``. Not to be changed: copy it."""
    return convert(dense_source, tmp_path_factory.mktemp("converted") / "dense")


@pytest.fixture(scope="session")
def converted_moe(moe_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``converted_dense``, of ``moe_source``."""
    return convert(moe_source, tmp_path_factory.mktemp("converted") / "moe")


@pytest.fixture
def fakes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Stand-ins of vLLM's servers, for ``--hardware h200``."""
    return Fakes(tmp_path_factory.mktemp("fakes"), monkeypatch)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub of this test's own, empty."""
    with running() as hub:
        yield hub


@pytest.fixture
def mxq(hub: Hub, tmp_path: Path) -> Runner:
    """``mxq`` with that hub and a cache of its own."""
    return Runner(hub, tmp_path / "home")
