"""On the nodes of a Ray cluster a conversion has the bytes it has on one machine, whatever dies."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import conversion
import pytest
import torch
from checkpoints import edit_json, rewrite
from click.testing import CliRunner
from killing import digests

import mxq.cli
from mxq.checkpoint import Checkpoint
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.writer import ShardWriter
from mxq.convert import ray_worker, recipe
from mxq.convert.partial import Partial, SpoiledError
from mxq.convert.plan import plan
from mxq.convert.ray_cluster import connected
from mxq.convert.run import run
from mxq.convert.work import Work
from mxq.errors import MxqError, UsageError

SHARD = 400_000

# Stops a process of a node in the middle of a file, as long as a test wants it to: at the third time that it reads from
# the source while it writes.
HOLD = """
import os, sys, time
count = -1
def hook(event, arguments):
    global count
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        name = os.fspath(arguments[0])
        if "/attempts/" in name:
            count = 0
        elif count >= 0 and name.endswith(".safetensors"):
            count += 1
            if count == 3 and os.path.exists(os.environ["TEST_HOLD"]):
                with open(os.environ["TEST_HOLD"] + ".held", "w") as stream:
                    stream.write(str(os.getpid()))
                while os.path.exists(os.environ["TEST_HOLD"]):
                    time.sleep(0.05)
sys.addaudithook(hook)
"""


class Nodes:
    """A head node, and another whose processes stop in the middle of a file as long as ``hold`` is there."""

    def __init__(self, directory: Path) -> None:
        from ray.cluster_utils import Cluster

        self.hold = directory / "hold"
        self.held = directory / "hold.held"
        (directory / "sitecustomize.py").write_text(HOLD)
        paths = filter(None, [str(directory), os.environ.get("PYTHONPATH")])
        self._environment = {"PYTHONPATH": os.pathsep.join(paths), "TEST_HOLD": str(self.hold)}
        self._small = {"num_cpus": 1, "object_store_memory": 80 << 20}
        soon = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}  # to be noticed dead
        head = {"include_dashboard": False, "node_name": "head", "_system_config": soon}
        self._cluster = Cluster(True, head_node_args=self._small | head)
        self.address: str = self._cluster.address
        self._second: Any = None

    def second(self) -> None:
        """Make sure that the second node is there."""
        if self._second is None:
            self._second = self._cluster.add_node(**self._small, env_vars=self._environment, node_name="second")

    def kill(self) -> None:
        """Kill it."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = None

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        self.second()
        self.held.unlink(missing_ok=True)
        self.hold.touch()
        try:
            yield
        finally:
            self.hold.unlink()

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        nodes = Nodes(tmp_path_factory.mktemp("nodes"))
        yield nodes
        nodes.shutdown()


