"""What a comparison says, and what it refuses to say."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import compared_run, losing
from scripted import ScriptedEngine, decode, small_plan
from served import TOKENS, ServedCell, server_plan

from mxq.analysis.changes import COUNTERS, NO_DRAFT, NO_PARTNER, NO_REPEAT, ONE_PROMPT, ONE_REPEAT
from mxq.analysis.comparison import Comparison, compare
from mxq.analysis.rows import Row, telling, together
from mxq.analysis.sweep import sweep
from mxq.errors import MxqError, UsageError
from mxq.evaluate import Cell, RecordedCell, Run, read_run
from mxq.evaluate import run as measure
from mxq.evaluate.matrix import TokenizedWorkload
from mxq.stats import Band, Counts, Margins, Resampling, Verdict, count
from mxq.stats.bootstrap import LINEAR, Replicates
from mxq.workloads import Prompt, Workload


def row(found: Comparison, quantity: str, configuration: str = "dflash-3", **place: Any) -> Row:
    place = {"workload": "sums", "concurrency": 1} | place
    (only,) = (
        r
        for r in found.rows
        if (r.quantity, r.configuration) == (quantity, configuration)
        and all(getattr(r, name) == value for name, value in place.items())
    )
    return only


def pooled(run: Run, target: str, workload: str = "sums") -> float:
    """The oracle: straight from the records."""
    cell = next(c for c in run.cells if (c.arm.target, c.arm.method, c.workload) == (target, "dflash", workload))
    accepted = [n for record in cell.records for n in record.accepted or ()]
    return 1 + sum(accepted) / len(accepted)


def test_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", losing(0.1, faster=1.25), repeats=1)
    found = compare(run)
    length, survival = row(found, "acceptance length"), row(found, "survival")
    assert (length.base.estimate, length.new.estimate) == pytest.approx((pooled(run, "bf16"), pooled(run, "mxfp4")))
    assert length.change.estimate == pytest.approx(pooled(run, "mxfp4") / pooled(run, "bf16") - 1)
    assert length.change.lower < length.change.estimate < length.change.upper < 0
    assert (length.prompts, length.repeats, length.margin) == (24, 1, 0.03)
    # The tightness is that of pairing: each side by itself is known ten times less well.
    width = length.change.upper - length.change.lower
    assert width < (length.base.upper - length.base.lower) / length.base.estimate / 3
    assert survival.bands
    base, new, difference = survival.bands
    assert 1 + sum(base.estimate) == pytest.approx(length.base.estimate)
    assert 1 + sum(new.estimate) == pytest.approx(length.new.estimate)
    assert survival.position is not None
    assert survival.change.estimate == min(difference.estimate)
    assert survival.base.estimate == base.estimate[survival.position]
    speed = row(found, "tokens per second", "ar")
    cells = {c.arm.target: c for c in run.cells if c.arm.method == "ar"}
    rates = {
        target: sum(r.output_tokens for r in cell.records) / sum(r.duration_s for r in cell.records)
        for target, cell in cells.items()
    }
    assert speed.change.estimate == pytest.approx(rates["mxfp4"] / rates["bf16"] - 1)
    assert (found.base_label, found.new_label) == ("bf16", "mxfp4")


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.0, Verdict.PRESERVED), (0.5, Verdict.DEGRADED), (0.1, Verdict.UNDECIDED)]
)
def test_verdicts_follow_from_what_was_lost(tmp_path: Path, share: float, verdict: Verdict) -> None:
    found = compare(compared_run(tmp_path / "run", losing(share)))
    assert row(found, "acceptance length").adjusted == verdict
    assert found.by_quantity["acceptance length"] == verdict
    assert found.verdict == together([r.adjusted for r in found.rows])
    assert (row(found, "acceptance length").decides is not None) == (verdict == Verdict.UNDECIDED)


def test_a_faster_target_is_improved_and_margins_decide(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", losing(0.0, faster=1.1))
    found = compare(run)
    assert found.by_quantity == {
        "acceptance length": "preserved",
        "survival": "preserved",
        "tokens per second": "improved",
    }
    assert found.verdict == Verdict.IMPROVED
    wide = compare(run, margins=Margins(throughput=0.2))
    assert wide.by_quantity["tokens per second"] == wide.verdict == Verdict.PRESERVED


def band(*ends: tuple[float, float, float]) -> Band:
    lower, estimate, upper = zip(*ends, strict=True)
    nothing, no_draws = np.zeros(len(ends)), np.zeros((0, len(ends)))
    return Band(estimate, lower, upper, 20, Replicates(20, LINEAR, nothing, nothing, no_draws, no_draws))


@pytest.mark.parametrize(
    ("found", "position"),
    [
        (band((-0.01, 0.0, 0.01), (-0.02, -0.01, 0.0), (-0.015, 0.0, 0.015)), 1),  # preserved: the largest drop
        (band((-0.2, -0.06, 0.08), (-0.06, -0.05, -0.04), (-0.1, -0.01, 0.1)), 1),  # degraded, by the narrower band
        (band((-0.01, 0.2, 0.41), (0.05, 0.1, 0.15), (0.04, 0.11, 0.18)), 1),  # improved
        (band((-0.03, 0.1, 0.2), (0.05, 0.1, 0.15), (-0.06, 0.0, 0.06)), 2),  # undecided
    ],
)
def test_the_position_shown_is_the_one_that_the_verdict_rests_on(found: Band, position: int) -> None:
    assert telling(found, 0.02) == position


def test_together() -> None:
    preserved, degraded, improved, undecided = Verdict
    assert together([]) is None
    assert together([preserved, preserved]) == preserved
    assert together([preserved, improved]) == improved
    assert together([improved, undecided, preserved]) == undecided
    assert together([undecided, degraded, preserved]) == degraded


def test_all_workloads_weigh_alike(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", losing(0.3, workload="talk"), names=("sums", "talk"))
    found = compare(run)
    parts = [row(found, "acceptance length", workload=name) for name in ("sums", "talk")]
    whole = row(found, "acceptance length", workload=None)
    mean = math.exp(sum(math.log1p(part.change.estimate) for part in parts) / 2) - 1
    assert whole.change.estimate == pytest.approx(mean)
    assert whole.new.estimate / whole.base.estimate - 1 == pytest.approx(mean)
    assert parts[0].change.upper - parts[0].change.lower < whole.change.upper - whole.change.lower
    assert whole.prompts == 48
    curves = [row(found, "survival", workload=name) for name in ("sums", "talk", None)]
    for side in range(3):
        parts_at, (all_at,) = (
            [curve.bands[side].estimate for curve in some if curve.bands] for some in (curves[:2], curves[2:])
        )
        assert all_at == pytest.approx([(a + b) / 2 for a, b in zip(*parts_at, strict=True)])
    assert found.by_configuration["dflash-3"] == Verdict.DEGRADED
    only = compare(run, workloads=["sums"])
    assert {r.workload for r in only.rows} == {"sums"}
    assert only.verdict == Verdict.PRESERVED


def test_side_by_side_speed_is_over_repeats(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", losing(0.0, faster=1.1), concurrencies=(1, 4), repeats=3)
    found = compare(run)
    several = row(found, "tokens per second", concurrency=4)
    assert (several.repeats, several.adjusted, several.decides) == (3, Verdict.IMPROVED, None)
    once = compare(compared_run(tmp_path / "once", losing(0.0, faster=1.1), concurrencies=(1, 4), repeats=1))
    assert {r.concurrency for r in once.rows} == {1}
    missing = [m for m in once.missing if m.why == ONE_REPEAT]
    assert {(m.configuration, m.concurrency) for m in missing} == {("ar", 4), ("dflash-3", 4)}
    assert all(m.new and m.base and m.new > 1.05 * m.base for m in missing)


@pytest.mark.parametrize(("said", "words"), [("emulated", "MXFP4 is emulated"), (None, "no log names the kernels")])
def test_speed_that_is_not_that_of_mxfp4_gives_no_rows(tmp_path: Path, said: str | None, words: str) -> None:
    found = compare(compared_run(tmp_path / "run", mxfp4=said, concurrencies=(1, 4)))
    assert {r.quantity for r in found.rows} == {"acceptance length", "survival"}
    assert len([note for note in found.notes if words in note]) == 1
    assert "tokens per second" not in json.dumps([m.as_json() for m in found.missing])


def test_sums_alone_give_no_interval(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> dict[str, Any] | None:
        if cell.arm.method == "ar":
            return None
        made.records = [replace(record, accepted=None, drafted=None) for record in made.records]
        return {"passes_from": "counters"}

    found = compare(compared_run(tmp_path / "run", change))
    assert {r.quantity for r in found.rows} == {"tokens per second"}
    (missing,) = found.missing
    assert (missing.why, missing.configuration, missing.base) == (COUNTERS, "dflash-3", missing.new)
    # Speed that is preserved says nothing of acceptance, which is not known.
    assert found.by_quantity == {"tokens per second": Verdict.PRESERVED, "acceptance length": Verdict.UNDECIDED}
    assert found.verdict == found.by_configuration["dflash-3"] == Verdict.UNDECIDED
    assert missing.base == pytest.approx(pooled(compared_run(tmp_path / "known"), "bf16"))


def test_one_prompt_tells_nothing_and_few_decide_nothing(tmp_path: Path) -> None:
    one = compare(compared_run(tmp_path / "one", prompts=1))
    assert one.rows == ()
    assert one.verdict is None
    assert {m.why for m in one.missing} == {ONE_PROMPT}
    few = compare(compared_run(tmp_path / "few", prompts=11))
    assert few.verdict == Verdict.UNDECIDED
    assert any("fewer than 12 prompts" in note for note in few.notes)
    assert not any("fewer than" in note for note in compare(compared_run(tmp_path / "enough", prompts=12)).notes)


def test_a_drafter_that_does_nothing_is_compared_too(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.label == "mxfp4 dflash-3":
            idle = ServedCell(made.k, made.concurrency)
            for record in made.records:
                idle.answer(record.prompt_id, [0] * (record.output_tokens - 1), tokens=list(record.token_ids))
            made.records, made.counters, made.now = idle.records, idle.counters, idle.now

    found = compare(compared_run(tmp_path / "run", change, names=("sums", "talk")))
    assert row(found, "acceptance length").adjusted == row(found, "survival").adjusted == Verdict.DEGRADED
    assert row(found, "survival", workload=None).new.estimate == 0
    assert any("exactly 1.000 for mxfp4 dflash-3" in warning for warning in found.warnings)
    assert found.withheld is None
    json.dumps(found.as_json(), allow_nan=False)


def test_a_drafter_that_does_nothing_on_either_side_preserves_nothing(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if made.k:
            idle = ServedCell(made.k, made.concurrency)
            for record in made.records:
                idle.answer(record.prompt_id, [0] * (TOKENS - 1), tokens=list(record.token_ids))
            made.records, made.counters, made.now = idle.records, idle.counters, idle.now

    found = compare(compared_run(tmp_path / "run", change))
    assert {(one.quantity, one.why) for one in found.missing} == {("acceptance length", NO_DRAFT)}
    assert found.by_quantity["acceptance length"] == found.verdict == Verdict.UNDECIDED
    assert {r.quantity for r in found.rows} == {"tokens per second"}


def test_no_spread_at_all_is_said(tmp_path: Path) -> None:
    """Both targets answered alike: the interval has no width, which is no promise."""
    found = compare(compared_run(tmp_path / "run"))
    length = row(found, "acceptance length")
    assert (length.change.lower, length.change.upper) == (0, 0)
    assert any("Without any spread: acceptance length of dflash-3 on sums" in note for note in found.notes)


def test_answers_that_repeat_themselves_are_no_quiet_improvement(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.target != "mxfp4":
            return
        looping = ServedCell(made.k, made.concurrency)
        for record in made.records:
            tokens = list(record.token_ids) * 3
            passes = [made.k] * math.ceil(len(tokens) / (made.k + 1)) if made.k else []
            looping.answer(record.prompt_id, passes, tokens=tokens)
        made.records, made.counters, made.now = looping.records, looping.counters, looping.now

    found = compare(compared_run(tmp_path / "run", change))
    assert row(found, "acceptance length").adjusted == Verdict.IMPROVED
    (said,) = (note for note in found.notes if "differ in length" in note)
    mean = TOKENS, 3 * TOKENS
    assert said.startswith(f"Answers to sums differ in length: {mean[0]} tokens on average in bf16 (100% cut at the ")
    assert f"{mean[1]} in mxfp4 (100%)" in said
    alike = compare(compared_run(tmp_path / "alike", losing(0.5)))
    assert not any("differ in length" in note for note in alike.notes)


def test_cells_without_a_partner_are_listed(tmp_path: Path) -> None:
    plan = server_plan(concurrencies=(1,), prompts=24, names=("sums", "talk"), budgets=(3, 7))
    run = compared_run(tmp_path / "run", plan=plan)
    for cell in (run.path / "cells").glob("mxfp4-dflash-7-talk-*"):
        shutil.rmtree(cell)
    found = compare(read_run(run.path))
    (missing,) = found.missing
    assert (missing.configuration, missing.workload) == ("dflash-7", "talk")
    assert missing.why == f"{NO_PARTNER}: in the base only"
    assert any("Not complete" in note for note in found.notes)
    assert not found.finished
    assert found.failing([Verdict.UNDECIDED])[-1] == "cells that are not finished yet"
    assert not found.failing([Verdict.DEGRADED])
    assert row(found, "acceptance length", "dflash-7").workload == "sums"


def test_numbers_that_contradict_each_other_get_no_verdict(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.label == "mxfp4 dflash-3":
            made.counters["drafts"] += 1

    found = compare(compared_run(tmp_path / "run", change))
    assert found.verdict is None
    assert found.by_configuration == found.by_quantity == {}
    assert found.withheld is not None
    assert "checks of" in found.withheld
    assert any("verify passes" in warning for warning in found.warnings)
    told = found.as_json()
    assert told["verdict"] is None
    assert {r["adjusted"] for r in told["rows"]} == {None}
    assert found.rows


def test_damaged_lines_are_said_and_cut_from_both_sides(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", losing(0.1), concurrencies=(1, 4), repeats=2)
    records = next(run.path.glob("cells/mxfp4-dflash-3-sums-c1-r0-*/records.jsonl"))
    lines = records.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"accepted":[', b'"accepted":[9,', 1)
    lines[4] = lines[4].replace(b'"duration_s":', b'"duration_s":-', 1)
    records.write_bytes(b"".join(lines))
    found = compare(read_run(run.path))
    assert found.prompts == {"sums": (22, 24)}
    assert {r.prompts for r in found.rows} == {22}
    named = [warning for warning in found.warnings if "not a possible record" in warning]
    assert [f"{records}, line {number}" in warning for number, warning in zip((4, 5), named, strict=True)] == [
        True,
        True,
    ]
    assert {m.why for m in found.missing} == {"records are damaged, and the wall clock is that of all requests"}
    assert found.withheld is None


def altered(run: Run, change: Callable[[dict[str, Any]], None]) -> Run:
    """Read a run again whose run.json, and the cells with it, say something else."""
    info = json.loads(json.dumps(run.info))
    change(info)
    return replace(run, info=info)


def test_two_runs_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    one, two = compared_run(tmp_path / "one", losing(0.1)), compared_run(tmp_path / "two", losing(0.1))
    alone, both = compare(one), compare(one, two)
    assert both.rows == alone.rows
    assert (both.base_label, both.new_label) == (f"bf16 of {one.path}", f"mxfp4 of {two.path}")
    assert any("measured at two times" in note for note in both.notes)
    same = compare(one, two, new_target="bf16")
    assert row(same, "acceptance length").change.estimate == 0
    # What one of them lost is cut from the other.
    records = next(two.path.glob("cells/mxfp4-ar-sums-*/records.jsonl"))
    records.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[:20]))
    cut = compare(one, read_run(two.path))
    assert cut.prompts == {"sums": (20, 24)}
    assert {r.prompts for r in cut.rows} == {20}


def test_prompts_are_paired_by_their_id_and_not_by_their_place(tmp_path: Path) -> None:
    one, two = compared_run(tmp_path / "one", losing(0.2)), compared_run(tmp_path / "two", losing(0.2))
    for records in two.path.glob("cells/mxfp4-*/records.jsonl"):
        records.write_bytes(b"".join(reversed(records.read_bytes().splitlines(keepends=True))))
    assert compare(read_run(two.path)).rows == compare(one).rows


def test_turns_of_a_conversation_are_one_prompt(tmp_path: Path) -> None:
    def talk(number: int) -> tuple[Prompt, ...]:
        messages = (("user", f"{number}, 1?"), ("user", "2?"))
        return Prompt(f"t{number}", messages[:1]), Prompt(f"t{number}, turn 2", messages, turn=2)

    prompts = tuple(prompt for number in range(13) for prompt in talk(number))
    workload = TokenizedWorkload(
        Workload("talks", prompts, "sha"), tuple((1, 2) if p.turn == 1 else None for p in prompts)
    )
    plan = replace(small_plan(budgets=[3]), workloads=(workload,))
    measure(plan, tmp_path / "run", ScriptedEngine(), decode, lambda messages: list(str(messages).encode()))
    found = compare(read_run(tmp_path / "run"))
    assert {r.prompts for r in found.rows} == {13}
    assert any("talks has conversations (13)" in note for note in found.notes)
    # A first turn that is lost does not make its second one part of the conversation before.
    records = next((tmp_path / "run").glob("cells/bf16-dflash-*/records.jsonl"))
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[3:]]))
    left = compare(read_run(tmp_path / "run"))
    assert {r.prompts for r in left.rows} == {13}
    assert left.prompts == {"talks": (25, 26)}


def test_one_workload_under_two_names_is_said(tmp_path: Path) -> None:
    plan = server_plan(concurrencies=(1,), prompts=24, names=("sums", "talk"))
    copy = replace(plan, workloads=tuple(replace(w, token_ids=plan.workloads[0].token_ids) for w in plan.workloads))
    for number, (made, said) in enumerate(((plan, False), (copy, True))):
        found = compare(compared_run(tmp_path / str(number), losing(0.2), plan=made))
        assert any(note.startswith("sums and talk are the same prompts") for note in found.notes) == said


@pytest.mark.parametrize("different", [24, 13, 1])
def test_prompts_that_say_the_same_are_one(tmp_path: Path, different: int) -> None:
    """Twelve copies of a prompt agree with each other, which would otherwise be called preserved."""
    path = compared_run(tmp_path / "run", losing(0.02)).path
    kept = path / "workloads" / "sums.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    told = [line | {"messages": lines[place % different]["messages"]} for place, line in enumerate(lines)]
    kept.write_text("".join(f"{json.dumps(line)}\n" for line in told))
    found = compare(read_run(path))
    said = [note for note in found.notes if note.startswith("sums says the same thing more than once")]
    if different == 1:
        assert {one.why for one in found.missing if one.quantity == "acceptance length"} == {ONE_PROMPT}
        assert not found.rows
    else:
        assert {r.prompts for r in found.rows} == {different}
    assert [note.split(": ")[1].split(".")[0] for note in said] == (
        [] if different == 24 else [f"24 prompts, of which {different} differ"]
    )
    # Who has lost the workload takes the other's word for it, and with no word every prompt is its own.
    other = shutil.copytree(path, tmp_path / "other")
    (other / "workloads" / "sums.jsonl").write_text("no JSON\n")
    assert compare(read_run(path), read_run(other)).rows == found.rows
    assert {r.prompts for r in compare(read_run(other)).rows} == {24}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("thinking", True, "thinking: off in the base, on in the new"),
        ("max_tokens", 99, "token limit: 40 in the base, 99 in the new"),
        ("template_sha256", "other", "template: template in the base, other in the new"),
        ("eos_token_ids", [0, 5], "end of text: 0 in the base, 0 5 in the new"),
        ("semantics", 2, "semantics: 1 in the base, 2 in the new"),
        (
            "sampling",
            {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "seed": 0},
            "sampling: temperature 0.0, top-p 1.0, top-k 0, seed 0 in the base, temperature 0.7, ",
        ),
    ],
)
def test_what_changes_the_question_is_never_allowed(tmp_path: Path, name: str, value: Any, words: str) -> None:
    one, two = compared_run(tmp_path / "one"), compared_run(tmp_path / "two")
    other = altered(two, lambda info: info["definition"].update({name: value}))
    with pytest.raises(UsageError) as caught:
        compare(one, other, allowed=["engine", "hardware", "versions", "options", "drafter", "arithmetic"])
    assert caught.value.message.startswith("not alike: ")
    assert words in caught.value.message
    assert caught.value.exit_code == 2
    assert "--allow" not in (caught.value.hint or "")


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    one, fewer = compared_run(tmp_path / "one"), compared_run(tmp_path / "fewer", prompts=20)
    with pytest.raises(UsageError, match=r"prompts: sums 24 .* in the base, sums 20 .* in the new"):
        compare(one, fewer)
    tokens = altered(fewer, lambda info: info["definition"]["workloads"][0].update(prompts=24))
    with pytest.raises(UsageError, match=r"token ids: sums \w+ in the base, sums \w+ in the new"):
        compare(one, tokens)
    other = altered(
        compared_run(tmp_path / "other"), lambda info: info["definition"]["workloads"][0].update(sha256="x")
    )
    with pytest.raises(UsageError, match=r"prompts: sums 24 \(sha of sums\) in the base, sums 24 \(x\) in the new"):
        compare(one, other)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("engine", {"engine": "in-process"}, "engine: vllm in the base, in-process in the new"),
        ("hardware", {"device": "cuda:0"}, "hardware: cpu in the base, cuda:0 in the new"),
        ("arithmetic", {"dtype": "float32"}, "arithmetic: bfloat16 in the base, float32 in the new"),
        ("options", {"engine_args": ["x=1"]}, "options: none in the base, x=1 in the new"),
        (
            "drafter",
            {"drafter": {"spec": "mine", "fingerprint": {"config_sha256": "another"}}},
            "drafter: models/drafter (",
        ),
    ],
)
def test_what_may_be_wanted_is_allowed_by_name_and_said(
    tmp_path: Path, name: str, change: dict[str, Any], words: str
) -> None:
    one = compared_run(tmp_path / "one")
    other = altered(compared_run(tmp_path / "two"), lambda info: info["definition"].update(change))
    with pytest.raises(UsageError) as caught:
        compare(one, other, new_target="bf16")
    assert words in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(f"--allow {name}")
    with pytest.raises(UsageError):
        compare(one, other, new_target="bf16", allowed=["versions"])
    found = compare(one, other, new_target="bf16", allowed=[name])
    assert [unlike.name for unlike in found.unlike] == [name]
    speeds = any(r.quantity == "tokens per second" for r in found.rows)
    assert speeds == (name in ("options", "drafter"))
    assert any("are not compared" in note for note in found.notes) != speeds


def test_a_model_that_lies_elsewhere_is_the_same_and_another_one_is_not(tmp_path: Path) -> None:
    one, two = compared_run(tmp_path / "one"), compared_run(tmp_path / "two")

    def moved(info: dict[str, Any]) -> None:
        info["definition"]["drafter"]["spec"] = info["definition"]["targets"]["bf16"]["spec"] = "elsewhere"

    assert compare(one, altered(two, moved)).unlike == ()

    def other(info: dict[str, Any]) -> None:
        info["definition"]["targets"]["bf16"]["fingerprint"] = {"config_sha256": "another"}

    with pytest.raises(UsageError, match=r"bf16 target: models/bf16 \("):
        compare(one, altered(two, other))
    # Two quantizations are what is compared.
    assert compare(one, altered(two, other), base_target="mxfp4").unlike == ()
    shapes = [
        altered(run, lambda info, size=size: info.update(architecture={"hidden_size": size}))  # type: ignore[misc]
        for run, size in ((one, 64), (two, 128))
    ]
    with pytest.raises(UsageError, match="model: hidden-size 64 in the base, hidden-size 128 in the new"):
        compare(*shapes)


def test_versions_that_are_mixed_are_refused_within_a_run_and_between_two(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> dict[str, Any]:
        version = "0.25.1" if cell.arm.label == "mxfp4 ar" else "0.32.0"
        return {"server": {"build": "vllm", "version": version, "mxfp4": "native"}}

    mixed = compared_run(tmp_path / "mixed", change)
    with pytest.raises(UsageError) as caught:
        compare(mixed)
    assert "vllm 0.32.0 (bf16 ar, bf16 dflash-3, mxfp4 dflash-3)" in caught.value.message
    assert "vllm 0.25.1 (mxfp4 ar)" in caught.value.message
    assert compare(mixed, allowed=["versions"]).unlike[0].name == "versions"
    one, two = compared_run(tmp_path / "one"), compared_run(tmp_path / "two")
    newer = altered(two, lambda info: info["environment"].update(versions={"torch": "9.9", "numpy": "7"}))
    with pytest.raises(UsageError, match=r"versions: torch None in the base, torch 9\.9 in the new"):
        compare(one, newer)
    harmless = altered(two, lambda info: info["environment"].update(versions={"numpy": "7"}))
    assert compare(one, harmless).unlike == ()


def test_pairing_is_what_makes_intervals_narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: prompts of one target are given each other's names, and the gain of pairing is gone."""
    run = compared_run(tmp_path / "run", losing(0.1))
    sound = row(compare(run), "acceptance length").change

    def shifted(cell: RecordedCell) -> Counts | None:
        step = 1 if cell.arm.target == "mxfp4" else 0
        names = [record.prompt_id for record in (*cell.records[step:], *cell.records[:step])]
        return count([record.passes for record in cell.records if record.passes], names, 3)

    monkeypatch.setattr("mxq.analysis.evidence.counts", shifted)
    wrong = row(compare(run), "acceptance length").change
    assert wrong.estimate == sound.estimate
    assert wrong.upper - wrong.lower > 3 * (sound.upper - sound.lower)


