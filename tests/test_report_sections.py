"""Sections that some runs have: why acceptance changed, what to deploy, the published numbers."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from explained import explanation, losing
from judged import recorded
from reported import EVIL, FEW, Read, analysed, full_plan, record
from served import ServedCell
from test_report_page import harmful

from mxq.evaluate import Cell
from mxq.evaluate.matrix import Model, Plan
from mxq.explain import why
from mxq.quality import judge
from mxq.report.page.analysed import Analysed
from mxq.report.page.build import build
from mxq.report.page.html import write_html
from mxq.report.page.markdown import write_markdown
from mxq.report.page.tidy import write_csv


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Analysed:
    plan = full_plan(budgets=[3, 7], prompts=14, repeats=1)
    return analysed(record(tmp_path_factory.mktemp("runs") / "run", plan, layers=False))


def test_why_it_changed_has_both_routes_with_intervals(one: Analysed) -> None:
    seen = [explanation(losing(2, 0)), explanation(losing(2, 0), workload="talk")]
    seen.append(explanation(losing(0, 3), method="mtp"))
    explained = replace(one, why=why(seen, FEW))
    text = write_html(build([explained]))
    read = Read(text)
    assert "Why it changed" in read.order
    table = read.table("Change of acceptance length, in tokens per pass")
    part = explained.why.parts[0]
    row = table.row("sums · DFlash 7")
    effect = part.effects.features
    assert row["by features"] == f"{effect.estimate:+.2f} ({effect.lower:+.2f} to {effect.upper:+.2f})"
    assert row["route of the loss"] == "features"
    assert {row[0] for row in table.rows} >= {"all workloads · DFlash 7", "sums · MTP 7"}
    ids = {attributes["id"] for _, attributes in read.tags if attributes.get("id")}
    wanted = {"why-dflash-7", "why-positions-dflash-7", "why-mtp-7", "why-positions-mtp-7"}
    assert {f"run1-picture-{name}" for name in wanted} <= ids
    at = explained.why.parts[0].features.at(0)
    shown = read.table("change of survival by drafts accepted, at least (dflash-7)").row("sums · by features")
    assert shown["1"] == f"{at.estimate:+.3f} ({at.lower:+.3f} to {at.upper:+.3f})"
    assert "Why it changed" in write_markdown(build([explained]))
    lines = list(csv.DictReader(io.StringIO(write_csv([explained]))))
    (line,) = [
        line
        for line in lines
        if line["quantity"].endswith("by features")
        and (line["arm"], line["workload"]) == ("mxfp4 for bf16, dflash-7", "sums")
    ]
    assert [float(line[name]) for name in ("estimate", "lower", "upper")] == [
        effect.estimate,
        effect.lower,
        effect.upper,
    ]


def test_a_run_that_was_not_explained_has_no_such_section(one: Analysed) -> None:
    assert "Why it changed" not in Read(write_html(build([one]))).order


def test_how_good_it_is_has_every_number_with_its_interval(one: Analysed) -> None:
    quality = judge([recorded(), recorded(name="talk"), recorded(name="wikitext-2", window=2048)], FEW)
    measured = replace(one, quality=quality)
    read = Read(write_html(build([measured])))
    assert "How good it is" in read.order
    means = quality.parts[0].means
    own = read.table("Quality on the bf16 target's own greedy answers")
    row = own.row("sums")
    assert row["ratio"] == f"{means.ratio.estimate:.4f} ({means.ratio.lower:.4f} to {means.ratio.upper:.4f})"
    assert row["KL(bf16 to mxfp4), nats"].startswith(f"{means.divergence.estimate:.4f} (")
    assert row["same choice"].startswith(f"{means.agreement.estimate:.2%} (")
    assert {row[0] for row in own.rows} == {"sums", "talk", "all workloads"}
    assert read.table("Quality on texts that were given").row("wikitext-2")["tokens"] == str(quality.parts[2].tokens)
    assert "run1-picture-quality" in {attributes.get("id") for _, attributes in read.tags}
    assert "of the text that the bf16 target wrote itself" in write_markdown(build([measured]))
    lines = {
        (line["quantity"], line["workload"]): line
        for line in csv.DictReader(io.StringIO(write_csv([measured])))
        if line["arm"] == "mxfp4 for bf16"
    }
    assert quality.overall is not None
    for name, found in (("sums", means), ("", quality.overall)):
        line = lines["perplexity of mxfp4 over that of bf16 on own answers", name]
        assert [float(line[name]) for name in ("estimate", "lower", "upper")] == [
            found.ratio.estimate,
            found.ratio.lower,
            found.ratio.upper,
        ]
    assert ("perplexity of bf16 on a text in windows of 2048 tokens", "wikitext-2") in lines
    assert "How good it is" not in Read(write_html(build([one]))).order


def test_names_in_an_explanation_are_text(one: Analysed) -> None:
    quality = judge([recorded(name=EVIL), recorded(name=EVIL, window=64)], FEW)
    explained = replace(one, why=why([explanation(losing(1, 1), workload=EVIL)], FEW), quality=quality)
    text = write_html(build([explained]))
    assert harmful(text) == []
    assert EVIL.strip() in " ".join(Read(text).text)


def test_what_to_deploy_is_what_the_sweep_recommends(one: Analysed) -> None:
    assert one.choices
    read = Read(write_html(build([one])))
    text = " ".join(read.text)
    for choice in one.choices.choices:
        if choice.workload is None:
            assert f"{choice.target}, {choice.concurrency} in flight: take {choice.recommended}" in text
    table = read.table("Fastest by output tokens/s: mxfp4, one request at a time")
    (choice,) = [
        choice
        for choice in one.choices.choices
        if (choice.target, choice.concurrency, choice.workload) == ("mxfp4", 1, "talk")
    ]
    advantage = choice.over_plain
    assert advantage
    wanted = f"{100 * advantage.estimate:+.1f} % ({100 * advantage.lower:+.1f} to {100 * advantage.upper:+.1f} %)"
    assert table.row("talk")["over plain"] == wanted


def published(plan: Plan) -> Plan:
    """A plan whose model has the name and the dimensions of a published one."""
    targets = {role: Model(f"Qwen/Qwen3.5-27B-{role}", m.path, m.fingerprint) for role, m in plan.targets.items()}
    shape = {"hidden_size": 5120, "num_hidden_layers": 64, "num_experts": None, "vocab_size": 248320}
    return replace(plan, targets=targets, architecture=shape)


def test_published_numbers_stand_beside_the_runs_and_gaps_stay_gaps(tmp_path: Path) -> None:
    plan = published(full_plan(names=["gsm8k", "talk"], budgets=[15], prompts=12, concurrencies=(1,), repeats=1))
    read = Read(write_html(build([analysed(record(tmp_path / "run", plan, layers=False))])))
    bf16, mxfp4 = (read.table(f"Acceptance length, {target}: the run's") for target in ("bf16", "mxfp4"))
    assert "published 8.495, outside" in bf16.row("DFlash 15")["gsm8k"]
    assert "published 8.445, outside" in mxfp4.row("DFlash 15")["gsm8k"]
    assert "not published" in mxfp4.row("MTP 15")["gsm8k"]
    assert all("not published" in row[2] for row in bf16.rows)
    assert "DFlash on MI355X" in " ".join(read.text)


def test_servers_that_say_nothing_of_single_answers_give_lengths_without_intervals(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.method != "ar":
            made.records = [replace(record, accepted=None, drafted=None) for record in made.records]

    plan = full_plan(budgets=[3], prompts=12, concurrencies=(1,), repeats=1)
    one = analysed(record(tmp_path / "run", plan, layers=False, change=change))
    read = Read(write_html(build([one])))
    cell = one.summary.cell("bf16", "dflash-3", "sums")
    assert cell
    assert cell.acceptance
    assert read.table("Acceptance length, bf16").row("DFlash 3")["sums"] == f"{cell.acceptance.pooled:.3f}"
    assert "Acceptance is from the server's counters" in " ".join(read.text)
    assert "Conditional acceptance" not in read.order
    assert not [table for table in read.tables if table.label.startswith("Per-request mean")]
    assert "no interval" in " ".join(read.text)


def test_a_model_that_was_not_published_has_no_such_section(one: Analysed) -> None:
    assert "Beside the published numbers" not in Read(write_html(build([one]))).order
