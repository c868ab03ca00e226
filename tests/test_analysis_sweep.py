"""Which configuration is the fastest, and how sure that is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from compared import compared_run
from served import ServedCell, server_plan

from mxq.analysis.sweep import Choice, Sweep, sweep
from mxq.errors import UsageError
from mxq.evaluate import Cell, Run
from mxq.stats import Resampling

RESAMPLING = Resampling(resamples=500)


def at_speed(**rates: float) -> Any:
    """Let each configuration's answers come at so many tokens per second, one in ten at half of it."""

    def change(cell: Cell, made: ServedCell) -> None:
        rate = rates[cell.arm.configuration.replace("-", "_")]
        made.prefill_s = 0.001
        again = ServedCell(made.k, made.concurrency, prefill_s=0.001)
        for number, record in enumerate(made.records):
            tokens = len(record.token_ids)
            steps = len(record.accepted or ()) if made.k else tokens - 1
            again.per_pass_s = tokens / rate / steps * (2 if number % 10 == 0 else 1)
            again.answer(record.prompt_id, list(record.accepted or ()), tokens=list(record.token_ids))
        made.records, made.counters, made.now = again.records, again.counters, again.now

    return change


def swept(path: Path, change: Any, **options: Any) -> tuple[Run, Sweep]:
    run = compared_run(path, change, **({"budgets": (3, 7)} | options))
    return run, sweep(run, RESAMPLING)


def choice(found: Sweep, target: str = "bf16", workload: str | None = "sums", concurrency: int = 1) -> Choice:
    (only,) = (c for c in found.choices if (c.target, c.workload, c.concurrency) == (target, workload, concurrency))
    return only


def test_the_fastest_with_the_interval_of_its_advantage(tmp_path: Path) -> None:
    _, found = swept(tmp_path / "run", at_speed(ar=100, dflash_3=150, dflash_7=200))
    one = choice(found)
    assert (one.fastest, one.runner_up, one.recommended, one.ties) == (
        "dflash-7",
        "dflash-3",
        "dflash-7",
        ("dflash-7",),
    )
    assert one.over_plain
    assert one.over_runner_up
    assert one.over_plain.estimate == pytest.approx(1.0, abs=0.05)
    assert one.over_runner_up.lower > 0.2
    assert one.recommended_over_plain == one.over_plain
    assert {c.target for c in found.choices} == {"bf16", "mxfp4"}


def test_of_ties_the_smallest_budget_is_taken(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        # Budget 7 wins or loses by prompt, and by a hair on the whole.
        at_speed(ar=100, dflash_3=180, dflash_7=182)(cell, made)
        if cell.arm.configuration == "dflash-7":
            again = ServedCell(7, made.concurrency, prefill_s=0.001)
            for number, record in enumerate(made.records):
                again.per_pass_s = record.duration_s / len(record.accepted or ()) * (1.3 if number % 2 else 0.7)
                again.answer(record.prompt_id, list(record.accepted or ()), tokens=list(record.token_ids))
            made.records, made.counters, made.now = again.records, again.counters, again.now

    one = choice(swept(tmp_path / "run", change)[1])
    assert set(one.ties) == {"dflash-3", "dflash-7"}
    assert one.recommended == "dflash-3"
    assert one.recommended_over_plain
    assert one.recommended_over_plain.estimate == pytest.approx(0.8, abs=0.1)


def test_plain_decoding_can_win(tmp_path: Path) -> None:
    one = choice(swept(tmp_path / "run", at_speed(ar=300, dflash_3=150, dflash_7=200))[1])
    assert (one.fastest, one.recommended, one.runner_up) == ("ar", "ar", "dflash-7")
    assert (one.over_plain, one.recommended_over_plain) == (None, None)


def test_all_workloads_weigh_alike(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        fast, slow = (300, 150) if cell.workload == "sums" else (150, 200)
        at_speed(ar=100, dflash_3=fast, dflash_7=slow)(cell, made)

    _, found = swept(tmp_path / "run", change, names=("sums", "talk"))
    assert choice(found, workload="sums").fastest == "dflash-3"
    assert choice(found, workload="talk").fastest == "dflash-7"
    both = choice(found, workload=None)
    assert both.fastest == both.recommended == "dflash-3"
    assert both.over_runner_up
    assert both.over_runner_up.estimate == pytest.approx(math.sqrt(2 * 0.75) - 1, abs=0.03)


def test_side_by_side_needs_repeats(tmp_path: Path) -> None:
    rates = at_speed(ar=100, dflash_3=150, dflash_7=200)
    once = choice(swept(tmp_path / "once", rates, concurrencies=(4,), repeats=1)[1], concurrency=4)
    assert once.over_runner_up
    assert not once.over_runner_up.bounded
    assert (once.recommended, once.ties) == ("dflash-7", ("dflash-7",))
    assert once.as_json()["over_runner_up"]["lower"] is None
    thrice = choice(swept(tmp_path / "thrice", rates, concurrencies=(4,), repeats=3)[1], concurrency=4)
    assert thrice.over_runner_up
    assert thrice.over_runner_up.bounded


def test_emulated_mxfp4_has_no_speed(tmp_path: Path) -> None:
    _, found = swept(tmp_path / "run", at_speed(ar=100, dflash_3=150, dflash_7=200), mxfp4="emulated")
    assert {c.target for c in found.choices} == {"bf16"}
    assert found.withheld == {"mxfp4": "emulated"}
    json.dumps(found.as_json(), allow_nan=False)


def test_one_arm_alone_is_nothing_to_choose_from(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", plan=server_plan(concurrencies=(1,), prompts=12, budgets=()))
    with pytest.raises(UsageError, match="nothing to choose from"):
        sweep(run, RESAMPLING)
