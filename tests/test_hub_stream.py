"""``--stream``: the bytes of a conversion from a directory, with one file of the source on the disk at a time."""

import functools
import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoints import read_all, reseal
from conversion import convert
from hub import Answer, Hub, cut, read, status
from hub_moments import before_removing, in_a_download, interrupt
from hub_runner import Runner, no_waiting, small_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from killing import after_recording, before_recording, in_a_shard
from safetensors.torch import load_file, save_file
from test_hub_failures import fails, files_of_a_megabyte, five_megabytes

from mxq.checkpoint import Checkpoint
from mxq.convert import recipe
from mxq.convert.plan import plan
from mxq.convert.stream import most_at_once, schedule

NAMES = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
SMALL = ("--max-shard-size", "1MB")
OUTPUTS = 4
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def split(source: Path, path: Path) -> Path:
    """Copy a checkpoint of one file into four, whose borders are not those of layers."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    total, seen = sum(tensor.nbytes for tensor in tensors.values()), 0
    held: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
    for name in sorted(tensors):
        held[NAMES[min(3, 4 * seen // total)]][name] = tensors[name]
        seen += tensors[name].nbytes
    for file, part in held.items():
        save_file(part, path / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, part in held.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}} | index))
    return path


@pytest.fixture(scope="module")
def parts(dense_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint in four files."""
    return split(dense_source, tmp_path_factory.mktemp("parts") / "model")


