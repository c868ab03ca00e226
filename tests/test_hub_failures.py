"""A hub that refuses, fails, breaks off or lies: two lines on stderr, the exit code, and never half a checkpoint."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hub import TOKEN, Answer, Hub, content, cut, no_ranges, read, status, with_headers
from hub_runner import Runner, no_waiting, small_pieces

NOTES = ("downloading", "the connection to the hub broke; resuming", "the hub does not answer as it should")
OFFLINE = {"HF_HUB_OFFLINE": "1"}
EVAL = ("--workload", "chat", "--spec", "ar", "--out")
CONFIG = b'{"architectures": ["Qwen3_5ForConditionalGeneration"]}'


def fails(
    mxq: Runner,
    *arguments: object,
    code: int,
    reason: str,
    first: Callable[[], None] | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    said = mxq(*arguments, code=code, first=first, environment=environment)
    lines = [line for line in said.stderr.splitlines() if not line.startswith(NOTES)]
    assert len(lines) == 2, said.stderr
    assert lines[0].startswith("error: ")
    assert reason in lines[0]
    assert lines[1].startswith("  -> ")
    assert said.stdout == ""


def left(home: Path) -> list[Path]:
    """Weights in the cache, whole or not."""
    return [file for file in home.rglob("*") if file.is_file() and file.stat().st_size > 1 << 16]


@pytest.mark.parametrize(
    ("fault", "answer", "code", "reason"),
    [
        ("HEAD .*config.json", status(403, "GatedRepo"), 2, "org/tiny is gated"),
        ("/api/models/org/tiny", status(404, "RepoNotFound"), 2, "nor a model on the hub that you may read"),
        ("/api/models/org/tiny", status(401, None, "Invalid credentials in Authorization header"), 2, "may read"),
        ("/api/models/org/tiny", status(403), 2, "the hub refuses org/tiny to you (403)"),
        ("/api/models", status(403, None, "Access to this resource is disabled."), 2, "is disabled on the hub"),
        ("/api/models/org/tiny", status(429), 1, "takes no more requests for now (429)"),
        ("/api/models/org/tiny", status(500), 1, "fails for org/tiny (status 500)"),
        ("/api/models/org/tiny/tree", status(503), 1, "fails for org/tiny (status 503)"),
        ("/api/models/org/tiny", content(b"<html>Log in to the network</html>"), 1, "JSONDecodeError"),
        ("/api/models/org/tiny", content(b'{"id": "org/tiny"}'), 1, "Repo info returned from server must have"),
        ("/api/models/org/tiny", content(b'{"id": "x", "sha": "../../../x"}'), 1, "gives '../../../x' as the commit"),
        (
            "/api/models/org/tiny/tree",
            content(b'[{"type": "file"}]'),
            1,
            "could not be downloaded from the hub at http",
        ),
        ("/api/models/org/tiny/tree", content(b"7"), 1, "could not be downloaded from the hub at http"),
        ("HEAD .*config.json", with_headers(X_Repo_Commit=""), 1, "is not a hub"),
        ("HEAD .*config.json", status(404, "EntryNotFound"), 1, "lists files of org/tiny that it does not have"),
        ("GET .*model.safetensors", status(502), 1, "fails for org/tiny (status 502)"),
        ("GET .*Signature", cut(5000), 1, "the connection broke"),
        ("GET .*Signature", cut(5000, reset=True), 1, "the connection broke"),
        ("GET .*Signature", with_headers(Content_Range="bytes 7-9/10"), 1, "gives 'bytes 7-9/10' for bytes 0 to"),
        ("GET .*Signature", with_headers(Content_Range="bytes 0-16383/5000"), 1, "gives 16384 bytes for"),
        ("GET .*Signature", with_headers(Content_Range="bytes 0-16383/20000"), 1, "is truncated: it has 20000 bytes"),
        ("GET .*Signature", content(b"\xff" * 5000), 1, "its header alone claims"),
        ("GET .*Signature", content(b"\0\1\0\0\0\0\0\0" + b"!" * 5000), 1, "is not valid JSON"),
    ],
)
def test_answers_that_end_a_plan(
    hub: Hub, mxq: Runner, dense_source: Path, fault: str, answer: Answer, code: int, reason: str
) -> None:
    hub.add("org/tiny", dense_source)
    hub.fail(fault, answer)
    fails(mxq, "plan", "org/tiny", code=code, reason=reason, first=no_waiting)
    assert left(mxq.home) == []


def test_models_that_cannot_be_had(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", dense_source)
    hub.add("org/gated", dense_source).gated = True
    hub.add("org/none", {"README.md": b"empty"})
    hub.add("org/pickled", {"config.json": CONFIG, "pytorch_model-00001-of-00002.bin": bytes(100_000)})
    hub.add("org/gguf", {"config.json": CONFIG, "model.gguf": bytes(100_000)})
    for spec, reason, environment in (
        ("org/gated", "org/gated is gated: the hub wants its terms accepted first", {}),
        ("org/missing", "org/missing is neither a directory here nor a model on the hub that you may read", {}),
        ("org/missing", "org/missing is neither a directory here nor a model on the hub", {"HF_TOKEN": TOKEN}),
        ("org/tiny@v2", "org/tiny has no revision 'v2'", {}),
        ("org/a--b", "org/a--b is no name that a model on the hub can have", {}),
        ("org/none", "org/none holds no config.json", {}),
        ("org/pickled", "org/pickled holds its weights as pytorch_model-00001-of-00002.bin, a pickle", {}),
        ("org/gguf", "org/gguf holds neither model.safetensors nor model.safetensors.index.json", {}),
        ("org/tiny@../../x", "is not a directory", {}),
    ):
        fails(mxq, "plan", spec, code=2, reason=reason, environment=environment)
    fails(mxq, "quantize", "org/gated", tmp_path / "out", code=2, reason="org/gated is gated")
    fails(mxq, "quantize", "org/pickled", tmp_path / "out", code=2, reason="a pickle")
    fails(mxq, "verify", tmp_path, "--against", "org/missing", code=2, reason="nor a model on the hub")
    fails(mxq, "eval", "--bf16", "org/pickled", *EVAL, tmp_path / "run", code=2, reason="a pickle")
    assert not (tmp_path / "out").exists()
    assert left(mxq.home) == []
    assert not [asked for asked in hub.asked if "Signature" in asked.path]


def test_what_changed_in_the_cache_is_found_if_asked(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", dense_source)
    mxq("quantize", "org/tiny", tmp_path / "right")
    (file,) = mxq.home.rglob("snapshots/*/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    words = ("quantize", "org/tiny", tmp_path / "out", "--check-source")
    assert "error: model.safetensors of org/tiny came damaged: it has another" in mxq(*words, code=1).stderr
    assert not file.exists()
    mxq(*words)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("right", "out")]
    assert weights[0] == weights[1]
    fails(mxq, "quantize", dense_source, tmp_path / "x", "--check-source", code=2, reason="is on this disk already")


def test_no_hub_at_all(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", dense_source)
    fails(mxq, "plan", "org/tiny", code=1, reason="HF_HUB_OFFLINE forbids asking the hub", environment=OFFLINE)
    of = mxq("plan", "org/tiny@v1", code=1, environment=OFFLINE)
    assert "run `hf download org/tiny --revision v1` where the hub can be reached" in of.stderr
    mxq("plan", "org/tiny")
    for verb in (("plan",), ("quantize", tmp_path / "out")):  # of which the cache has the config now, but no weights
        fails(mxq, verb[0], "org/tiny", *verb[1:], code=1, reason="HF_HUB_OFFLINE forbids", environment=OFFLINE)
    hub.close()
    fails(mxq, "plan", "org/other", code=1, reason=f"the hub at {hub.endpoint} cannot be reached")
    assert not (tmp_path / "out").exists()


def test_a_download_that_is_cut_goes_on_where_it_was(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", dense_source)
    hub.fail("GET .*Signature", lambda handler: handler.reply(), times=1)  # of the header
    hub.fail("GET .*Signature", cut(1_000_000), times=2)
    said = mxq("quantize", "org/tiny", tmp_path / "out", first=small_pieces)
    assert said.stderr.count("the connection to the hub broke; resuming") == 1
    assert "downloading org/tiny: 100% (7.5/7.5 MB" in said.stderr
    ranges = [asked.range for asked in hub.asked if asked.host == "cdn"]
    assert ranges[1] is None
    assert 900_000 < int((ranges[2] or "").removeprefix("bytes=").removesuffix("-")) <= 1_000_000
    assert hub.sent("Signature") < 8_000_000
    mxq("quantize", dense_source, tmp_path / "local")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "local/model.safetensors").read_bytes()


def test_a_download_that_begins_anew(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", dense_source)
    hub.fail("GET .*Signature", lambda handler: handler.reply(), times=1)
    hub.fail("GET .*Signature", cut(1_000_000), times=1)
    hub.fail("GET .*Signature", no_ranges, times=1)
    mxq("quantize", "org/tiny", tmp_path / "out", first=small_pieces)
    (snapshot,) = (mxq.home / "hub/models--org--tiny/snapshots").iterdir()
    assert (snapshot / "model.safetensors").read_bytes() == (dense_source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("fault", "answer", "reason"),
    [
        ("GET .*Signature", cut(0), "the connection broke (RemoteProtocolError)"),
        ("GET .*Signature", cut(1_000_000, reset=True), "the connection broke (ReadError)"),
        ("GET .*Signature", status(500), "fails for org/tiny (status 500)"),
        ("HEAD .*model.safetensors", with_headers(X_Linked_Size="7500000"), "came with another size than the hub says"),
        ("HEAD .*tokenizer.json", status(500), "fails for org/tiny (status 500)"),
    ],
)
def test_a_download_that_fails_leaves_nothing_and_can_be_repeated(
    hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path, fault: str, answer: Answer, reason: str
) -> None:
    hub.add("org/tiny", dense_source)
    hub.fail("GET .*Signature", lambda handler: handler.reply(), times=1)
    hub.fail(fault, answer)
    fails(mxq, "quantize", "org/tiny", tmp_path / "out", code=1, reason=reason, first=small_pieces)
    assert not (tmp_path / "out").exists()
    assert not list(mxq.home.rglob("*.incomplete"))
    if "tokenizer" not in fault:
        assert left(mxq.home) == []
    hub.faults.clear()
    mxq("quantize", "org/tiny", tmp_path / "out")
    (snapshot,) = (mxq.home / "hub/models--org--tiny/snapshots").iterdir()
    assert read(snapshot).items() <= read(dense_source).items()


def test_disks_that_are_full(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path) -> None:
    repository = hub.add("org/tiny", dense_source)
    fails(
        *(mxq, "quantize", "org/tiny", tmp_path / "out"),
        code=1,
        reason="could not be written to the hub's cache",
        first=files_of_a_megabyte,
    )
    for free, reason in (
        (five_megabytes, "downloading org/tiny takes 7.5"),
        (one_megabyte, "has 1.00 MB free, the output needs 3.65 MB"),
    ):
        fails(mxq, "quantize", "org/tiny", tmp_path / "out", code=1, reason=reason, first=free)
    repository.listed = [{"type": "file", "oid": "0", "size": 10**18, "path": "LICENSE"}]
    repository.commit(repository.commits[repository.refs["main"]] | {"NOTICE": b"another commit, another listing"})
    fails(mxq, "quantize", "org/tiny", tmp_path / "out", code=1, reason="downloading org/tiny takes 1000000000.01 GB")
    assert left(mxq.home) == []
    assert not (tmp_path / "out").exists()


def files_of_a_megabyte() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def one_megabyte() -> None:
    _free(10**6)


def five_megabytes() -> None:
    _free(5 * 10**6)


def _free(count: int) -> None:
    from shutil import _ntuple_diskusage

    shutil.disk_usage = lambda path: _ntuple_diskusage(count, 0, count)


def test_what_cannot_be_converted_is_not_downloaded(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", dense_source)
    files = read(dense_source)
    hub.add("org/other", files | {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'})
    shard = files["model.safetensors"]
    assert isinstance(shard, bytes)
    hub.add("org/short", files | {"model.safetensors": shard[:-1]})
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    for spec, out, code, reason in (
        ("org/other", tmp_path / "out", 2, "config.json names LlamaForCausalLM"),
        ("org/tiny", tmp_path / "full", 2, "is not empty"),
        ("org/tiny", tmp_path / "no/out", 2, "does not exist"),
        ("org/short", tmp_path / "out", 1, "model.safetensors is truncated"),
    ):
        fails(mxq, "quantize", spec, out, code=code, reason=reason)
    assert left(mxq.home) == []


@pytest.mark.parametrize(
    "name",
    ["../evil.json", "../../../evil.json", "/tmp/evil.json", "x/../../evil.json", "..\\evil.json", "C:evil.json"],
)
def test_file_names_that_lead_elsewhere(hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path, name: str) -> None:
    hub.add("org/tiny", read(dense_source) | {name: b"evil"})
    said = mxq("quantize", "org/tiny", tmp_path / "out")
    assert "evil" not in said.stdout + said.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"home", "out"}
    assert not list(tmp_path.rglob("*evil*"))
    assert not Path("/tmp/evil.json").exists()
    assert not [asked for asked in hub.asked if "evil" in asked.path]


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        ("../../../evil.safetensors", "leads out of the checkpoint's directory"),
        ("/etc/passwd", "leads out of the checkpoint's directory"),
        ("sub/model.safetensors", "leads out of the checkpoint's directory"),
        ("model-00002-of-00002.safetensors", "org/tiny lacks 'model-00002-of-00002.safetensors', which it needs"),
    ],
)
def test_an_index_that_names_what_is_not_there(
    hub: Hub, mxq: Runner, dense_source: Path, tmp_path: Path, shard: str, reason: str
) -> None:
    index = json.dumps({"weight_map": {"a": "model.safetensors", "b": shard}}).encode()
    hub.add("org/tiny", read(dense_source) | {"model.safetensors.index.json": index, "sub/model.safetensors": b"x"})
    for verb in (("plan",), ("quantize", tmp_path / "out")):
        fails(mxq, verb[0], "org/tiny", *verb[1:], code=1, reason=reason)
    assert not [asked for asked in hub.asked if "evil" in asked.path or "Signature" in asked.path]
    assert not (tmp_path / "out").exists()
