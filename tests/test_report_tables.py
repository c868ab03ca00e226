"""The tables as they are read: at 80 and 120 columns, with one target or two, whole or not."""

import io
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from scripted import ScriptedEngine, decode, small_plan
from served import ServedCell, serve, server_plan

from mxq.analysis import summarise
from mxq.engines import EngineArm
from mxq.errors import InterruptedRunError
from mxq.evaluate import Cell, Plan, read_run, run
from mxq.report.tables import show
from mxq.report.whole import print_whole


def printed(path: Path, width: int) -> str:
    stream = io.StringIO()
    show(summarise(read_run(path)), Console(file=stream, width=width))
    return stream.getvalue()


def counts(arm: EngineArm, rng: random.Random) -> tuple[int, ...]:
    k = arm.num_speculative_tokens
    return (k, 1, 2 if arm.target.name == "bf16" else 1) if k else ()


def measure(path: Path, plan: Plan) -> Path:
    run(plan, path, ScriptedEngine(counts=counts), decode)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = small_plan(budgets=[3, 15], names=["arithmetic", "chat"])
    return measure(tmp_path_factory.mktemp("runs") / "run", plan)


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_or_wider_than_the_terminal(path: Path, width: int) -> None:
    text = printed(path, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [20, 40, 60])
def test_no_number_is_cut_however_narrow_a_terminal_is(path: Path, width: int) -> None:
    words = printed(path, width).split()
    assert not [word for word in words if "…" in word]
    assert {word for word in printed(path, 80).split() if word[0] in "+-." and word[-1].isdigit()} <= set(words)


def test_intervals_are_whole_where_a_column_may_not_be_wrapped() -> None:
    table, stream = Table(box=None, padding=(0, 1, 0, 0)), io.StringIO()
    table.add_column("a long name")
    table.add_column("change", justify="right", no_wrap=True)
    table.add_row("arithmetic", "-0.59 to -0.30")
    print_whole(Console(file=stream, width=10), table)
    assert "-0.59 to -0.30" in stream.getvalue()
    assert "arithmetic" in stream.getvalue().replace("\n", "").replace(" ", "").replace("-0.59to-0.30", "")


@pytest.mark.parametrize("width", [80, 120])
def test_acceptance_lengths_and_their_difference(path: Path, width: int) -> None:
    text = printed(path, width)
    assert re.search(r"arithmetic dflash-3 +3\.000 2\.667 +-0\.333 \(-11\.1%\)", text)
    assert re.search(r"dflash-15 +7\.000 6\.667 +-0\.333 \(-4\.8%\)", text)
    assert ("per-request mean (sd), mxfp4" in text) == (width == 120)


def test_survival_by_position(path: Path) -> None:
    narrow, wide = printed(path, 80), printed(path, 120)
    header = next(line for line in wide.splitlines() if "1..15" in line)
    assert re.findall(r" (\d+)(?= )", header) == [str(i) for i in range(1, 16)]
    (bf16,) = re.findall(r"arithmetic bf16 +(█\S+) +([\d. ]+)", wide)
    assert bf16[0] == "█▆" + "▃" * 13
    assert bf16[1].split() == ["1.0", ".67", *[".33"] * 13]
    (mxfp4,) = re.findall(r"arithmetic bf16.*\n +mxfp4 +█▃\S+ +([\d. ]+)(\S+) +(\S+)", wide)
    assert mxfp4[0].split() == ["1.0", *[".33"] * 14]
    assert mxfp4[1:] == ("-0.022", "-0.333")
    assert "Survival, dflash-15" in narrow
    assert "Survival, dflash-3" not in narrow
    shown = re.findall(r" (\d+)(?= )", next(line for line in narrow.splitlines() if "1..15" in line))
    assert shown[0] == "1"
    assert shown[-1] == "15"


def test_conditional_acceptance_and_its_risk_set(path: Path) -> None:
    wide = printed(path, 120)
    # Passes of 15, 1 and 2 drafts accepted, for each of three prompts.
    (bf16,) = re.findall(
        r"arithmetic bf16 +([\d. ]+)\n +([\d ]+)\n", wide[wide.index("Conditional acceptance, dflash-15") :]
    )
    assert bf16[0].split() == ["1.0", ".67", ".50", *["1.0"] * 12]
    assert bf16[1].split() == ["9", "9", "6", *["3"] * 12]
    assert "Conditional" not in printed(path, 80)