@pytest.fixture(scope="module")
def local(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a conversion from the directory writes. Its files are at most a megabyte, as with ``SMALL``."""
    return convert(parts, tmp_path_factory.mktemp("local") / "out", max_shard_size=10**6)


def same(ours: Path, theirs: Path) -> bool:
    """Whether two conversions are equal in all but what names the source."""
    a, b = read(ours), read(theirs)
    made = {"mxq_manifest.json", "README.md"}
    return a.keys() == b.keys() and all(a[name] == b[name] for name in a.keys() - made)


def watch(hub: Hub, out: Path) -> list[tuple[str, list[str]]]:
    """A list that grows by each download of weights, and which files of the source are on the disk as it begins."""
    downloads = []
    source = out.parent / f"{out.name}.partial/source"

    def answer(handler: Any) -> None:
        if handler.headers["Range"] is None or "xorbs" in handler.path:
            there = [file.name for file in source.rglob("*") if file.is_file() and file.stat().st_size > 1000]
            downloads.append((handler.path.rpartition("=")[2], sorted(there)))
        handler.reply()

    hub.fail("GET .*Signature", answer)
    return downloads


@pytest.mark.parametrize("xet", [False, True])
def test_one_file_at_a_time(parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path, xet: bool) -> None:
    repository = hub.add("org/parts", parts)
    repository.xet = xet
    downloads = watch(hub, tmp_path / "out")
    said = mxq("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    assert "converting: 100% (15.0/15.0 MB" in said.stderr  # once from the hub, once through the kernel
    assert same(tmp_path / "out", local)
    assert len(read(local)) > OUTPUTS
    source = json.loads((tmp_path / "out/mxq_manifest.json").read_text())["source"]
    assert (source["name"], source["commit"]) == ("org/parts", repository.refs["main"])
    if xet:
        assert [file for _, there in downloads for file in there if file.endswith(".safetensors")] == []
        assert hub.sent("xorbs") < 7_600_000
    else:
        assert downloads == [(name, []) for name in NAMES]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]
    assert sum(file.stat().st_size for file in (tmp_path / "home").rglob("*") if file.is_file()) < 500_000


def test_verified_without_a_copy_of_the_source(parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/parts", parts)
    words = ("verify", local, "--against", "org/parts", "--stream", "--json")
    assert json.loads(mxq(*words).stdout)["ok"] is True
    kept = sum(tensor.nbytes for name, tensor in read_all(local).items() if tensor.dtype is not torch.uint8)
    assert kept < hub.sent("Signature") < kept + 700_000  # and 16 rows of every matrix, and headers
    assert sum(file.stat().st_size for file in (tmp_path / "home").rglob("*") if file.is_file()) < 500_000


@pytest.mark.slow
def test_what_is_wrong_is_told_from_a_network_that_is_lost(
    parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path
) -> None:
    hub.add("org/parts", parts)
    words = ("--against", "org/parts", "--stream")
    damaged = shutil.copytree(local, tmp_path / "damaged")
    tensors = load_file(file := next(damaged.glob("*-00002-of-*.safetensors")))
    name = next(name for name, tensor in tensors.items() if tensor.dtype is torch.uint8 and f"{name}_scale" in tensors)
    save_file(tensors | {name: tensors[name] ^ 1}, file, {"format": "pt"})
    reseal(damaged)
    said = json.loads(mxq("verify", damaged, *words, "--json", code=3).stdout)
    assert [check["name"] for check in said["checks"] if check["problems"]] == ["source: codes"]
    hub.fail("GET .*Signature", cut(100))
    fails(mxq, "verify", local, *words, code=1, reason="the connection broke", first=no_waiting)


@pytest.mark.parametrize(
    "moment",
    [
        functools.partial(in_a_download, 3),
        functools.partial(before_removing, 2),
        *(
            pytest.param(moment, marks=pytest.mark.slow)
            for moment in (
                functools.partial(in_a_download, 1),
                functools.partial(in_a_shard, 50),
                functools.partial(before_recording, 3),
                functools.partial(after_recording, 2),
                functools.partial(after_recording, OUTPUTS + 2),
            )
        ),
    ],
    ids=lambda moment: f"{moment.func.__name__}-{moment.args[0]}",
)
def test_killed_and_continued(
    parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path, moment: Callable[[], None]
) -> None:
    hub.add("org/parts", parts)
    words = ("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    mxq(*words, code=-signal.SIGKILL, first=moment)
    lines = (tmp_path / "out.partial/journal.jsonl").read_text().splitlines()
    recorded = {line["shard"] for line in map(json.loads, lines) if "shard" in line}
    downloads = watch(hub, tmp_path / "out")
    there = {file.name for file in (tmp_path / "out.partial").glob("source/*.safetensors")}
    mxq(*words)
    assert same(tmp_path / "out", local)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]
    again = [name for name, _ in downloads]
    needed = files_for(parts, local, recorded)
    assert len(again) == len(set(again))
    assert needed - there <= set(again) <= needed
    assert [files for _, files in downloads] == [[]] * len(again)


def files_for(parts: Path, local: Path, recorded: set[str]) -> set[str]:
    """The files of the source that outputs which are not ``recorded`` are made of."""
    sources, outputs = (
        json.loads((path / "model.safetensors.index.json").read_text())["weight_map"] for path in (parts, local)
    )
    left = [name for name, file in outputs.items() if file not in recorded]
    return {sources[name.removesuffix("_scale")] for name in left}


def test_ctrl_c(parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/parts", parts)
    words = ("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    said = mxq(*words, code=4, first=functools.partial(in_a_download, 3, interrupt))
    assert f"stopping the download of {NAMES[2]}" in said.stderr
    assert f"of {OUTPUTS} files are complete in {tmp_path / 'out.partial'}" in said.stderr
    assert "run the same command again to continue" in said.stderr
    assert not list((tmp_path / "out.partial").rglob("*.incomplete"))
    mxq(*words)
    assert same(tmp_path / "out", local)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (cut(10_000, reset=True), "the connection broke"),
        pytest.param(status(500), "fails for org/parts", marks=pytest.mark.slow),
    ],
)
def test_a_network_that_is_lost(
    parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path, answer: Answer, reason: str
) -> None:
    hub.add("org/parts", parts)
    hub.fail(f"GET .*Signature.*{NAMES[2]}", lambda handler: handler.reply(), times=1)  # of the header
    hub.fail(f"GET .*Signature.*{NAMES[2]}", answer)
    words = ("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    said = mxq(*words, code=1, first=small_pieces)
    assert reason in said.stderr
    assert "  -> " in said.stderr.splitlines()[-1]
    hub.faults.clear()
    downloads = watch(hub, tmp_path / "out")
    mxq(*words)
    assert same(tmp_path / "out", local)
    assert NAMES[0] not in [name for name, _ in downloads]


def test_what_comes_damaged_is_refused(parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/parts", parts)
    data = (parts / NAMES[2]).read_bytes()
    hub.swapped[data] = data[:-1] + bytes([data[-1] ^ 1])
    words = ("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    said = mxq(*words, code=1)
    assert f"error: {NAMES[2]} of org/parts" in said.stderr
    assert "came damaged: it has another sha256 than the hub lists" in said.stderr
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "out.partial").glob("source/*.safetensors")) == []
    hub.swapped.clear()
    mxq(*words)
    assert same(tmp_path / "out", local)


@pytest.mark.slow
def test_a_file_that_changed_on_the_disk_is_fetched_again(
    parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path
) -> None:
    hub.add("org/parts", parts)
    words = ("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    mxq(*words, code=-signal.SIGKILL, first=functools.partial(in_a_shard, 3))
    (file,) = (tmp_path / "out.partial/source").glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    downloads = watch(hub, tmp_path / "out")
    mxq(*words)
    assert file.name in [name for name, _ in downloads]
    assert same(tmp_path / "out", local)


@pytest.mark.slow
def test_nothing_of_others_is_removed(parts: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/parts", parts)
    words = ("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    mxq(*words, code=-signal.SIGKILL, first=functools.partial(in_a_shard, 3))
    (tmp_path / "out.partial/source/mine.safetensors").write_text("mine")
    fails(mxq, *words, code=2, reason="source holds what mxq did not write: mine.safetensors")
    assert (tmp_path / "out.partial/source/mine.safetensors").read_text() == "mine"
    (tmp_path / "out.partial/source").rename(tmp_path / "mine")
    (tmp_path / "mine/mine.safetensors").unlink()
    before = read(tmp_path / "mine")
    (tmp_path / "out.partial/source").symlink_to(tmp_path / "mine")
    fails(mxq, *words, code=2, reason="out.partial holds what mxq did not write: source")
    assert read(tmp_path / "mine") == before


@pytest.mark.slow
def test_a_branch_that_moved(parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    first = hub.add("org/parts", parts).refs["main"]
    words = ("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    mxq(*words, code=-signal.SIGKILL, first=functools.partial(in_a_download, 3))
    hub.add("org/parts", split(tiny.write_target(tmp_path / "second", seed=1), tmp_path / "moved"))
    fails(mxq, *words, code=2, reason=f"is of another conversion: source.commit is {first} there")
    said = mxq("quantize", f"org/parts@{first}", *words[2:])
    assert "files are complete" in said.stderr
    assert same(tmp_path / "out", local)
    mxq("quantize", "org/parts", tmp_path / "other", "--stream", *SMALL)
    assert not same(tmp_path / "other", local)


def test_disks_that_are_full(parts: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/parts", parts)
    words = ("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    planned = mxq("plan", "org/parts")
    assert "with --stream: 5.76 MB of disk, the output and 1 source file(s) at a time\n" in planned.stdout
    fails(mxq, *words, code=1, reason="has 5.00 MB free, the output needs 5.76 MB", first=five_megabytes)
    fails(
        mxq, *words, code=1, reason=f"could not be written to {tmp_path}/out.partial/source", first=files_of_a_megabyte
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_what_cannot_be_streamed(parts: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/parts", parts).gated = True
    out = tmp_path / "out"
    for spec, code, reason, environment in (
        (parts, 2, "is on this disk already", {}),
        ("testbed:dense", 2, "is on this disk already", {}),
        (tmp_path / "none", 2, "is not a directory", {}),
        ("org/none", 2, "nor a model on the hub that you may read", {}),
        ("org/parts", 2, "org/parts is gated", {}),
        ("org/parts", 1, "HF_HUB_OFFLINE forbids asking the hub", OFFLINE),
    ):
        fails(mxq, "quantize", spec, out, "--stream", code=code, reason=reason, environment=environment)
    fails(mxq, "verify", out, "--against", parts, "--stream", code=2, reason="--stream is for a source on the hub")
    assert not list(tmp_path.glob("out*"))


def test_what_the_cache_has_is_not_fetched(parts: Path, local: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    hub.add("org/parts", parts)
    mxq("quantize", "org/parts", tmp_path / "first", *SMALL)
    (snapshot,) = (mxq.home / "hub/models--org--parts/snapshots").iterdir()
    (snapshot / NAMES[1]).unlink()
    downloads = watch(hub, tmp_path / "out")
    mxq("quantize", "org/parts", tmp_path / "out", "--stream", *SMALL)
    assert [name for name, _ in downloads] == [NAMES[1]]
    assert same(tmp_path / "out", local)
    assert {file.name for file in snapshot.glob("*.safetensors")} == {*NAMES} - {NAMES[1]}


@pytest.mark.parametrize("experts", ["per-expert", pytest.param("fused", marks=pytest.mark.slow)])
def test_experts(moe_source: Path, hub: Hub, mxq: Runner, tmp_path: Path, experts: str) -> None:
    """Also where experts that are stored one by one, as the MTP head's, are written as one tensor."""
    source = split(moe_source, tmp_path / "source")
    for form in ("per-expert", "fused"):
        planned = plan(Checkpoint.open(source), recipe.load("mxfp4"), experts=form, max_shard_size=10**6)
        assert most_at_once(planned, NAMES) == (1, max((source / name).stat().st_size for name in NAMES))
    hub.add("org/moe", source)
    downloads = watch(hub, tmp_path / "out")
    mxq("quantize", "org/moe", tmp_path / "out", "--stream", *SMALL, "--experts", experts)
    assert downloads == [(name, []) for name in NAMES]
    assert same(tmp_path / "out", convert(source, tmp_path / "theirs", experts=experts, max_shard_size=10**6))


needs = st.lists(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=2, unique=True).map(tuple)))


@given(needs)
@settings(max_examples=100, deadline=None)
def test_every_stage_has_its_files_and_none_is_fetched_twice(needs: Sequence[Sequence[tuple[str, ...]]]) -> None:
    here: set[str] = set()
    fetched: list[str] = []
    planned = schedule(needs)
    for i, (work, stages) in enumerate(zip(needs, planned, strict=True)):
        assert sorted(stage.files for stage in stages) == sorted(set(work))
        for j, stage in enumerate(stages):
            fetched += stage.fetch
            here |= set(stage.fetch)
            assert here >= set(stage.files)
            here -= set(stage.drop)
            later = [*stages[j + 1 :], *(stage for rest in planned[i + 1 :] for stage in rest)]
            assert here == {name for stage in later for name in stage.files} & set(fetched)
    assert len(fetched) == len(set(fetched))
    assert not here


def test_files_that_follow_each_other_are_there_one_at_a_time() -> None:
    chain = [[("a",), ("b",)], [("b",), ("c",)], [("c",)], [("d",), ("c",), ("e",)]]
    most, here = 0, set()
    for stage in (stage for stages in schedule(chain) for stage in stages):
        here |= set(stage.fetch)
        most = max(most, len(here))
        here -= set(stage.drop)
    assert most == 1
