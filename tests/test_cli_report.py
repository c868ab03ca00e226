"""``mxq report``: what is written where, and one line for what cannot be."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from reported import full_plan, record

from mxq import cli


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["report", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = full_plan(budgets=[3], concurrencies=(1,), repeats=1)
    return record(tmp_path_factory.mktemp("runs") / "run", plan)


BEGINNINGS = {"html": "<!DOCTYPE html>", "md": "# ", "csv": "run,quantity,unit,arm"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.html", "html"), ("a.HTM", "html"), ("a.md", "md"), ("a.markdown", "md"), ("a.csv", "csv")],
)
def test_the_ending_says_what_is_written(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    result = invoke(run, "-o", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert (tmp_path / name).read_text().startswith(BEGINNINGS[kind])
    assert result.stdout == ""
    assert f"wrote {tmp_path / name}" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_without_a_file_it_goes_to_standard_output(run: Path, kind: str) -> None:
    result = invoke(run, "--format", kind)
    assert result.exit_code == 0
    assert result.stdout.startswith(BEGINNINGS[kind])
    assert "models" in result.stderr or "run" in result.stderr  # the verdict


def test_a_format_wins_over_an_ending_and_a_title_over_the_models(run: Path, tmp_path: Path) -> None:
    assert invoke(run, "-o", tmp_path / "report.txt", "--format", "md", "--title", "MXFP4 on MI355X").exit_code == 0
    assert (tmp_path / "report.txt").read_text().startswith("# MXFP4 on MI355X\n")


def test_the_verdict_as_json(run: Path, tmp_path: Path) -> None:
    result = invoke(run, "-o", tmp_path / "a.md", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["report"] == str(tmp_path / "a.md")
    ((one),) = told["verdicts"]
    assert one["run"] == str(run)
    assert one["verdict"] in ("Preserved", "Degraded", "Improved", "Undecided")


def test_margins_decide_a_verdict(tmp_path: Path) -> None:
    wide = tmp_path / "wide.yaml"
    wide.write_text("acceptance: 0.9\nsurvival: 0.9\n")
    told = [
        json.loads(invoke("example:dense", "-o", tmp_path / "a.md", "--json", *more).stdout)["verdicts"][0]["verdict"]
        for more in ((), ("--margins", wide))
    ]
    assert told == ["Degraded", "Preserved"]
    assert "Margins: 90 % of acceptance length" in (tmp_path / "a.md").read_text()


def test_a_run_named_twice_is_shown_once_and_several_in_order(run: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "other", full_plan(budgets=[3], names=["else"], concurrencies=(1,), repeats=1))
    result = invoke(run, other, run, "-o", tmp_path / "a.html", "--json")
    assert [one["run"] for one in json.loads(result.stdout)["verdicts"]] == [str(run), str(other)]
    assert invoke(run, "--format", "csv").stdout.count("\n") > 100


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "no run"),
        (("RUN", "-o", "report.pdf"), "its ending tells no format"),
        (("RUN", "-o", "."), "is a directory"),
        (("RUN", "-o", "missing/a.html"), "there is no directory missing"),
        (("RUN", "--json"), "--json without -o"),
        (("nowhere", "-o", "a.html"), "holds no run"),
        (("example:huge", "-o", "a.html"), "there is no recorded run"),
        (("RUN", "--format", "pdf"), "is not one of"),
        (("RUN", "-o", "a.html", "--margins", "none.yaml"), "margins none.yaml cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(
    run: Path, arguments: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*(run if argument == "RUN" else argument for argument in arguments))
    assert result.exit_code == 2
    assert reason in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc")
def test_a_place_that_cannot_be_written(run: Path) -> None:
    result = invoke(run, "-o", "/proc/a.md")  # not even root makes a file there
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot write /proc/a.md: No such file or directory\n  -> ")


def test_without_the_extra_it_says_what_to_install(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = invoke(run, "-o", tmp_path / "a.html")
    assert result.exit_code == 1
    assert "pip install 'mxq[report]'" in result.stderr
    assert not (tmp_path / "a.html").exists()
    assert invoke(run, "-o", tmp_path / "a.md").exit_code == 0  # Markdown and CSV need neither


def test_help_has_examples() -> None:
    result = invoke("--help")
    assert "mxq report --example -o report.html" in result.stdout
