"""Checks between cells: a sound run passes them, and each planted defect of a server is found."""

import io
import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from scripted import ScriptedEngine, decode, small_plan
from served import ServedCell, serve, server_plan

from mxq.analysis import Summary, summarise
from mxq.analysis.checks import NEAR_TIE, tally
from mxq.cli import main
from mxq.errors import MxqError
from mxq.evaluate import Cell, read_run, run
from mxq.report.tables import show

Change = Callable[[Cell, ServedCell], Mapping[str, Any] | None]
SAME = "acceptance length is that at concurrency 1"
IDENTITY = "greedy answers are those of plain decoding"
REPEATS = "repeats give the same answers"


def summary_of(path: Path, change: Change = lambda cell, made: None, **plan: Any) -> Summary:
    return summarise(read_run(serve(path / "run", server_plan(**plan), change=change)))


def failures(summary: Summary) -> dict[str, set[tuple[str | None, int, int]]]:
    found: dict[str, set[tuple[str | None, int, int]]] = {}
    for made in summary.failed_checks:
        found.setdefault(made.check.name, set()).add((made.arm, made.concurrency, made.repeat))
    return found


def test_a_sound_run_passes_every_check(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, repeats=2)
    assert {name for name, (passed, wrong, unknown) in tally(summary.checks).items() if wrong or unknown} == set()
    assert {SAME, IDENTITY, REPEATS, "same prompts", "requests", "accepted by position"} <= tally(summary.checks).keys()
    assert not summary.warnings
    assert summary.as_json()["failed_checks"] == 0


def test_a_batching_bug_that_costs_acceptance_is_found(tmp_path: Path) -> None:
    """Answers stay right, and with others in flight fewer drafts are accepted."""

    def change(cell: Cell, made: ServedCell) -> None:
        if (cell.concurrency, cell.arm.target, cell.arm.method) == (4, "bf16", "dflash"):
            spoiled = ServedCell(made.k, made.concurrency)
            for record in made.records:
                *early, last = record.accepted or ()
                passes = [half for a in early for half in ([a - 1, 0] if a else [0])] + [last]
                spoiled.answer(record.prompt_id, passes, tokens=list(record.token_ids))
            made.records, made.counters, made.now = spoiled.records, spoiled.counters, spoiled.now

    summary = summary_of(tmp_path, change)
    assert failures(summary) == {SAME: {("bf16 dflash-3", 4, 0)}}
    (warning,) = summary.warnings
    assert warning.startswith(f"check failed: {SAME}. bf16 dflash-3 on sums, concurrency 4: ")
    assert "99.9% interval -" in warning


def test_few_prompts_do_not_decide_it(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, prompts=4)
    assert {made.check.ok for made in summary.checks if made.check.name == SAME} == {None}
    assert not summary.failed_checks


def other_answer(made: ServedCell, number: int = 0) -> None:
    record = made.records[number]
    made.records[number] = replace(record, token_ids=(*record.token_ids[:-1], 0))


