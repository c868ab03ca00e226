"""The run directory: continued after any interruption, never shared, never rewritten."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine, decode, small_plan

from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.evaluate import read_run, run
from mxq.evaluate.kept import layers_of


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def content(path: Path) -> dict[str, list[tuple[str, tuple[int, ...] | None]]]:
    """What was measured, without the times."""
    return {
        f"{cell.arm.label} {cell.workload} {cell.repeat}": [(r.prompt_id, r.accepted) for r in cell.records]
        for cell in read_run(path).cells
    }


def interrupt_at(call: int) -> Callable[[int], None]:
    def before(number: int) -> None:
        if number == call:
            raise KeyboardInterrupt

    return before


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    run(small_plan(), path, ScriptedEngine(), decode)
    return path


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("call", [0, 6, 7, 20, 41])
def test_interrupted_and_continued_equals_uninterrupted(tmp_path: Path, whole: Path, call: int, together: bool) -> None:
    path = tmp_path / "run"
    with pytest.raises(InterruptedRunError) as caught:
        run(small_plan(), path, ScriptedEngine(together=together, before=interrupt_at(call)), decode)
    assert caught.value.exit_code == 4
    assert "of 36 requests are recorded" in caught.value.message
    engine = ScriptedEngine(together=together)
    run(small_plan(), path, engine, decode)
    assert content(path) == content(whole)
    assert read_run(path).finished


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("call", [0, 30, 50])
def test_repeats_are_continued_too(tmp_path: Path, call: int, together: bool) -> None:
    plan, whole = replace(small_plan(), repeats=2), tmp_path / "whole"
    run(plan, whole, ScriptedEngine(), decode)
    with pytest.raises(InterruptedRunError, match="of 72 requests"):
        run(plan, tmp_path / "run", ScriptedEngine(together=together, before=interrupt_at(call)), decode)
    run(plan, tmp_path / "run", ScriptedEngine(together=together), decode)
    assert content(tmp_path / "run") == content(whole)
    assert len(content(whole)) == 24
    with pytest.raises(UsageError, match="--repeats 2 there, 1 now"):
        run(small_plan(), whole, ScriptedEngine(), decode)


def test_a_finished_run_is_left_alone(whole: Path) -> None:
    before, engine = snapshot(whole), ScriptedEngine()
    run(small_plan(), whole, engine, decode)
    after = snapshot(whole)
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in before if name != ".lock")
    assert not engine.calls
    assert not engine.opened


def test_finished_cells_keep_their_bytes_while_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        run(small_plan(), path, ScriptedEngine(before=interrupt_at(30)), decode)
    done = {name: data for name, data in snapshot(path).items() if "-sums-" in name}
    assert len(done) == 12
    assert all(b'"finished"' in data for name, data in done.items() if name.endswith("cell.json"))
    run(small_plan(), path, ScriptedEngine(), decode)
    assert {name: data for name, data in snapshot(path).items() if name in done} == done


def test_runs_of_earlier_formats_are_refused(tmp_path: Path, whole: Path) -> None:
    path = shutil.copytree(whole, tmp_path / "run")
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(info | {"format": 1}))
    with pytest.raises(UsageError, match="has format 1, and this mxq writes 2; use another directory"):
        run(small_plan(), path, ScriptedEngine(), decode)
    with pytest.raises(UsageError, match="has format 1; this mxq reads format 2"):
        read_run(path)


@pytest.mark.parametrize("keep", [0, 1, 40, -1])
def test_a_torn_last_line_is_made_again(tmp_path: Path, whole: Path, keep: int) -> None:
    path = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        run(small_plan(), path, ScriptedEngine(before=interrupt_at(20)), decode)
    records = next(path.glob("cells/mxfp4-dflash-7-sums-*/records.jsonl"))
    first, second, _ = records.read_bytes().split(b"\n")
    records.write_bytes(first + b"\n" + second[:keep])
    assert [len(cell.records) for cell in read_run(path).cells][5] == 1
    run(small_plan(), path, ScriptedEngine(), decode)
    assert content(path) == content(whole)
    assert records.read_bytes().startswith(first + b"\n")


def damage_line(line: bytes) -> Callable[[list[bytes]], None]:
    def damage(lines: list[bytes]) -> None:
        lines[1] = line

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_line(b"{"), "line 2: not a possible record"),
        (damage_line(b"[]"), "line 2: not a possible record"),
        (damage_line(b'{"prompt_id": "x"}'), "line 2: not a possible record"),
        (lambda lines: lines.__setitem__(1, lines[0]), "line 2: not a possible record (prompt 'sums-0' is there"),
        (lambda lines: lines.__setitem__(0, lines[0].replace(b'"accepted":[', b'"accepted":[9,')), "line 1: "),
        (lambda lines: lines.__setitem__(0, lines[0].replace(b'"text":"', b'"text":"x')), "line 1: "),
        (lambda lines: lines.__setitem__(0, lines[0].replace(b'"duration_s":', b'"duration_s":-')), "line 1: "),
        (list.reverse, "not the prompts of the workload in order"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: Callable[[list[bytes]], None], message: str) -> None:
    path = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        run(small_plan(), path, ScriptedEngine(before=interrupt_at(20)), decode)
    records = next(path.glob("cells/bf16-dflash-3-sums-*/records.jsonl"))
    lines = records.read_bytes().splitlines()
    assert len(lines) == 2
    damage(lines)
    spoilt = b"".join(line + b"\n" for line in lines)
    records.write_bytes(spoilt)
    with pytest.raises(MxqError) as caught:
        run(small_plan(), path, ScriptedEngine(), decode)
    assert message in caught.value.message
    assert str(records) in caught.value.message
    assert records.read_bytes() == spoilt


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"accepted":[', b'"accepted":[9,', "accepted counts"),
        (b'"accepted":[', b'"accepted":["2",', "accepted is not a list of int numbers"),
        (b'"drafted":[3', b'"drafted":[0', "accepted 1 of 0 drafts with a budget of 3"),
        (b'"duration_s":', b'"duration_s":-', "duration_s is -"),
        (b'"ttft_s":', b'"ttft_s":-', "ttft_s is -"),
        (b'"ttft_s":0.01', b'"ttft_s":NaN', "ttft_s is nan"),
        (b'"started_at":', b'"started_at":-', "started_at is -"),
        (b'"started_at":', b'"began_at":', "unexpected keyword argument 'began_at'"),
        (b'"drafted":', b'"draughted":', "drafted is missing"),
        (b'"started_at":', b'"' + b"x" * 1000 + b'":', "unexpected keyword argument 'xxx"),
        (b'"text":"', b'"text":5,"old":"', "unexpected keyword argument 'old'"),
        (b'"prompt_id":"talk-1"', b'"prompt_id":["talk-1"]', "prompt_id is no text"),
        (b'"prompt_id":"talk-1"', b'"prompt_id":"talk-0"', "prompt 'talk-0' is there already"),
        (b'"finish_reason":"length"', b'"finish_reason":"bored"', "finish reason 'bored'"),
        (b"{", b"", "Extra data"),
    ],
)
def test_reading_leaves_out_a_line_that_is_no_record_and_names_it(
    tmp_path: Path, whole: Path, old: bytes, new: bytes, why: str
) -> None:
    path = shutil.copytree(whole, tmp_path / "run")
    records = next(path.glob("cells/bf16-dflash-3-talk-*/records.jsonl"))
    lines = records.read_bytes().splitlines(keepends=True)
    assert old in lines[1]
    lines[1] = lines[1].replace(old, new, 1)
    if why.startswith("accepted 1"):  # whatever the scripted engine drew there
        record = json.loads(lines[1])
        lines[1] = json.dumps(record | {"accepted": [1, *record["accepted"][1:]]}).encode() + b"\n"
    records.write_bytes(b"".join(lines))
    found = read_run(path)
    cell = next(cell for cell in found.cells if cell.damage)
    assert (cell.arm.label, [record.prompt_id for record in cell.records]) == ("bf16 dflash-3", ["talk-0", "talk-2"])
    line, changed = found.warnings
    assert line.startswith(f"{records}, line 2: not a possible record (")
    assert len(line) < len(str(records)) + 400
    assert why in line
    assert changed.startswith(f"{records} was changed after the cell was finished")
    with pytest.raises(MxqError, match="changed after the cell was finished"):
        run(small_plan(), path, ScriptedEngine(), decode)


def test_reading_says_which_finished_cells_were_changed_or_lost(tmp_path: Path, whole: Path) -> None:
    path = shutil.copytree(whole, tmp_path / "run")
    changed = next(path.glob("cells/bf16-ar-talk-*/records.jsonl"))
    changed.write_bytes(changed.read_bytes().replace(b'"ttft_s":0.01', b'"ttft_s":0.02'))
    lost = next(path.glob("cells/mxfp4-dflash-7-sums-*/records.jsonl"))
    lost.unlink()
    assert sorted(read_run(path).warnings) == [
        f"{changed} was changed after the cell was finished: its numbers are not those that were measured",
        f"{lost} is missing: the cell is left out",
    ]
    assert read_run(whole).warnings == ()
    with pytest.raises(MxqError, match="changed after the cell was finished"):
        run(small_plan(), path, ScriptedEngine(), decode)


def test_a_file_full_of_rubbish_is_said_in_a_few_lines(tmp_path: Path) -> None:
    run(small_plan(prompts=9), tmp_path / "run", ScriptedEngine(), decode)
    records = next((tmp_path / "run").glob("cells/bf16-ar-talk-*/records.jsonl"))
    records.write_bytes(b"rubbish\n" * 9)
    said = read_run(tmp_path / "run").warnings
    assert [line.removeprefix(str(records)).partition(":")[0] for line in said[:3]] == [
        ", line 1",
        ", line 2",
        ", line 3",
    ]
    assert said[3] == f"{records}: 6 more lines are left out"


def test_another_run_is_refused_with_what_differs(whole: Path) -> None:
    plan, before = small_plan(), snapshot(whole)
    other = replace(plan, settings=replace(plan.settings, max_tokens=65, thinking=True))
    with pytest.raises(UsageError) as caught:
        run(other, whole, ScriptedEngine(), decode)
    assert "max_tokens is 64 there, 65 now" in caught.value.message
    assert "thinking is False there, True now" in caught.value.message
    assert caught.value.exit_code == 2
    fewer = small_plan(prompts=2)
    with pytest.raises(UsageError, match=r"workloads\.0\.prompts is 3 there, 2 now"):
        run(fewer, whole, ScriptedEngine(), decode)
    assert {name: data for name, data in snapshot(whole).items() if name != ".lock"} == {
        name: data for name, data in before.items() if name != ".lock"
    }


def test_a_model_may_move_and_a_system_be_updated(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, engine = small_plan(), ScriptedEngine()
    moved = {role: replace(model, spec=f"elsewhere/{role}", path=Path("/else")) for role, model in plan.targets.items()}
    monkeypatch.setattr("platform.platform", lambda **options: "Linux-99")
    run(replace(plan, targets=moved), whole, engine, decode)
    assert not engine.opened


def test_errors_of_the_conversion_are_kept_with_the_run(tmp_path: Path) -> None:
    """Once: a model that lies elsewhere when the run goes on takes nothing away."""
    plan, model = small_plan(), tmp_path / "model"
    model.mkdir()
    (model / "layers.jsonl").write_text('{"module": "a", "sqnr_db": 18.5}\n')
    converted = replace(plan, targets={**plan.targets, "mxfp4": replace(plan.targets["mxfp4"], path=model)})
    path = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        run(converted, path, ScriptedEngine(before=interrupt_at(20)), decode)
    run(plan, path, ScriptedEngine(), decode)
    assert layers_of(path, "mxfp4").read_bytes() == (model / "layers.jsonl").read_bytes()
    assert not layers_of(path, "bf16").exists()
    (model / "layers.jsonl").unlink()
    (model / "layers.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(MxqError, match="a link out of"):
        run(converted, tmp_path / "other", ScriptedEngine(), decode)


def test_other_versions_are_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxq.files.__version__", "99.0")
    with pytest.raises(UsageError, match=r"versions.mxq is \S+ there, 99.0 now"):
        run(small_plan(), whole, ScriptedEngine(), decode)


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    engine = ScriptedEngine()
    with pytest.raises(UsageError, match="not empty and holds no run"):
        run(small_plan(), tmp_path, engine, decode)
    with pytest.raises(UsageError, match="is a file"):
        run(small_plan(), tmp_path / "thesis.txt", engine, decode)
    assert snapshot(tmp_path) == {"thesis.txt": b"precious"}
    assert not engine.opened


def test_nothing_is_made_when_the_models_do_not_load(tmp_path: Path) -> None:
    class Unloadable(ScriptedEngine):
        def open(self, arms):  # type: ignore[no-untyped-def]
            raise UsageError("the drafter is for another target")

    with pytest.raises(UsageError, match="another target"):
        run(small_plan(), tmp_path / "run", Unloadable(), decode)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.write, []

    def write(fd: int, data: bytes) -> int:
        if bytes(data).startswith(b'{"prompt_id"'):
            written.append(fd)
            if len(written) == 10:
                return real(fd, bytes(data)[:20])
        elif len(written) == 10:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(MxqError, match=r"cannot write .*records.jsonl: No space left on device"):
        run(small_plan(), tmp_path / "run", ScriptedEngine(), decode)
    monkeypatch.setattr(os, "write", real)
    assert sum(len(cell.records) for cell in read_run(tmp_path / "run").cells) == 9
    run(small_plan(), tmp_path / "run", ScriptedEngine(), decode)
    assert content(tmp_path / "run") == content(whole)


CHILD = """
import sys, time
from pathlib import Path
from scripted import ScriptedEngine, decode, small_plan
from mxq.evaluate import run
from mxq.errors import MxqError

