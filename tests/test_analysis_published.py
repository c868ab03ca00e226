"""A run beside the published numbers: what matches, what does not, and what was never published."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared import compared_run
from served import server_plan

from mxq.analysis.published import FILE, Beside, beside
from mxq.evaluate import Run
from mxq.stats import Resampling
from mxq.workloads import PUBLISHED

ARCHITECTURES = Path(__file__).parent / "data" / "architectures"
RESAMPLING = Resampling(resamples=500)


def architecture(name: str) -> dict[str, Any]:
    """What run.json keeps of a real model."""
    config = json.loads((ARCHITECTURES / f"{name}.json").read_text())
    return {key: value for key, value in config["text_config"].items() if isinstance(value, int | str)}


def recorded(path: Path, **info: Any) -> Run:
    """A run of two published workloads and one other."""
    run = compared_run(
        path, plan=server_plan(concurrencies=(1,), prompts=12, budgets=(3, 15), names=("gsm8k", "mt-bench", "mine"))
    )
    sources = {name: PUBLISHED[name].facts() for name in ("gsm8k", "mt-bench")}
    return replace(run, info=run.info | {"sources": sources} | info)


def test_the_published_file_is_that_of_the_source() -> None:
    tables = json.loads(FILE.read_text())
    assert "ROCm/rocm-blogs@35926334" in tables["source"]
    assert tables["acceptance_bf16"]["Qwen3.5-27B"]["dflash"]["15"] == [8.495, 10.377, 8.829, 6.994, 5.242]
    assert tables["acceptance_mxfp4_dflash15"]["Qwen3.5-35B-A3B"] == [7.177, 9.395, 7.690, 5.972, 4.509]


def number(found: Beside, workload: str, configuration: str, target: str) -> float | None:
    (only,) = (
        row.published
        for row in found.rows
        if (row.workload, row.configuration, row.target) == (workload, configuration, target)
    )
    return only


def test_cells_are_found_by_the_dimensions_of_the_model(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    dense = beside(replace(run, info=run.info | {"architecture": architecture("Qwen3.5-27B")}), RESAMPLING)
    moe = beside(replace(run, info=run.info | {"architecture": architecture("Qwen3.5-35B-A3B")}), RESAMPLING)
    assert (dense.model, moe.model) == ("Qwen3.5-27B", "Qwen3.5-35B-A3B")
    assert number(dense, "gsm8k", "dflash-15", "bf16") == 8.495
    assert number(dense, "gsm8k", "dflash-3", "bf16") == 3.690
    assert number(dense, "mt-bench", "dflash-15", "mxfp4") == 5.094
    assert number(moe, "mt-bench", "dflash-15", "mxfp4") == 4.509
    # Never invented: other budgets of MXFP4, and a workload of one's own.
    assert number(dense, "gsm8k", "dflash-3", "mxfp4") is None
    assert number(dense, "mine", "dflash-15", "bf16") is None
    for name in ("Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B"):
        other = beside(replace(run, info=run.info | {"architecture": architecture(name)}), RESAMPLING)
        assert (other.model, other.rows) == (None, ())
        assert "published are Qwen3.5-27B, Qwen3.5-35B-A3B" in other.matched


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        ("Qwen/Qwen3.5-27B", "Qwen3.5-27B"),
        ("Qwen/Qwen3.5-27B@main", "Qwen3.5-27B"),
        ("./Qwen3.5-35B-A3B-MXFP4", "Qwen3.5-35B-A3B"),
        ("testbed:dense", None),
        ("Qwen/Qwen3.5-2B", None),
    ],
)
def test_a_run_without_dimensions_is_known_by_name_and_that_is_said(
    tmp_path: Path, spec: str, model: str | None
) -> None:
    run = recorded(tmp_path / "run")
    targets = {role: {"spec": spec, "fingerprint": {}} for role in ("bf16", "mxfp4")}
    told = run.info | {"architecture": {}, "definition": run.info["definition"] | {"targets": targets}}
    found = beside(replace(run, info=told), RESAMPLING)
    assert found.model == model
    assert ("by its name alone" in found.matched) == (model is not None)


def test_inside_is_what_the_interval_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path / "run", architecture=architecture("Qwen3.5-27B"))
    row = next(r for r in beside(run, RESAMPLING).rows if (r.workload, r.configuration) == ("gsm8k", "dflash-3"))
    assert row.run.lower < row.run.estimate < row.run.upper
    assert (row.published, row.inside) == (3.690, False)
    assert row.difference == pytest.approx(row.run.estimate - 3.690)
    tables = json.loads(FILE.read_text())
    tables["acceptance_bf16"]["Qwen3.5-27B"]["dflash"]["3"][0] = (row.run.estimate + row.run.upper) / 2
    other = tmp_path / "published.json"
    other.write_text(json.dumps(tables))
    monkeypatch.setattr("mxq.analysis.published.FILE", other)
    row = next(r for r in beside(run, RESAMPLING).rows if (r.workload, r.configuration) == ("gsm8k", "dflash-3"))
    assert row.inside is True


def test_what_was_done_otherwise_is_told(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", architecture=architecture("Qwen3.5-27B"))
    said = " | ".join(beside(run, RESAMPLING).unlike)
    for words in (
        "thinking is off in the run; the publication does not say",
        "at most 40 tokens in the run, 4096 as published",
        "gsm8k has 12 requests in the run, 128 as published",
        "vllm 0.22.1rc1.dev43+g8c3cc98cf on 1x AMD Instinct MI355X (gfx950), TP=1 as published",
    ):
        assert words in said
    assert "temperature" not in said
    mine = beside(replace(run, info=run.info | {"sources": {"gsm8k": {"file": "gsm8k.jsonl"}}}), RESAMPLING)
    assert "gsm8k is not known to be openai/gsm8k" in " | ".join(mine.unlike)
    json.dumps(mine.as_json(), allow_nan=False)
