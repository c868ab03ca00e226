"""A stopped conversion continues: to the same bytes, from whatever moment, and never on top of something else."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conversion
import pytest
from checkpoints import rewrite
from killing import digests

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.writer import ShardWriter
from mxq.convert import recipe
from mxq.convert.journal import Journal
from mxq.convert.partial import Partial
from mxq.convert.plan import plan
from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.files import versions
from mxq.verify.run import verify

SHARD = 1_000_000
MOMENTS = ("before_recording", "while_recording", "after_recording", "in_a_shard", "before_a_change")


def convert(source: Path, out: Path, name: str = "mxfp4", **options: Any) -> Path:
    return conversion.convert(source, out, name, **{"max_shard_size": SHARD, **options})


def interrupt_after(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Do as Ctrl-C does when so many shards are complete and of the next one some tensors are written."""
    record, write = Journal.record, ShardWriter.write
    complete = calls = 0

    def count(journal: Journal, line: dict[str, Any]) -> None:
        nonlocal complete
        record(journal, line)
        complete += "shard" in line

    def interrupted(*arguments: Any) -> None:
        nonlocal calls
        calls += complete == shards
        if calls == 3:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(Journal, "record", count)
    monkeypatch.setattr(ShardWriter, "write", interrupted)


@pytest.fixture
def stopped(dense_source: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A source of its own and the output whose conversion was interrupted when two files were complete."""
    source = shutil.copytree(dense_source, tmp_path / "source")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(InterruptedRunError):
            convert(source, tmp_path / "out")
    return source, tmp_path / "out"


def tree(path: Path) -> dict[str, bytes | None]:
    return {
        str(file.relative_to(path)): file.read_bytes() if file.is_file() else None for file in sorted(path.rglob("*"))
    }


def killed(moment: str, every: int, source: Path, place: Path, *options: str) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("killing.py")
    words = [script, moment, every, place, "quantize", source, "--max-shard-size", SHARD, *options]
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_continued(runs: list[dict[str, Any]], undisturbed: Path) -> None:
    expected = digests(undisturbed)
    shards = sum(name.endswith(".safetensors") for name in expected)
    assert shards > 3
    *stops, last = runs
    assert last["killed"] == 0
    assert len(stops) > 2
    for stop in stops:
        assert stop["killed"] == -signal.SIGKILL
        assert stop["files"] == expected, stop
        assert stop["code"] == 0, stop
        assert stop["left"] == ["out"]
        if stop["published"]:
            assert "converting" not in stop["said"]
        elif stop["recorded"]:
            assert f"continuing: {stop['recorded']} of {shards} files are complete" in stop["said"]
    assert len({stop["recorded"] for stop in stops}) > 2


@pytest.mark.parametrize(("moment", "every"), [("before_recording", 1), ("in_a_shard", 25)])
def test_killed_and_run_again_it_ends_with_the_same_bytes(
    dense_source: Path, tmp_path: Path, moment: str, every: int
) -> None:
    undisturbed = convert(dense_source, tmp_path / "undisturbed")
    check_continued(killed(moment, every, dense_source, tmp_path), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["per-expert", "fused"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_it_ends_with_the_same_bytes(
    source: Path, tmp_path: Path, moment: str, experts: str
) -> None:
    undisturbed = convert(source, tmp_path / "undisturbed", experts=experts)
    every = 17 if moment == "in_a_shard" else 1
    check_continued(killed(moment, every, source, tmp_path, "--experts", experts), undisturbed)


@pytest.mark.parametrize("left", ["nothing", "lock", "journal", "torn journal"])
def test_stopped_while_it_tidies_up_it_is_finished(dense_source: Path, tmp_path: Path, left: str) -> None:
    source, out = shutil.copytree(dense_source, tmp_path / "source"), tmp_path / "out"
    lines: list[bytes] = []

    def keep(partial: Partial) -> None:
        lines.extend((tmp_path / "out.partial" / "journal.jsonl").read_bytes().splitlines(keepends=True))
        discard(partial)

    discard = Partial.discard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "discard", keep)
        convert(source, out)
    before = tree(out)
    work = tmp_path / "out.partial"

    def leave() -> None:
        work.mkdir(exist_ok=True)
        if left != "nothing":
            (work / ".lock").write_text("1\n")
        if "journal" in left:
            (work / "journal.jsonl").write_bytes(lines[0] + lines[-1][: 10 if "torn" in left else 0])

    leave()
    convert(source, out)
    assert not work.exists()
    assert tree(out) == before
    leave()
    with pytest.raises(UsageError, match=r"out is not empty" if "journal" not in left else "of another conversion"):
        convert(source, out, "mxfp4-weight-only")
    change_tokenizer(source)
    with pytest.raises(UsageError, match=r"out is not empty" if "journal" not in left else "of another conversion"):
        convert(source, out)
    assert tree(out) == before


def test_an_output_that_was_changed_is_not_taken_for_finished(dense_source: Path, tmp_path: Path) -> None:
    convert(dense_source, tmp_path / "out")
    (tmp_path / "out.partial").mkdir()
    for content in ("{}", '{"format": 1}', "["):
        (tmp_path / "out" / "mxq_manifest.json").write_text(content)
        with pytest.raises(UsageError, match="out is not empty"):
            convert(dense_source, tmp_path / "out")


def test_interrupted_it_keeps_what_is_complete_and_says_so(
    stopped: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = stopped
    partial = out.with_name("out.partial")
    assert not out.exists()
    kept = sorted(file.name for file in (partial / "checkpoint").iterdir())
    assert [name[:11] for name in kept] == ["model-00001", "model-00002"]
    before = {name: (partial / "checkpoint" / name).stat().st_ino for name in kept}
    convert(source, out)
    assert "continuing: 2 of" in capsys.readouterr().err
    assert {name: (out / name).stat().st_ino for name in kept} == before  # not written again
    assert digests(out) == digests(convert(source, out.with_name("undisturbed")))
    assert not partial.exists()
    assert verify(out, source, rows=0).problems == []


def test_interrupted_before_anything_is_complete_it_leaves_nothing(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 0)
    with pytest.raises(InterruptedRunError, match="out was not written") as error:
        convert(dense_source, tmp_path / "out")
    assert error.value.hint == "run the same command again to start over"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "make room and run the same command again to continue"),
        (errno.EACCES, "run the same command again to continue"),
    ],
)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "write"])
def test_a_write_that_fails_keeps_what_is_complete(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str, call: str
) -> None:
    original = getattr(os, call)

    def failing(*arguments: Any) -> Any:
        journal = tmp_path / "out.partial" / "journal.jsonl"
        if journal.exists() and journal.read_bytes().count(b"\n") == 3:
            if call == "write":
                original(arguments[0], bytes(arguments[1])[:5])  # a torn line, as a full disk leaves it
            raise OSError(number, os.strerror(number))
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        reason = rf"writing {tmp_path}/out failed: {os.strerror(number)}; 2 of \d files are complete in {tmp_path}"
        with pytest.raises(MxqError, match=reason) as error:
            convert(dense_source, tmp_path / "out")
    assert (error.value.exit_code, error.value.hint) == (1, hint)
    assert len(list((tmp_path / "out.partial" / "checkpoint").iterdir())) == 2  # the file begun makes room
    assert digests(convert(dense_source, tmp_path / "out")) == digests(convert(dense_source, tmp_path / "undisturbed"))


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "linked"])
def test_files_that_are_not_what_was_written_are_converted_again(
    stopped: tuple[Path, Path], capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    source, out = stopped
    first = min((out.with_name("out.partial") / "checkpoint").iterdir())
    elsewhere = out.with_name("elsewhere")
    if damage == "cut":
        os.truncate(first, 1000)
    elif damage == "changed":
        content = bytearray(first.read_bytes())
        content[-1] ^= 1
        first.write_bytes(content)
    else:
        first.rename(elsewhere)
        if damage == "linked":
            first.symlink_to(elsewhere)
    convert(source, out)
    said = capsys.readouterr().err
    assert f"{first.name} is not what was written, and is converted again\n" in said
    assert "continuing: 1 of" in said
    assert digests(out) == digests(convert(source, out.with_name("undisturbed")))
    assert elsewhere.exists() == (damage in ("gone", "linked"))
    assert not any(file.is_symlink() for file in out.iterdir())


def change_weights(source: Path) -> None:
    times = (source / "model.safetensors").stat()
    rewrite(source, lambda tensors: tensors["lm_head.weight"].neg_())
    os.utime(source / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))


def change_one_byte(source: Path) -> None:
    with (source / "model.safetensors").open("r+b") as stream:
        stream.seek(700_000)
        stream.write(bytes([stream.read(1)[0] ^ 1]))
    os.utime(source / "model.safetensors", (1, 1))


def change_config(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))


def change_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").write_text((source / "tokenizer.json").read_text() + " ")


SOURCE_CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (change_weights, "source_files.model.safetensors differs"),
    (change_one_byte, "source_files.model.safetensors differs"),
    (change_config, "source.fingerprint differs"),
    (change_tokenizer, "source_files.tokenizer.json differs"),
    (lambda source: (source / "LICENSE").write_text("mine"), "source_files.LICENSE differs"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("change", "reason"), SOURCE_CHANGES)
def test_a_source_changed_between_runs_is_refused(
    stopped: tuple[Path, Path], change: Callable[[Path], None], reason: str
) -> None:
    source, out = stopped
    change(source)
    refused(lambda: convert(source, out), out, reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "mxfp4-weight-only"}, "recipe.activations is dynamic there, none now"),
        ({"form": "compressed-tensors"}, "options.format is quark there, compressed-tensors now"),
        ({"experts": "fused"}, "options.experts is per-expert there, fused now"),
        ({"max_shard_size": 2_000_000}, "max_shard_size is 1000000 there, 2000000 now"),
    ],
)
def test_another_recipe_or_other_options_are_refused(
    stopped: tuple[Path, Path], options: dict[str, Any], reason: str
) -> None:
    source, out = stopped
    refused(lambda: convert(source, out, **options), out, reason)


def test_another_version_is_refused(stopped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = stopped
    there = versions()["mxq"]
    monkeypatch.setattr("mxq.files.__version__", "9.9")
    refused(lambda: convert(source, out), out, f"versions.mxq is {there} there, 9.9 now")


def refused(work: Callable[[], object], out: Path, reason: str) -> None:
    """Make sure that ``work`` is refused, and leaves everything as it was."""
    before = tree(out.parent)
    partial = out.with_name("out.partial")
    with pytest.raises(UsageError) as error:
        work()
    assert f"{partial} is of another conversion: " in error.value.message
    assert reason in error.value.message
    assert error.value.hint == f"name another output, or delete {partial} to start over"
    assert tree(out.parent) == before


@pytest.mark.parametrize("place", ["", "checkpoint"])
@pytest.mark.parametrize("directory", [False, True])
def test_files_of_others_are_named_and_stay(stopped: tuple[Path, Path], place: str, directory: bool) -> None:
    source, out = stopped
    mine = out.with_name("out.partial") / place / "mine.txt"
    if directory:
        mine.mkdir()
    else:
        mine.write_text("mine")
    before = tree(out.parent)
    with pytest.raises(UsageError, match=r"holds what mxq did not write: mine.txt") as error:
        convert(source, out)
    assert error.value.hint == "move it away, or name another output"
    after = tree(out.parent)
    after["out.partial/.lock"] = before["out.partial/.lock"]  # says who asked last
    assert after == before
    mine.rename(out.with_name("mine.txt"))
    convert(source, out)


@pytest.mark.parametrize(
    ("content", "code", "reason"),
    [
        (None, 2, "out.partial holds no journal.jsonl that says what is in it"),
        (b"", 2, "out.partial holds no journal.jsonl that says what is in it"),
        (b'{"format": 1, "conv', 2, "out.partial holds no journal.jsonl that says what is in it"),
        (b'{"format": 7}\n', 2, "journal.jsonl has format 7, and this mxq writes 1"),
        (b'{"format": 1}\n', 1, "journal.jsonl is damaged"),
        (b"mine\n", 1, "journal.jsonl is damaged"),
        (b'{"format": 1, "conversion": {}}\n{"shard": 3}\n', 1, "journal.jsonl is damaged"),
    ],
)
def test_a_journal_that_is_none_is_refused(
    stopped: tuple[Path, Path], content: bytes | None, code: int, reason: str
) -> None:
    source, out = stopped
    journal = out.with_name("out.partial") / "journal.jsonl"
    journal.unlink()
    if content is not None:
        journal.write_bytes(content)
    before = tree(out.parent)
    with pytest.raises(MxqError, match=reason) as error:
        convert(source, out)
    assert error.value.exit_code == code
    assert f"{journal.parent}" in (error.value.hint or "")
    assert tree(out.parent) == before


def test_a_file_or_a_link_in_place_of_the_partial_directory_is_refused(dense_source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.partial").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "b.partial").symlink_to("elsewhere")
    (tmp_path / "c.partial").symlink_to("nowhere")
    before = tree(tmp_path)
    for name in "abc":
        with pytest.raises(UsageError, match=f"{name}.partial, where the output is made, is not a directory"):
            convert(dense_source, tmp_path / name)
    assert tree(tmp_path) == before


def test_the_second_process_on_an_output_is_refused(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, out = Journal.record, tmp_path / "out"
    said: list[str] = []

    def meanwhile(journal: Journal, line: dict[str, Any]) -> None:
        record(journal, line)
        if "conversion" in line:
            mxq = Path(sys.executable).with_name("mxq")
            command = list(map(str, (mxq, "quantize", dense_source, out, "--max-shard-size", SHARD)))
            second = subprocess.run(command, capture_output=True, text=True, check=False)
            assert second.returncode == 2
            said.append(second.stderr)
        else:
            with pytest.raises(UsageError) as error:
                convert(dense_source, out, "mxfp4-weight-only")
            said.append(f"error: {error.value.message}\n  -> {error.value.hint}\n")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", meanwhile)
        convert(dense_source, out)
    expected = f"error: another process ({os.getpid()}) is converting into {out}\n"
    assert said == [f"{expected}  -> wait for it, or name another output\n"] * 6
    assert digests(out) == digests(convert(dense_source, tmp_path / "undisturbed"))


@pytest.mark.parametrize(("change", "reason"), [*SOURCE_CHANGES[:2], (change_tokenizer, "tokenizer.json differs")])
def test_a_source_that_changes_meanwhile_is_no_silent_mix(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], reason: str
) -> None:
    source = shutil.copytree(dense_source, tmp_path / "source")
    record = Journal.record

    def meanwhile(journal: Journal, line: dict[str, Any]) -> None:
        record(journal, line)
        if len(journal.shards) == 2 and "shard" in line:
            change(source)

    monkeypatch.setattr(Journal, "record", meanwhile)
    with pytest.raises(MxqError, match=f"{source} changed while it was converted: ") as error:
        convert(source, tmp_path / "out")
    assert reason.removeprefix("source_files.") in error.value.message
    assert error.value.exit_code == 1
    assert "nothing was left behind" in (error.value.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("name", "change"), [("model.safetensors", "cut"), ("model.safetensors", "gone"), ("tokenizer.json", "gone")]
)
def test_a_source_that_cannot_be_read_on_is_an_error(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    source = shutil.copytree(dense_source, tmp_path / "source")
    lost = source / name
    record = Journal.record

    def meanwhile(journal: Journal, line: dict[str, Any]) -> None:
        record(journal, line)
        if len(journal.shards) == 2 and "shard" in line:
            lost.rename(tmp_path / "aside") if change == "gone" else os.truncate(lost, 2000)

    monkeypatch.setattr(Journal, "record", meanwhile)
    with pytest.raises(MxqError) as error:
        convert(source, tmp_path / "out")
    monkeypatch.undo()
    if change == "cut" or name == "tokenizer.json":
        assert f"{source} changed while it was converted: {name} differs" in error.value.message
        assert not list(tmp_path.glob("out*"))
    else:  # a disk that is away may come back
        assert f"{lost} cannot be read: No such file or directory" in error.value.message
        (tmp_path / "aside").rename(lost)
        convert(source, tmp_path / "out")


def test_numbers_that_are_none_leave_nothing_even_of_an_earlier_run(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run could continue: not of this source, and not of one that has other numbers there."""
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        with pytest.raises(InterruptedRunError):
            convert(dense_source, tmp_path / "out")
    assert (tmp_path / "out.partial").exists()

    def none(self: Checkpoint, name: str, start: int, view: memoryview) -> None:
        view[:] = b"\xff" * len(view)

    monkeypatch.setattr(Checkpoint, "read_into", none)
    with pytest.raises(MxqError, match="values that are NaN or infinite") as error:
        convert(dense_source, tmp_path / "out")
    assert "nothing was left behind" in (error.value.hint or "")
    assert not list(tmp_path.iterdir())


def test_what_is_complete_needs_no_room_again(stopped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = stopped
    usage = shutil.disk_usage(out.parent)
    whole = plan(Checkpoint.open(source), recipe.load("mxfp4")).bytes_after
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=whole - 1_000_000))
    with pytest.raises(MxqError, match="free, the output needs"):
        convert(source, out.with_name("other"))
    convert(source, out)