def test_a_repeat_with_other_answers_is_found_at_concurrency_1(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.repeat == 1 and cell.arm.method == "ar":
            other_answer(made)

    summary = summary_of(tmp_path, change, repeats=2)
    found = failures(summary)
    assert found.pop(REPEATS) == {("bf16 ar", 1, 1), ("mxfp4 ar", 1, 1)}
    assert found.keys() <= {IDENTITY}
    beside = [m for m in summary.checks if m.check.name == REPEATS and m.concurrency == 4 and m.arm == "bf16 ar"]
    assert [made.check.ok for made in beside] == [None]  # who shares a batch with whom decides near-ties
    assert beside[0].check.detail == "11 of 12 are the first repeat's"


def tie(gap: float, both_on_top: bool = True) -> dict[str, Any]:
    return {"prompt_id": "sums-0", "turn": 1, "position": 39, "gap": gap, "both_on_top": both_on_top}


@pytest.mark.parametrize(
    ("near_ties", "ok"),
    [
        ([tie(0.1)], True),
        ([tie(NEAR_TIE + 0.1)], False),
        ([tie(0.1, both_on_top=False)], False),
        ([], False),
        (None, None),
    ],
    ids=["near-tie", "far", "another token is on top", "not looked at", "unknown"],
)
def test_an_answer_that_speculation_changed_is_a_near_tie_or_a_defect(
    tmp_path: Path, near_ties: list[dict[str, Any]] | None, ok: bool | None
) -> None:
    def change(cell: Cell, made: ServedCell) -> dict[str, Any] | None:
        if cell.arm.method == "ar":
            return None
        other_answer(made)
        return {"near_ties": near_ties}

    summary = summary_of(tmp_path, change, concurrencies=(1,))
    said = {made.arm: made.check for made in summary.checks if made.check.name == IDENTITY}
    assert said["bf16 dflash-3"].ok is ok
    assert said["mxfp4 dflash-3"].ok is (True if ok else None)  # rounding activations moves logits further
    assert said["bf16 dflash-3"].detail.startswith("11 of 12")
    cell = summary.cell("bf16", "dflash-3", "sums")
    assert cell
    assert cell.identity
    assert (cell.identity.identical, cell.identity.first_differences) == (11, (39,))


def test_plain_answers_one_at_a_time_are_the_reference(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if (cell.arm.method, cell.concurrency) == ("ar", 4):
            other_answer(made)

    for concurrencies, ok in (((1, 4), True), ((4,), None)):
        summary = summary_of(tmp_path / str(len(concurrencies)), change, concurrencies=concurrencies)
        said = [made for made in summary.checks if made.check.name == IDENTITY and made.concurrency == 4]
        assert [made.check.ok for made in said] == [ok, ok]
        cell = summary.cell("bf16", "dflash-3", "sums", 4)
        assert cell
        assert cell.identity
        assert cell.identity.identical == (12 if ok else 11)


def test_in_float32_every_difference_is_a_defect(tmp_path: Path) -> None:
    plan = small_plan()
    plan = replace(plan, settings=replace(plan.settings, dtype="float32"))

    def counts(arm: Any, rng: random.Random) -> tuple[int, ...]:
        return (1, 2, 1) if arm.num_speculative_tokens else ()

    run(plan, tmp_path / "run", ScriptedEngine(counts=counts), decode)
    summary = summarise(read_run(tmp_path / "run"))
    assert {arm for arm, _, _ in failures(summary)[IDENTITY]} == {"bf16 dflash-3", "bf16 dflash-7"}


def test_an_arm_that_was_asked_something_else_is_found(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.label == "mxfp4 ar":
            made.records[2] = replace(made.records[2], prompt_tokens=11)

    summary = summary_of(tmp_path, change)
    assert failures(summary) == {"same prompts": {(None, 1, 0)}}
    assert "2 different lists in 8 cells" in summary.failed_checks[0].check.detail


def test_a_cell_is_checked_again_from_its_directory(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if (cell.arm.label, cell.concurrency) == ("bf16 dflash-3", 4):
            made.counters["drafts"] += 1

    summary = summary_of(tmp_path, change)
    assert failures(summary)["verify passes"] == {("bf16 dflash-3", 4, 0)}
    assert any("verify passes. bf16 dflash-3 on sums, concurrency 4: server" in said for said in summary.warnings)


def test_an_idle_drafter_is_said_once(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.label == "mxfp4 dflash-3":
            idle = ServedCell(made.k, made.concurrency)
            for record in made.records:
                idle.answer(record.prompt_id, [0] * (record.output_tokens - 1), tokens=list(record.token_ids))
            made.records, made.counters, made.now = idle.records, idle.counters, idle.now

    summary = summary_of(tmp_path, change, concurrencies=(1,))
    assert failures(summary) == {"drafts are accepted": {("mxfp4 dflash-3", 1, 0)}}
    (warning,) = summary.warnings
    assert "exactly 1.000 for mxfp4 dflash-3 on sums" in warning


def test_many_failures_are_counted_and_all_in_json(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        made.counters["requests"] += 1

    summary = summary_of(tmp_path, change, concurrencies=(1, 2, 4))
    assert len(summary.failed_checks) == 12
    assert len(summary.warnings) == 9
    assert "4 more checks failed" in summary.warnings[-1]
    said = [made for made in summary.as_json()["checks"] if made["ok"] is False]
    assert len(said) == summary.as_json()["failed_checks"] == 12


def test_a_cell_of_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    """Thinking changes acceptance more than anything else: a cell with it must not be shown beside others."""
    plan = server_plan(concurrencies=(1,))
    thinking = replace(plan, settings=replace(plan.settings, thinking=True))
    path, other = serve(tmp_path / "run", plan), serve(tmp_path / "other", thinking)
    mine, its = (next((directory / "cells").glob("bf16-dflash-*")) for directory in (path, other))
    assert mine.name != its.name
    shutil.rmtree(mine)
    shutil.copytree(its, mine)
    with pytest.raises(MxqError, match=r"cell\.json has another thinking than its run"):
        read_run(path)


def test_a_cell_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    path = serve(tmp_path / "run", server_plan(repeats=2))
    mine = next((path / "cells").glob("bf16-dflash-*-c1-r0-*"))
    shutil.rmtree(mine)
    shutil.copytree(next((path / "cells").glob("bf16-dflash-*-c1-r1-*")), mine)
    with pytest.raises(MxqError, match=r"cell\.json describes another cell than its name"):
        read_run(path)


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        ({"wall_s": 0}, "sums, concurrency 4: a wall clock of 0 s is recorded"),
        ({"wall_s": float("nan")}, "a wall clock of nan s is recorded"),
        ({"wall_s": float("inf")}, "a wall clock of inf s is recorded"),
        ({"wall_s": 10**400}, "does not hold what is noted there"),
        ({"checks": [{"name": "odd", "ok": "no", "detail": "said"}]}, "a check without a result"),
        ({"checks": [{"name": 1, "ok": None, "detail": "said"}]}, "a check without a result"),
        ({"lost": True}, "does not say which servers were lost, but True"),
        ({"lost": [5]}, "does not say which servers were lost"),
    ],
)
def test_notes_of_a_cell_that_cannot_be_are_an_error(tmp_path: Path, noted: dict[str, Any], words: str) -> None:
    path = serve(tmp_path / "run", server_plan())
    file = next((path / "cells").glob("bf16-dflash-*-c4-*")) / "cell.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | noted))
    with pytest.raises(MxqError, match=words):
        summarise(read_run(path))


def test_what_logs_and_prompts_say_is_shown_as_it_is(tmp_path: Path) -> None:
    """No markup of a terminal's library, no control sequences."""
    said = "[bold]odd[/red] \x1b[31mname\x07"
    path = serve(tmp_path / "run", server_plan(concurrencies=(1,)))
    for file in (path / "cells").glob("*/cell.json"):
        value = json.loads(file.read_text())
        value["server"] = {
            "version": said,
            "kernels": {"linear": [said], "moe": 3},
            "mxfp4": "native",
            "remarks": [said],
        }
        value["checks"] = [{"name": "odd", "ok": False, "detail": said}]
        file.write_text(json.dumps(value))
    stream = io.StringIO()
    show(summarise(read_run(path)), Console(file=stream, width=120, force_terminal=True, color_system=None))
    text = stream.getvalue()
    assert "[bold]odd[/red] [31mname" in text
    assert "\x1b[31m" not in text
    assert "\x07" not in text


def test_numbers_that_contradict_each_other_end_with_3(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.method == "ar":
            made.counters["output_tokens"] += 1

    sound, spoiled = serve(tmp_path / "sound", server_plan()), serve(tmp_path / "run", server_plan(), change=change)
    assert CliRunner().invoke(main, ["eval", "--show", str(sound)]).exit_code == 0
    for more in ([], ["--json"]):
        result = CliRunner().invoke(main, ["eval", "--show", str(spoiled), *more])
        assert result.exit_code == 3
        assert "4 checks failed: numbers of this run are not to be trusted" in result.stderr
        assert "output tokens" in result.stdout