@pytest.fixture(scope="module")
def expected(moe_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("local") / "out"
    found = digests(conversion.convert(moe_source, out, max_shard_size=SHARD))
    assert sum(name.endswith(".safetensors") for name in found) > 8
    return found


def words(source: Path, out: Path, *options: str) -> list[str]:
    command = Path(sys.executable).with_name("mxq")
    return [str(command), "quantize", str(source), str(out), "--max-shard-size", str(SHARD), *options]


def started(nodes: Nodes, source: Path, out: Path, *options: str) -> "subprocess.Popen[str]":
    command = words(source, out, "--executor", "ray", "--ray-address", nodes.address, *options)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(reached: Callable[[], bool], process: "subprocess.Popen[str] | None" = None) -> None:
    deadline = time.monotonic() + 120
    while not reached():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def recorded(out: Path) -> int:
    journal = out.with_name(f"{out.name}.partial") / "journal.jsonl"
    return journal.read_bytes().count(b'\n{"shard"') if journal.exists() else 0


def convert(nodes: Nodes, source: Path, out: Path) -> None:
    with connected(nodes.address, None) as execute:
        made = plan(Checkpoint.open(source), recipe.load("mxfp4"), max_shard_size=SHARD)
        run(made, out, str(source), executor=execute)


@pytest.mark.slow
def test_a_node_that_is_killed_changes_no_byte(
    nodes: Nodes, moe_source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with nodes.holding(), started(nodes, moe_source, out, "--json") as process:
        until(lambda: nodes.held.exists() and recorded(out) > 1, process)
        nodes.kill()
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert " was lost and is converted again: " in stderr
    assert json.loads(stdout)["files"]
    assert digests(out) == expected
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_process_that_is_killed_is_continued_here_and_there(
    nodes: Nodes, moe_source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out, here = tmp_path / "out", tmp_path / "here"
    with nodes.holding(), started(nodes, moe_source, out) as process:
        until(lambda: nodes.held.exists() and recorded(out) > 1, process)
        process.kill()
        process.communicate()
        complete = recorded(out)
        assert list((tmp_path / "out.partial/attempts").iterdir())
        shutil.copytree(tmp_path / "out.partial", tmp_path / "here.partial")
        done = subprocess.run(words(moe_source, here), capture_output=True, text=True, check=True)
        assert f"continuing: {complete} of " in done.stderr
        assert digests(here) == expected
        until(lambda: not Path("/proc", nodes.held.read_text()).exists())  # though nothing let it go on
    nodes.held.unlink()
    convert(nodes, moe_source, out)
    assert digests(out) == expected
    assert sorted(file.name for file in tmp_path.iterdir()) == ["here", "out"]


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 4), (signal.SIGTERM, 143)])
def test_stopped_it_keeps_what_is_complete(
    nodes: Nodes, moe_source: Path, tmp_path: Path, stop: signal.Signals, code: int
) -> None:
    out = tmp_path / "out"
    with nodes.holding(), started(nodes, moe_source, out) as process:
        until(lambda: nodes.held.exists() and recorded(out) > 1, process)
        process.send_signal(stop)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (code, ""), stderr
    assert f"error: interrupted; {recorded(out)} of " in stderr
    partial = tmp_path / "out.partial"
    assert sorted(file.name for file in partial.iterdir()) == [".lock", "checkpoint", "journal.jsonl"]
    assert len(list((partial / "checkpoint").iterdir())) == recorded(out)


@pytest.mark.slow
def test_errors_are_those_of_one_machine_with_the_nodes_name(
    nodes: Nodes, moe_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(moe_source, tmp_path / "source")
    name = "model.language_model.layers.1.mlp.experts.down_proj"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].flatten()[5] = float("nan")

    rewrite(source, damage)
    with pytest.raises(SpoiledError) as here:
        conversion.convert(source, tmp_path / "out", max_shard_size=SHARD)
    with pytest.raises(SpoiledError) as there:
        convert(nodes, source, tmp_path / "out")
    assert there.value.message.partition(" (on node ")[0] == here.value.message
    assert there.value.message.endswith((" (on node head)", " (on node second)"))
    assert there.value.hint == here.value.hint
    with monkeypatch.context() as patch:
        patch.setattr(ray_worker, "code", lambda: "9.9")
        with pytest.raises(MxqError, match=r"mxq is .* there, 9\.9 here \(on node "):
            convert(nodes, moe_source, tmp_path / "out")
    of = ray_worker.Order.of

    def elsewhere(work: Work, source: str, attempt: Path, jobs: int) -> ray_worker.Order:
        return of(work, source, attempt.with_suffix(f".{0:016}"), jobs)

    monkeypatch.setattr(ray_worker.Order, "of", elsewhere)
    with pytest.raises(MxqError, match=r"which node (head|second) wrote, is not here") as lost:
        convert(nodes, moe_source, tmp_path / "out")
    assert lost.value.hint == ray_worker.SHARED
    with pytest.raises(UsageError, match="no node of the Ray cluster has 2 CPUs, the largest has 1"):
        connected(nodes.address, 2).__enter__()
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.fixture
def order(dense_source: Path, tmp_path: Path) -> ray_worker.Order:
    made = plan(Checkpoint.open(shutil.copytree(dense_source, tmp_path / "source")), recipe.load("mxfp4"))
    groups = tuple(made.groups[outputs[0].name] for outputs in made.shards[0].groups)
    work = Work(made.source, "even", made.shards[0], groups)
    (tmp_path / "attempts").mkdir()
    return ray_worker.Order.of(work, fingerprint(made.source), tmp_path / "attempts" / "a.safetensors.0", 1)


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        (lambda path: (path / "attempts").rmdir(), "attempts is not there"),
        (lambda path: shutil.rmtree(path / "source"), "source is not a directory"),
        (
            lambda path: rewrite(path / "source", lambda tensors: [tensor.mul_(-2) for tensor in tensors.values()]),
            "source is another checkpoint than where the conversion was started",
        ),
        (
            lambda path: edit_json(path / "source" / "config.json", lambda config: config.update(more=1)),
            "source is another checkpoint than where the conversion was started",
        ),
    ],
)
def test_a_node_that_does_not_see_the_same_files_says_so(
    order: ray_worker.Order, tmp_path: Path, defect: Callable[[Path], object], reason: str
) -> None:
    ray_worker._opened.cache_clear()
    defect(tmp_path)
    with pytest.raises(MxqError, match=reason + r" \(on node n\)") as error:
        ray_worker.raise_(ray_worker.make(order), "n")
    assert error.value.hint == ray_worker.SHARED