def test_sides_without_a_common_repeat_have_no_speed(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", concurrencies=(1, 4), repeats=2, names=("sums", "talk"))
    for gone in ("bf16-ar-sums-c1-r0", "mxfp4-ar-sums-c1-r1", "bf16-dflash-3-sums-c4-r0", "mxfp4-dflash-3-sums-c4-r1"):
        next(run.path.glob(f"cells/{gone}-*/records.jsonl")).unlink()
    next(run.path.glob("cells/mxfp4-ar-talk-c4-r1-*/records.jsonl")).unlink()
    found = compare(read_run(run.path))
    missing = {(m.configuration, m.workload, m.concurrency, m.why) for m in found.missing}
    assert missing == {
        ("ar", "sums", 1, NO_REPEAT),
        ("dflash-3", "sums", 4, NO_REPEAT),
        ("ar", "talk", 4, ONE_REPEAT),
    }
    assert len([warning for warning in found.warnings if "is missing: the cell is left out" in warning]) == 5
    sweep(read_run(run.path), Resampling(resamples=200))


def test_what_the_intervals_of_speed_do_not_have_is_said(tmp_path: Path) -> None:
    def said(*runs: Run) -> str:
        return " ".join(compare(*runs).notes)

    once, twice = (compared_run(tmp_path / str(n), losing(0.0, faster=1.25), repeats=n) for n in (1, 2))
    assert "from one start to the next is in no interval of tokens per second, and nothing is decided" in said(once)
    assert "from one start to the next" not in said(twice)
    assert "measured at two times" in said(once, compared_run(tmp_path / "again"))
    quick = row(compare(twice), "tokens per second")
    assert (quick.verdict, quick.adjusted) == (Verdict.IMPROVED, Verdict.IMPROVED)
    unsure = row(compare(once), "tokens per second")
    assert unsure.change.lower > 0.2
    assert (unsure.verdict, unsure.adjusted, unsure.decides) == (Verdict.UNDECIDED, Verdict.UNDECIDED, None)
    assert row(compare(once), "acceptance length").adjusted == Verdict.PRESERVED


def test_what_cannot_be_paired_says_what_is_there(tmp_path: Path) -> None:
    plan = server_plan(concurrencies=(1,), prompts=12)
    alone = replace(
        plan,
        targets={"bf16": plan.targets["bf16"]},
        arms=tuple(arm for arm in plan.arms if arm.target == "bf16"),
    )
    run, other = (
        compared_run(tmp_path / "alone", plan=alone),
        compared_run(tmp_path / "other", prompts=12, budgets=(7,)),
    )
    with pytest.raises(UsageError, match="has no arm of mxfp4, only of bf16"):
        compare(run)
    with pytest.raises(UsageError, match=r"bf16 of .* is on both sides"):
        compare(run, new_target="bf16")
    with pytest.raises(UsageError, match=r"bf16 of .* is on both sides"):
        compare(run, read_run(run.path), new_target="bf16")
    with pytest.raises(UsageError, match=r"has ar \(sums\), dflash-3 \(sums\) of bf16; .* has ar .*, dflash-7"):
        compare(run, other)
    with pytest.raises(UsageError, match="has no workload talk"):
        compare(other, workloads=["talk"])


def test_a_run_json_that_describes_nothing_is_an_error_in_a_line(tmp_path: Path) -> None:
    one, two = compared_run(tmp_path / "one"), compared_run(tmp_path / "two")
    for change in ({"sampling": 3}, {"drafter": {"spec": "x"}}, {"engine_args": 5}):
        with pytest.raises(MxqError, match=r"does not (describe its run|hold what is noted)") as caught:
            compare(one, altered(two, lambda info, change=change: info["definition"].update(change)))  # type: ignore[misc]
        assert "\n" not in caught.value.message


def test_json_has_everything_unrounded(tmp_path: Path) -> None:
    found = compare(compared_run(tmp_path / "run", losing(0.1)), resampling=Resampling(resamples=500, seed=3))
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    length = row(found, "acceptance length")
    mine = next(r for r in told["rows"] if r["quantity"] == "acceptance length")
    assert mine["change"]["estimate"] == length.change.estimate
    assert mine["change"]["lower"] == length.change.lower
    assert told["resampling"] == {"resamples": 500, "seed": 3, "confidence": 0.95}
    assert told["margins"] == {"acceptance": 0.03, "survival": 0.02, "throughput": 0.02}
    survival = next(r for r in told["rows"] if r["quantity"] == "survival")
    assert [len(survival["bands"][name]["lower"]) for name in ("base", "new", "difference")] == [3, 3, 3]
