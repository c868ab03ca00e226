"""A report says what the run says, verdict first, hides nothing, and takes nothing in a run directory for markup."""

import csv
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reported import EVIL, FEW, LAYER, Read, analysed, full_plan, record
from served import ServedCell

from mxq.errors import MxqError
from mxq.evaluate import Cell, read_run
from mxq.evaluate.kept import layers_of
from mxq.evaluate.matrix import Model
from mxq.report.page.analysed import Analysed, analyse_all
from mxq.report.page.build import build
from mxq.report.page.html import write_html
from mxq.report.page.markdown import plain, write_markdown
from mxq.report.page.tidy import COLUMNS, write_csv


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Analysed:
    """A run of both targets, MTP and DFlash, three budgets, two concurrencies, two repeats."""
    return analysed(record(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture(scope="module")
def page(full: Analysed) -> str:
    return write_html(build([full]))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Analysed:
    """A run that says ``EVIL`` wherever a run directory can say something."""

    def change(cell: Cell, made: ServedCell) -> dict[str, Any]:
        server = {
            "build": EVIL,
            "version": EVIL,
            "url": EVIL,
            "mxfp4": "native",
            "kernels": {EVIL: [EVIL]},
            "remarks": [EVIL],
            "command": [EVIL, EVIL],
            "env": {EVIL: EVIL},
        }
        return {"server": server, "lost": [EVIL], "refused": EVIL}

    plan = full_plan(names=[EVIL.replace("/", ""), "talk"], budgets=[3], concurrencies=(1,), repeats=1)
    evil = {role: Model(EVIL, model.path, {EVIL: EVIL}) for role, model in plan.targets.items()}
    settings = replace(plan.settings, template_sha256=EVIL, dtype=EVIL, device=EVIL, engine_args=(EVIL,))
    path = record(
        tmp_path_factory.mktemp("runs") / "run",
        replace(plan, targets=evil, settings=settings, warnings=(EVIL,)),
        change=change,
    )
    layers_of(path, "mxfp4").write_text(LAYER % (json.dumps(f"model.layers.0.{EVIL}")[1:-1], 0.1))
    info = json.loads((path / "run.json").read_text())
    info["command"] = ["mxq", EVIL]
    info["environment"] = {EVIL: EVIL, "versions": {EVIL: EVIL}, "hardware": {"cpu": EVIL}, "engine": [EVIL]}
    info["sources"] = {name: {EVIL: EVIL} for name in info["sources"]}
    (path / "run.json").write_text(json.dumps(info))
    return analysed(path)


def test_the_verdict_comes_first(page: str, full: Analysed) -> None:
    read = Read(page)
    assert full.comparison
    assert full.comparison.verdict
    title, model, verdict = [text for text in read.order if text][:3]
    assert "models/bf16" in title
    assert model == "models/bf16"
    assert verdict.lower() == full.comparison.verdict
    early = build([replace(full, comparison=replace(full.comparison, finished=False))]).parts[0].verdict
    assert early.text == f"So far, of a run that is not complete: {build([full]).parts[0].verdict.text}"
    assert page.index('class="verdict') < page.index("<section") < page.index("<table")


def test_the_same_run_gives_the_same_bytes(page: str, full: Analysed) -> None:
    assert write_html(build([analysed(full.run.path)])) == page


def test_acceptance_has_the_published_form(page: str, full: Analysed) -> None:
    for target in ("bf16", "mxfp4"):
        table = Read(page).table(f"Acceptance length, {target}")
        assert table.head == ["method and K", "sums", "talk"]
        assert [row[0] for row in table.rows] == ["MTP 3", "MTP 7", "MTP 15", "DFlash 3", "DFlash 7", "DFlash 15"]
        for workload in ("sums", "talk"):
            cell = full.summary.cell(target, "dflash-7", workload)
            assert cell
            assert cell.acceptance
            known = full.intervals.of(cell).pooled
            assert known
            wanted = f"{cell.acceptance.pooled:.3f} ({known.lower:.3f} to {known.upper:.3f})"
            assert table.row("DFlash 7")[workload] == wanted


def test_changes_have_interval_and_verdict(page: str, full: Analysed) -> None:
    assert full.comparison
    table = Read(page).table("Change of acceptance length")
    for row in full.comparison.rows:
        if row.quantity == "acceptance length" and row.configuration == "dflash-15":
            entry = table.row("DFlash 15")[row.workload or "all workloads"]
            ends = f"{100 * row.change.lower:+.1f} to {100 * row.change.upper:+.1f} %"
            assert entry.startswith(f"{100 * row.change.estimate:+.1f} % ({ends}")
            assert str(row.adjusted) in entry


def test_every_picture_of_the_published_text_is_there(page: str) -> None:
    """Throughput against K; speedup bars at each concurrency; bf16 against MXFP4; survival; and what was left out."""
    ids = {attributes["id"] for tag, attributes in Read(page).tags if attributes.get("id")}
    wanted = ["acceptance-k", "changes", "conversion", "latency-bf16", "latency-mxfp4"]
    wanted += [f"{what}-{at}" for what in ("speedup", "throughput", "throughput-k") for at in (1, 8)]
    methods = ("mtp-15", "dflash-15")
    wanted += [f"{what}-{name}" for what in ("survival", "survival-change", "conditional") for name in methods]
    assert {f"run1-picture-{name}" for name in wanted} <= ids


def test_every_picture_has_its_numbers_and_words(page: str, full: Analysed) -> None:
    read = Read(page)
    pictures = [attributes for tag, attributes in read.tags if tag == "svg" and attributes.get("role") == "img"]
    titles = [attributes for tag, attributes in read.tags if tag == "title" and attributes.get("id")]
    assert len(pictures) == len(titles) == sum(tag == "figure" for tag, _ in read.tags)
    ids = [attributes["id"] for _, attributes in read.tags if attributes.get("id")]
    assert len(set(ids)) == len(ids)
    for attributes in pictures:
        assert set((attributes["aria-labelledby"] or "").split()) <= set(ids)
    table = read.table("share of verify passes by drafts accepted, at least (dflash-15)")
    cell = full.summary.cell("mxfp4", "dflash-15", "talk")
    assert cell
    assert cell.acceptance
    shown = [entry.split(" ")[0] for entry in table.row("talk · mxfp4").values()][1:]
    assert shown == [f"{share:.3f}" for share in cell.acceptance.survival]


def test_where_numbers_come_from_is_all_there(page: str, full: Analysed) -> None:
    text = " ".join(Read(page).text)
    definition = full.run.info["definition"]
    for wanted in (
        "vllm 0.32.0",
        "Marlin",
        "FlashAttention",
        *(workload["sha256"] for workload in definition["workloads"]),
        definition["template_sha256"],
        *(model["spec"] for model in definition["targets"].values()),
        full.run.info["started_at"],
    ):
        assert wanted in text


def test_what_failed_is_not_hidden_and_carries_no_verdict(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> dict[str, Any]:
        if (cell.arm.label, cell.workload) == ("mxfp4 dflash-3", "talk"):
            made.counters["accepted"] += 7
            return {"lost": ["engine core died"], "refused": 3}
        return {}

    path = record(tmp_path / "run", full_plan(budgets=[3], concurrencies=(1,), repeats=1), change=change)
    one = analysed(path)
    assert one.summary.contradictions
    read = Read(write_html(build([one])))
    text = " ".join(read.text)
    for made in one.summary.failed_checks:
        assert made.check.detail in text
    assert all(warning in text for warning in one.summary.warnings)
    assert "No verdict" in read.order
    assert "engine core died" in text
    assert "3 requests were refused" in text
    changes = read.table("Change of acceptance length")
    assert not re.search("preserved|degraded|improved|undecided", str(changes.rows))
    assert "withheld" in write_csv([one])
    assert "No verdict" in write_markdown(build([one]))


def test_one_target_alone_is_shown_without_a_verdict(tmp_path: Path) -> None:
    plan = full_plan(budgets=[3], concurrencies=(1,), repeats=1)
    alone = tuple(arm for arm in plan.arms if arm.target == "bf16")
    one = analysed(record(tmp_path / "run", replace(plan, arms=alone), layers=False))
    text = write_html(build([one]))
    read = Read(text)
    assert "No verdict" in read.order
    assert "Only bf16 was measured" in " ".join(read.text)
    assert read.table("Acceptance length, bf16").rows
    assert "mxfp4" not in {attributes.get("class") for _, attributes in read.tags}
    assert "Conversion error" not in read.order


def test_emulated_mxfp4_has_no_speed_and_says_why(tmp_path: Path) -> None:
    plan = full_plan(budgets=[3], concurrencies=(1,), repeats=1)
    one = analysed(record(tmp_path / "run", plan, mxfp4="emulated"))
    read = Read(write_html(build([one])))
    assert "MXFP4 is emulated here" in " ".join(read.text)
    assert not [table.label for table in read.tables if table.label.startswith("Output tokens/s, mxfp4")]
    assert [table.label for table in read.tables if table.label.startswith("Output tokens/s, bf16")]


def test_a_page_runs_and_fetches_nothing(page: str, hostile: Analysed) -> None:
    for text in (page, write_html(build([hostile]))):
        assert harmful(text) == []


def harmful(text: str) -> list[str]:
    """What would run, or ask for something: elements, attributes, addresses in the style sheet."""
    allowed = {"html", "head", "meta", "link", "title", "style", "body", "header", "main", "article", "nav", "section"}
    allowed |= {"h1", "h2", "h3", "h4", "p", "strong", "ul", "li", "a", "div", "span", "small", "footer"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td", "details", "summary", "figure", "figcaption"}
    allowed |= {"svg", "desc", "g", "path", "use", "defs", "text", "clippath", "rect", "circle"}
    found = []
    for tag, attributes in Read(text).tags:
        if tag not in allowed:
            found.append(tag)
        for name, value in attributes.items():
            links = name in ("href", "src") and not (value or "").startswith(("#", "data:,"))
            fetches = name in ("style", "clip-path", "fill") and re.search(r"url\((?!#)", value or "")
            if name.startswith("on") or links or fetches:
                found.append(f"{tag} {name}={value}")
    style = text[text.index("<style>") : text.index("</style>")]
    return found + re.findall(r"url\(|@import|expression", style)


def test_hostile_names_are_text(hostile: Analysed) -> None:
    text = write_html(build([hostile], title=EVIL))
    read = Read(text)
    assert read.order[0] == EVIL.strip()
    everything = " ".join(read.text)
    assert everything.count(EVIL.strip()) > 20  # title, models, commands, kernels, versions, warnings, layers
    assert "49" not in [part.strip() for part in everything.split(EVIL[:5])]
    assert EVIL in (read.tables[0].head[1], EVIL)
    assert "http-equiv" in text
    assert "default-src 'none'" in text


def test_a_name_put_in_unescaped_would_be_found(hostile: Analysed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: a template without escaping."""
    import jinja2

    real = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **how: real(**{**how, "autoescape": False}))
    assert "script" in harmful(write_html(build([hostile])))


def test_markdown_takes_nothing_for_markup(hostile: Analysed) -> None:
    text = write_markdown(build([hostile], title=EVIL))
    outside = re.sub(r"\\.", "", text)  # what a backslash takes the meaning of
    assert not re.search(r"<(?!/?(?:details|summary|br)>)|\]\(|`|\$", outside)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert all(len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1 for block in blocks)
    assert min(widths) > 2
    assert plain("ask @somebody at https://evil.example or www.evil.example") != "ask @somebody at https://evil.example"
    assert not re.search(r"@\w|\w://|www\.", plain("ask @somebody at https://evil.example or www.evil.example"))


def test_markdown_has_verdict_and_tables(full: Analysed) -> None:
    text = write_markdown(build([full]))
    assert full.comparison
    assert text.index(f"**{str(full.comparison.verdict).capitalize()}.**") < text.index("| --- |")
    cell = full.summary.cell("bf16", "mtp-15", "sums")
    assert cell
    assert cell.acceptance
    assert re.search(rf"\| MTP 15 \| {cell.acceptance.pooled:.3f} \(", text)
    assert "<svg" not in text


def test_csv_has_every_number_once_and_unrounded(full: Analysed) -> None:
    lines = list(csv.DictReader(io.StringIO(write_csv([full]))))
    assert tuple(lines[0]) == COLUMNS
    places = [tuple(line[name] for name in COLUMNS[:7]) for line in lines]
    assert len(set(places)) == len(places)
    found = dict(zip(places, lines, strict=True))
    name = full.run.name
    for cell in full.summary.cells:
        if not (cell.acceptance and cell.acceptance.at_risk):
            continue
        at = (cell.arm.label, cell.workload, str(cell.concurrency))
        pooled = found[name, "acceptance length, pooled", "tokens per pass", *at, ""]
        known = full.intervals.of(cell).pooled
        assert known
        assert float(pooled["estimate"]) == cell.acceptance.pooled
        assert (float(pooled["lower"]), float(pooled["upper"])) == (known.lower, known.upper)
        assert (pooled["interval"], pooled["n"]) == ("prompts", "16")
        for i, share in enumerate(cell.acceptance.survival):
            line = found[name, "survival", "share of passes", *at, str(i + 1)]
            assert (float(line["estimate"]), line["interval"]) == (share, "band")
    assert full.comparison
    row = next(row for row in full.comparison.rows if row.quantity == "acceptance length" and row.workload == "sums")
    line = found[
        *(name, "change of acceptance length", "ratio - 1"),
        *(f"mxfp4 over bf16, {row.configuration}", "sums", str(row.concurrency), ""),
    ]
    assert (float(line["estimate"]), line["verdict"]) == (row.change.estimate, str(row.adjusted))


def test_csv_holds_no_formula(hostile: Analysed) -> None:
    one = replace(hostile, run=replace(hostile.run, name="=HYPERLINK(1)"))
    for row in csv.reader(io.StringIO(write_csv([one]))):
        assert not any(entry.startswith(("=", "+", "@")) for entry in row)


def test_several_runs_are_parts_of_one_page(full: Analysed, hostile: Analysed) -> None:
    read = Read(write_html(build([full, hostile])))
    ids = [attributes["id"] for _, attributes in read.tags if attributes.get("id")]
    assert len(set(ids)) == len(ids)
    assert {"run1", "run2", "run1-provenance", "run2-provenance"} <= set(ids)
    verdicts = [attributes["href"] for tag, attributes in read.tags if tag == "a"][:2]
    assert verdicts == ["#run1", "#run2"]  # all of them before the first part


def test_an_mxfp4_run_is_compared_with_the_bf16_run_beside_it(tmp_path: Path) -> None:
    plan = full_plan(budgets=[3], concurrencies=(1,), repeats=1)
    runs = []
    for target in ("bf16", "mxfp4"):
        arms = tuple(arm for arm in plan.arms if arm.target == target)
        targets = {target: plan.targets[target]}
        path = record(tmp_path / target, replace(plan, arms=arms, targets=targets), layers=target == "mxfp4")
        runs.append(read_run(path))
    first, second = analyse_all(runs, FEW)
    assert first.comparison is None
    assert second.comparison
    assert second.comparison.rows
    read = Read(write_html(build([first, second])))
    assert f"mxfp4 of {runs[1].name} against bf16 of {runs[0].name}" in " ".join(read.text)
    assert read.table("Change of acceptance length").rows
    (alone,) = analyse_all(runs[1:], FEW)
    assert alone.comparison is None


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_what_is_not_installed_is_named_with_its_extra(
    full: Analysed, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MxqError, match=f"{module} is not installed") as caught:
        write_html(build([full]))
    assert caught.value.hint == "pip install 'mxq[report]'"


def test_a_run_that_does_not_say_how_it_was_made(tmp_path: Path) -> None:
    path = record(tmp_path / "run", full_plan(budgets=[3], concurrencies=(1,), repeats=1))
    info = json.loads((path / "run.json").read_text())
    for spoilt in (
        {name: value for name, value in info.items() if name != "command"},
        info | {"definition": info["definition"] | {"targets": {}}},
        info | {"environment": 5},
    ):
        (path / "run.json").write_text(json.dumps(spoilt))
        assert read_run(path)
        with pytest.raises(MxqError, match=r"not as mxq wrote it|not a run's description|not describe its run"):
            build([analysed(path)])