def test_an_attempt_that_outlives_its_process_changes_nothing(dense_source: Path, tmp_path: Path) -> None:
    out, orders, write = tmp_path / "out", list[ray_worker.Order](), ShardWriter.write
    made = plan(Checkpoint.open(dense_source), recipe.load("mxfp4"), max_shard_size=SHARD)

    def killed(works: Sequence[Work], partial: Partial, advance: Any) -> Generator[Any, None, None]:
        source = fingerprint(made.source)
        orders.extend(ray_worker.Order.of(work, source, partial.attempt(work.shard.file), 1) for work in works[:2])
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "failed", lambda partial, error: error)  # nothing is tidied up
        with pytest.raises(KeyboardInterrupt):
            run(made, out, str(dense_source), executor=killed)
    running, late = orders
    with pytest.MonkeyPatch.context() as patch:

        def first(*arguments: Any) -> None:
            write(*arguments)
            patch.setattr(ShardWriter, "write", second)
            assert running.attempt.stat().st_blocks
            conversion.convert(dense_source, out, max_shard_size=SHARD)

        def second(*arguments: Any) -> None:
            write(*arguments)
            patch.undo()
            assert ray_worker.make(late)["failed"]

        patch.setattr(ShardWriter, "write", first)
        ray_worker.make(running)
    assert digests(out) == digests(conversion.convert(dense_source, tmp_path / "other", max_shard_size=SHARD))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "out"]


def test_a_full_disk_there_is_one_here(order: ray_worker.Order) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        answer = ray_worker.make(order)
    with pytest.raises(OSError, match=r"No space left on device \(on node n\)") as error:
        ray_worker.raise_(answer, "n")
    assert error.value.errno == 28


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--executor", "ray"], "there is no Ray cluster here\n  -> start one with `ray start --head`"),
        (["--executor", "ray", "--ray-address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1: "),
        (["--executor", "ray", "--ray-address", "ray://there:10001"], "is not the address of a Ray cluster"),
        (["--ray-address", "there:6379"], "--ray-address is for --executor ray"),
        (["--executor", "ray", "--stream"], "--stream is for --executor local"),
    ],
)
def test_without_a_cluster_it_says_how_to_get_one(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], reason: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", list)  # not others' on this machine
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda directory: None)
    done = CliRunner().invoke(mxq.cli.main, ["quantize", str(dense_source), str(tmp_path / "out"), *options])
    assert done.exit_code == 2
    assert reason in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_ray_it_names_the_extra(dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(mxq.cli.main, ["quantize", str(dense_source), str(tmp_path / "out"), "--executor", "ray"])
    assert done.exit_code == 2
    assert "Ray, which is not installed\n  -> pip install 'mxq[ray]'\n" in done.stderr
