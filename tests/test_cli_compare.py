"""`mxq compare` as a user runs it: tables, exit codes, and what each mistake says."""

import io
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from compared import compared_run, losing
from rich.console import Console
from served import ServedCell

from mxq.analysis.alike import ALLOWABLE
from mxq.analysis.comparison import compare
from mxq.cli import main
from mxq.cli.compare import _ALLOWABLE
from mxq.evaluate import Cell
from mxq.report.comparison_tables import show


def mxq(*arguments: object, columns: int = 80) -> Result:
    line = ["compare", *map(str, arguments)]
    return CliRunner().invoke(main, line, prog_name="mxq", env={"COLUMNS": str(columns)})


@pytest.fixture(scope="module")
def degraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "degraded"
    change = losing(0.5, workload="talk")
    return compared_run(path, change, names=("sums", "talk"), concurrencies=(1, 4), repeats=3, budgets=(3, 7)).path


def test_the_verdict_comes_first_and_what_was_done_last(degraded: Path) -> None:
    result = mxq(degraded)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "Verdict: DEGRADED, mxfp4 against bf16"
    text = " ".join(result.stdout.split())
    for words in (
        "acceptance length: degraded (6 rows: ",
        "Acceptance length, pooled: tokens committed per verify pass, bonus included (margin 3 %)",
        "Survival: share of passes",
        "Output tokens per second",
        "bootstrap over prompts (2000 draws of whole conversations, seed 0), both sides of a prompt drawn together",
        "Holm's procedure upholds that among all rows of the quantity (6 of acceptance length, 6 of survival, 18 of ",
    ):
        assert words in text
    assert result.stderr == ""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names and numbers as long as they are in practice, and most of it undecided."""
    path = tmp_path_factory.mktemp("runs") / "wide"
    names = ("arithmetic", "humaneval")
    return compared_run(
        path, losing(0.25), names=names, concurrencies=(1, 8), repeats=2, prompts=100, budgets=(15,)
    ).path


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal_and_hide_nothing(degraded: Path, wide: Path, columns: int) -> None:
    for run in (degraded, wide):
        for more in ([], ["--sweep"], ["--published"]):
            lines = mxq(run, *more, columns=columns).stdout.splitlines()
            assert max(map(len, lines)) <= columns
            assert not [line for line in lines if "…" in line]
    text = mxq(wide, columns=columns).stdout
    titles = [line for line in text.splitlines() if line.startswith("workload")]
    assert ["prompts" in title for title in titles] == [columns == 120] * 4
    assert [" i " in title for title in titles] == [False, True, False, False]
    assert all(line.count("arithmetic") <= 1 for line in text.splitlines())
    assert "dflash-15" in text


def test_a_long_name_is_folded_and_not_cut(tmp_path: Path) -> None:
    path = compared_run(tmp_path / "run", names=("prompts-of-our-customers-2026-11",)).path
    flat = "".join(mxq(path).stdout.split())
    assert "…" not in flat
    assert all(part in flat for part in ("prompts-of", "2026-11"))


@pytest.mark.parametrize(
    ("fail_on", "code"), [([], 0), (["degraded"], 3), (["undecided"], 0), (["undecided", "degraded"], 3)]
)
def test_fail_on(degraded: Path, fail_on: list[str], code: int) -> None:
    options = [word for verdict in fail_on for word in ("--fail-on", verdict)]
    # Margins of which nothing is undecided.
    decided = ["--workload", "talk", "--margin-survival", 0.3, "--margin-throughput", 0.5]
    for more in ([], ["--json"]):
        result = mxq(degraded, *decided, *options, *more)
        assert result.exit_code == code, result.output
        if code:
            (line,) = result.stderr.splitlines()
            assert "acceptance length of dflash-3 on talk (-" in line
            assert "survival" not in line
        assert result.stdout
    assert "on sums" not in mxq(degraded, "--fail-on", "degraded").stderr


def test_undecided_rows_and_cells_without_any_fail_a_gate_for_them(tmp_path: Path) -> None:
    few = compared_run(tmp_path / "few", prompts=8).path
    assert mxq(few).exit_code == mxq(few, "--fail-on", "degraded").exit_code == 0
    assert "acceptance length of dflash-3 on sums" in mxq(few, "--fail-on", "undecided").stderr
    once = compared_run(tmp_path / "once", concurrencies=(1, 4), repeats=1).path
    result = mxq(once, "--fail-on", "undecided")
    assert result.exit_code == 3
    assert "tokens per second of ar on sums, 4 in flight (one repeat" in result.stderr
    text = " ".join(result.stdout.split())
    assert "Without a verdict: one repeat: no interval with several in flight; measure with --repeats 3 or more" in text
    assert re.search(r"sums ar 4 tokens per second ([\d.]+) \1 ", text)
    text = " ".join(mxq(once, "--sweep").stdout.split())
    assert "over ar in one repeat: no interval supports this" in text
    assert "what changed from one start to the next is in no interval" in text
    assert "from one start" not in mxq(few, "--sweep").stdout


def test_a_verdict_on_an_unfinished_run_is_one_so_far(tmp_path: Path) -> None:
    path = compared_run(tmp_path / "run", names=("sums", "talk")).path
    assert "\nVerdict: PRESERVED" in f"\n{mxq(path).stdout}"
    for cell in (path / "cells").glob("*-talk-*"):
        shutil.rmtree(cell)
    result = mxq(path, "--fail-on", "undecided")
    assert "\nVerdict so far: PRESERVED" in f"\n{result.stdout}"
    assert result.exit_code == 3
    assert "undecided: cells that are not finished yet" in result.stderr
    assert json.loads(mxq(path, "--json").stdout)["finished"] is False


def test_nothing_to_judge_fails(tmp_path: Path) -> None:
    result = mxq(compared_run(tmp_path / "run", prompts=1).path)
    assert result.exit_code == 1
    assert "Verdict: NONE" in result.stdout
    assert "error: nothing can be judged: one prompt tells nothing about others" in result.stderr


def test_contradictions_withhold_the_verdict(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> Mapping[str, Any] | None:
        losing(0.5)(cell, made)
        made.counters["requests"] += cell.arm.label == "bf16 ar"
        return None

    path = compared_run(tmp_path / "run", change, repeats=1).path
    for more in ([], ["--json"], ["--fail-on", "degraded"]):
        result = mxq(path, *more)
        assert result.exit_code == 3
        assert "1 checks of" in result.stderr
        assert "no verdict is given" in result.stderr
        assert "degraded:" not in result.output
    text = mxq(path).stdout
    assert text.index("WARNING: check failed: requests") < text.index("NO VERDICT") < text.index("Verdict: NONE")
    assert "withheld" in text
    assert "undecided  " not in text


def test_what_was_allowed_is_said_above_the_verdict(tmp_path: Path) -> None:
    paths = [compared_run(tmp_path / name).path for name in ("one", "two")]
    info = json.loads((paths[1] / "run.json").read_text())
    info["environment"]["versions"] = {"torch": "9.9"}
    (paths[1] / "run.json").write_text(json.dumps(info))
    refused = mxq(*paths)
    assert refused.exit_code == 2
    first, second = refused.stderr.splitlines()
    assert first == "error: not alike: versions: torch None in the base, torch 9.9 in the new"
    assert second == "  -> measure both alike, or say that it is meant: --allow versions"
    text = mxq(*paths, "--allow", "versions").stdout
    assert text.index("ALLOWED TO DIFFER: versions: torch None") < text.index("Verdict: PRESERVED")
    assert "(base: bf16 of " in text


def test_damage_is_said_above_every_table(tmp_path: Path) -> None:
    path = compared_run(tmp_path / "run", losing(0.1), budgets=(3, 7)).path
    records = next(path.glob("cells/bf16-dflash-3-*/records.jsonl"))
    records.write_bytes(records.read_bytes().replace(b'"accepted":[', b'"accepted":[9,', 1))
    shown = CliRunner().invoke(main, ["eval", "--show", str(path)]).stdout
    for text in (mxq(path).stdout, mxq(path, "--sweep").stdout, mxq(path, "--published").stdout, shown):
        flat = "".join(text.split())
        assert flat.startswith("".join(f"WARNING: {records}, line 1: not a possible record".split()))
    assert "Not all prompts: sums with 23 of 24." in mxq(path).stdout


def test_margins_come_from_options_a_file_and_defaults(degraded: Path, tmp_path: Path) -> None:
    file = tmp_path / "margins.yaml"
    file.write_text("acceptance: 0.05\nsurvival: 0.1\n")
    told = json.loads(mxq(degraded, "--margins", file, "--margin-survival", 0.2, "--json").stdout)
    assert told["margins"] == {"acceptance": 0.05, "survival": 0.2, "throughput": 0.02}
    assert {row["margin"] for row in told["rows"]} == {0.05, 0.2, 0.02}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("acceptance: 3 %", "acceptance is '3 %'"),
        ("acceptance: 3", "acceptance is 3"),
        ("survival: true", "survival is True"),
        ("survival: .nan", "survival is nan"),
        ("acceptence: 0.1", "unknown key 'acceptence'"),
        ("- 0.1", "is not a table of keys"),
        ("a: [", "is not valid YAML"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_holds_no_margins(degraded: Path, tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "margins.yaml"
    if content is not None:
        file.write_text(content)
    result = mxq(degraded, "--margins", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: margins {file}")
    assert message in result.stderr.splitlines()[0]
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{run}", "{run}"], "3 runs"),
        (["{run}", "{run}", "--sweep"], "2 runs"),
        (["{run}", "--sweep", "--fail-on", "degraded"], "--fail-on needs a comparison"),
        (["{run}", "--resamples", "10"], "--resamples 10"),
        (["{run}", "--resamples", "100000000000"], "intervals need 200 to 100000 resamples"),
        (["{run}", "--confidence", "95"], "--confidence 95"),
        (["{run}", "--margin-acceptance", "3"], "the margin of acceptance is 3.0"),
        (["{run}", "--workload", "gsm8k"], "has no workload gsm8k"),
        (["{run}", "--sweep", "--workload", "gsm8k"], "has no workload gsm8k"),
        (["{run}", "--new", "bf16"], "is on both sides"),
        (["{run}", "--allow", "thinking"], "'thinking' is not one of"),
        (["{run}-not-there"], "holds no run"),
        ([], "Missing argument"),
    ],
)
def test_mistakes(degraded: Path, arguments: list[str], message: str) -> None:
    result = mxq(*(word.format(run=degraded) for word in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr.splitlines()[0]
    assert len(result.stderr.splitlines()) <= 2
    assert result.stdout == ""


def test_a_sweep_says_what_to_take(degraded: Path) -> None:
    text = " ".join(mxq(degraded, "--sweep", columns=120).stdout.split())
    assert re.match(
        r"bf16, 1 in flight: take dflash-7: \d\.\d\dx plain decoding \(\d\.\d\d to \d\.\d\d\); "
        r"\+\d+\.\d% \(\+\d+\.\d% to \+\d+\.\d%\) over dflash-3 ",
        text,
    )
    assert "mxfp4, 4 in flight: take dflash-7: " in text
    told = json.loads(mxq(degraded, "--sweep", "--json").stdout)
    assert {one["recommended"] for one in told["sweep"]["choices"]} == {"dflash-7"}


def test_a_sweep_of_numbers_that_contradict_each_other_ends_with_3(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        made.counters["requests"] += 1

    path = compared_run(tmp_path / "run", change, repeats=1).path
    for more in (["--sweep"], ["--published", "--json"]):
        result = mxq(path, *more)
        assert result.exit_code == 3
        assert "4 checks failed: numbers of this run are not to be trusted" in result.stderr
        assert "check failed: requests" in " ".join(result.stdout.split())


def test_emulated_speed_is_not_recommended_by(tmp_path: Path) -> None:
    text = " ".join(mxq(compared_run(tmp_path / "run", mxfp4="emulated").path, "--sweep").stdout.split())
    assert "mxfp4: MXFP4 is emulated here" in text
    assert "mxfp4, 1 in flight" not in text


def test_published_numbers_beside_a_run(tmp_path: Path) -> None:
    path = compared_run(tmp_path / "run", names=("gsm8k",), budgets=(3, 15)).path
    assert "Nothing was published of this model" in mxq(path, "--published").stdout
    info = json.loads((path / "run.json").read_text())
    info["architecture"] = {"hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320}
    (path / "run.json").write_text(json.dumps(info))
    result = mxq(path, "--published")
    text = " ".join(result.stdout.split())
    assert "beside the published Qwen3.5-27B (by the dimensions in its config.json)" in text
    assert text.count("not published") == 1  # dflash-3 of mxfp4
    assert "3.690" in text
    assert "8.495" in text
    assert "thinking is off in the run" in text
    assert max(map(len, result.stdout.splitlines())) <= 80
    rows = json.loads(mxq(path, "--published", "--json").stdout)["published"]["rows"]
    assert [row["published"] for row in rows] == [3.69, 8.495, None, 8.445]


def test_what_a_run_calls_things_is_shown_as_it_is(tmp_path: Path) -> None:
    """No markup of a terminal's library, no control sequences."""
    run = compared_run(tmp_path / "run", losing(0.1))
    said = "[bold]odd[/red] \x1b[31mname\x07"
    odd = replace(run, info=run.info | {"warnings": [said]}, name=said)
    stream = io.StringIO()
    show(compare(odd, compared_run(tmp_path / "other")), Console(file=stream, width=80, color_system=None))
    show(compare(odd), Console(file=stream, width=80, color_system=None))
    assert "[bold]odd[/red] [31mname" in stream.getvalue()
    assert "\x1b[31m" not in stream.getvalue()


def test_names_of_what_may_differ_are_those_of_the_analysis() -> None:
    assert _ALLOWABLE == ALLOWABLE