try:
    run(small_plan(), Path(sys.argv[1]), ScriptedEngine(before=lambda call: time.sleep(float(sys.argv[2]))), decode)
except MxqError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def child(path: Path, pause_s: float) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(pause_s)], env=environment, stdout=subprocess.PIPE, text=True
    )


def wait_for_records(path: Path, count: int) -> None:
    deadline = time.monotonic() + 600
    while sum(len(p.read_bytes().splitlines()) for p in path.glob("cells/*/records.jsonl")) < count:
        assert time.monotonic() < deadline, "no records"
        time.sleep(0.01)


def test_killed_and_continued(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    with child(path, 0.05) as process:
        wait_for_records(path, 5)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not read_run(path).finished
    kept = {name: data for name, data in snapshot(path).items() if name.endswith("records.jsonl")}
    run(small_plan(), path, ScriptedEngine(), decode)
    assert content(path) == content(whole)
    after = snapshot(path)
    assert all(after[name].startswith(data[: data.rfind(b"\n") + 1]) for name, data in kept.items())


def test_a_second_process_is_refused_while_the_first_goes_on(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    with child(path, 0.05) as first:
        wait_for_records(path, 1)
        with pytest.raises(UsageError, match=rf"another process \({first.pid}\) is running in"):
            run(small_plan(), path, ScriptedEngine(), decode)
        assert first.wait() == 0
    assert content(path) == content(whole)


def test_a_run_that_cannot_be_held_says_what_to_do(tmp_path: Path) -> None:
    """As on a file system that is read-only, which root can write to no more than others."""
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(MxqError, match=r"cannot write .*\.lock: Is a directory") as caught:
        run(small_plan(), tmp_path / "run", ScriptedEngine(), decode)
    assert caught.value.hint == "make it writable and run the same command to continue"


def test_ctrl_c_on_a_real_process(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with child(path, 0.05) as process:
        wait_for_records(path, 3)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[0]
    assert process.returncode == InterruptedRunError.exit_code
    assert "run the same command again to continue" in said
    assert sum(len(cell.records) for cell in read_run(path).cells) >= 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ("[]", "does not hold an object"),
        ('{"format": 9}', "has format 9"),
        ('{"format": "%s"}' % ("x" * 10_000), "has format 'xxx"),
        (None, "no run.json"),
    ],
)
def test_reading_what_is_no_run(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(MxqError) as caught:
        read_run(tmp_path)
    assert message in caught.value.message
    assert len(caught.value.message) < 1000


def test_reading_a_run_that_describes_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": 2, "definition": {}}))
    with pytest.raises(MxqError, match="not a run's description"):
        read_run(tmp_path)
    models: dict[str, Any] = {"targets": {"bf16": {"fingerprint": {}}}, "drafter": None}
    valid: dict[str, Any] = {"format": 2, "definition": {"workloads": []} | models, "cells": {}}
    targets: list[Any] = [0, {"bf16": None}, {"bf16": 1e308}, {"bf16": {"a": 1}}]
    for wrong in (*({"targets": one} for one in targets), {"drafter": {"a": 1}}):
        (tmp_path / "run.json").write_text(json.dumps(valid | {"definition": valid["definition"] | wrong}))
        with pytest.raises(MxqError, match="not a run's description"):
            read_run(tmp_path)
    for arm in ({"num_speculative_tokens": [1]}, {"method": {"a": 1}}, {"target": 5}):
        cell_of: dict[str, Any] = {"arm": {"target": "bf16", "method": "ar"} | arm}
        cells = {"key": cell_of | {"workload": "a", "concurrency": 1, "repeat": 0}}
        (tmp_path / "run.json").write_text(json.dumps(valid | {"cells": cells}))
        with pytest.raises(MxqError, match="not a run's description"):
            read_run(tmp_path)
    for cell in ({"workload": "a"}, {"workload": "a", "concurrency": [], "repeat": 0}, {"concurrency": 1, "x": 0}):
        cells = {"key": {"arm": {"target": "bf16", "method": "ar"}} | cell}
        (tmp_path / "run.json").write_text(json.dumps(valid | {"cells": cells}))
        with pytest.raises(MxqError, match="not a run's description"):
            read_run(tmp_path)
    for warnings in (5, [5], None):
        (tmp_path / "run.json").write_text(json.dumps(valid | {"warnings": warnings}))
        with pytest.raises(MxqError, match="not a run's description"):
            read_run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(valid))  # as written before there were any
    assert read_run(tmp_path).warnings == ()