def test_a_terminal_without_bars_gets_tenths(path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(summarise(read_run(path)), Console(file=stream, width=80))
    stream.seek(0)
    assert re.search("arithmetic bf16 +96" + "3" * 13 + " ", stream.read())


def test_speed_and_notes(path: Path) -> None:
    text = printed(path, 80)
    assert re.search(r"dflash-15 +250\.0 +250\.0 +2\.50x +2\.50x +2\.50x", text)
    assert re.search(r"arithmetic ar +100\.0 +100\.0 +1\.00x +1\.00x +1\.00x", text)
    assert re.search(r"dflash-3 +0/6 +10, 10, 10, \.\.\. +0/6 +9, 9, 9, \.\.\.", text)
    flat = " ".join(text.split())
    assert "36 of 36 answers were cut at 64 tokens" in flat
    assert "point estimates without intervals" in flat
    assert "Not complete" not in flat
    assert "24 greedy answers differ from plain decoding: bfloat16, and rounding" in flat


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(("repeats", "said"), [(1, "native"), (3, "native"), (2, "emulated"), (1, None)])
def test_several_concurrencies_and_repeats(tmp_path: Path, width: int, repeats: int, said: str | None) -> None:
    plan = server_plan(
        concurrencies=(1, 2, 4, 8, 16, 32), repeats=repeats, prompts=2, names=["arithmetic"], budgets=[3, 15]
    )
    text = printed(serve(tmp_path / "run", plan, mxfp4=said), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "(with 1 in flight)" in text
    flat = " ".join(text.split())
    assert ("and their range" in flat) == (repeats > 1)
    assert ("prefill included, mxfp4, by requests" in flat) == (said == "native")
    assert ("prefill included, mxfp4: " in flat) == (said != "native")
    assert ("Speedup of mxfp4 over plain decoding of bf16" in flat) == (said == "native")
    assert ("emulated here" in flat) == (said == "emulated")
    assert ("No log names the kernels" in flat) == (said is None)
    assert re.search(r"mxfp4 ar, .*server +vllm 0\.32\.0", text)
    assert "Checks: " in flat
    assert " 0 failed" in flat


def test_speeds_and_their_ranges(tmp_path: Path) -> None:
    text = printed(serve(tmp_path / "run", server_plan(repeats=3)), 80)
    # 12 x 40 tokens: 0.41 s each, and 2 % more with each repeat; four side by side take 1.75 times that.
    assert re.search(r"sums +ar +95\.4 +1\.00x +218\.3 +1\.00x *\n +93\.6-97\.3 +1\.00-1\.00 +214\.1-222\.7", text)
    assert re.search(r"sums +ar +20\.4 +20\.8 +10\.2 +10\.4 +10\.2 +10\.4 +98\.0", text)


def test_failed_checks_and_lost_servers_are_loud(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> dict[str, list[str]] | None:
        if (cell.arm.label, cell.concurrency) == ("mxfp4 dflash-3", 4):
            made.counters["draft_tokens"] -= 3
            return {"lost": ["it ran out of memory"]}
        return None

    text = printed(serve(tmp_path / "run", server_plan(), change=change), 80)
    flat = " ".join(text.split())
    assert flat.startswith("WARNING: check failed: drafts. mxfp4 dflash-3 on sums, concurrency 4: server ")
    assert re.search(r"Checks: \d+ passed, 1 failed, 0 could not be made", flat)
    assert re.search(r"drafts +1 +- mxfp4 dflash-3 on sums", text)
    assert "measured from the start: 1, first: it ran out of memory" in flat
    emulated = printed(serve(tmp_path / "emulated", server_plan(), change=change, mxfp4="emulated"), 80)
    assert " ".join(emulated.split()).startswith("WARNING: check failed: drafts.")


def test_acceptance_from_counters_is_labelled(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.method != "ar":
            made.records = [replace(record, accepted=None, drafted=None) for record in made.records]

    text = printed(serve(tmp_path / "run", server_plan(), change=change), 120)
    flat = " ".join(text.split())
    assert "Servers were lost" not in flat
    assert "Acceptance is from the server's counters" in flat
    assert "the passes of single answers are not known" in flat
    assert re.search(r"sums +dflash-3 +(\d\.\d{3}) +\1 +\+0\.000 \(\+0\.0%\) +- +-", text)


def test_in_float32_a_difference_is_a_defect(tmp_path: Path) -> None:
    plan = small_plan()
    path = measure(tmp_path / "run", replace(plan, settings=replace(plan.settings, dtype="float32")))
    assert "12 answers of the bf16 target differ in float32: that is a defect" in " ".join(printed(path, 80).split())


def test_one_target_has_no_differences(tmp_path: Path) -> None:
    plan = small_plan()
    bf16 = replace(
        plan,
        targets={"bf16": plan.targets["bf16"]},
        arms=tuple(arm for arm in plan.arms if arm.target == "bf16"),
    )
    text = printed(measure(tmp_path / "run", bf16), 80)
    assert not re.search("method-K.*difference", text)
    assert "mxfp4" not in text
    assert "gap" not in text


def test_plain_decoding_alone(tmp_path: Path) -> None:
    plan = small_plan()
    plain = replace(plan, drafter=None, arms=tuple(arm for arm in plan.arms if arm.method == "ar"))
    text = printed(measure(tmp_path / "run", plain), 80)
    assert "Acceptance" not in text
    assert "Survival" not in text
    assert "tokens per second" in text


def test_an_unfinished_run_is_labelled(tmp_path: Path) -> None:
    def before(call: int) -> None:
        if call == 20:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        run(small_plan(), tmp_path / "run", ScriptedEngine(before=before), decode)
    text = printed(tmp_path / "run", 80)
    assert "Not complete: sums with 2 of 3 prompts so far." in text
    assert "Not complete: talk with 0 of 3 prompts so far." in text
    assert "Not complete: 0 of 12 cells so far." in text


def test_a_run_of_servers_lacks_whole_cells(tmp_path: Path) -> None:
    path = serve(tmp_path / "run", server_plan())
    assert "Not complete" not in printed(path, 80)
    shutil.rmtree(next((path / "cells").glob("mxfp4-dflash-*-c4-*")))
    assert "Not complete: 7 of 8 cells so far." in printed(path, 80)
    assert "Nothing yet" not in printed(path, 80)


def test_what_is_not_measured_yet_has_no_rows(tmp_path: Path) -> None:
    path = serve(tmp_path / "run", server_plan())
    for cell in (path / "cells").glob("*-dflash-*"):
        shutil.rmtree(cell)
    text = printed(path, 80)
    assert "Nothing yet of bf16 dflash-3, mxfp4 dflash-3." in " ".join(text.split())
    assert "Acceptance" not in text
    assert "tokens per second" in text.lower()
    for cell in (path / "cells").glob("mxfp4-*"):
        shutil.rmtree(cell)
    assert not re.search("^.*mxfp4", printed(path, 80).split("Not complete")[0], re.MULTILINE)
