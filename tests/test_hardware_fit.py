"""tools/fit_hardware.py: committed constants are what the committed cells give, and predict those held out."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import fit_hardware
import pytest
from fit_hardware import Fitted, fit, one_of_three, opened, predicted

from mxq.analysis.published import FILE
from mxq.errors import UsageError
from mxq.hardware import machine, measured
from mxq.hardware.measured import Cell

ROOT = Path(__file__).parent.parent
PUBLISHED: dict[str, Any] = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def machines() -> dict[str, Fitted]:
    return fit_hardware.fitted()[0]


def held_out(one: Fitted) -> list[float]:
    return [abs(one.predicted(cell) / cell.tokens_per_s - 1) for cell in one.cells if cell not in one.on]


def test_committed_files_are_what_the_cells_give(machines: dict[str, Fitted]) -> None:
    for name, one in machines.items():
        _, constants, sources = machine.read(machine.directory() / f"{name}.yaml")
        assert constants == pytest.approx(one.constants, rel=0.02)  # solvers differ in the last digits
        assert sources.keys() == one.sources.keys()


def test_at_most_a_third_is_fitted_on_and_by_the_order_alone(machines: dict[str, Fitted]) -> None:
    assert len(machines["b200"].cells) == 98
    assert len(machines["mi355x"].cells) == 4
    for one in machines.values():
        assert len(one.on) <= len(one.cells) / 3
        other_speeds = [replace(cell, tokens_per_s=1.0) for cell in reversed(one.cells)]
        assert [cell.place for cell in one_of_three(other_speeds)] == [cell.place for cell in one.on]


def test_held_out_cells_are_predicted(machines: dict[str, Fitted]) -> None:
    assert statistics.median(held_out(machines["b200"])) <= 0.15
    assert statistics.median(held_out(machines["h200"])) <= 0.10
    assert max(held_out(machines["h200"])) <= 0.25
    assert max(held_out(machines["mi355x"])) <= 0.15
    # And would not be by any constants: with launches for nothing the same check fails.
    free = replace(machines["b200"], constants=machines["b200"].constants | {"layer_us": 0.0})
    assert statistics.median(held_out(free)) > 0.15


def test_constants_are_found_again_from_cells_made_with_them() -> None:
    start = opened("b200", measured.b200_cells(PUBLISHED))
    start = replace(start, constants=start.constants | fit_hardware.START_MI355X)
    true = {"layer_us": 80.0, "draft_us": 400.0, "scan_us": 9.0, "snapshot_share": 0.6}
    made = replace(start, constants=start.constants | true)
    cells = tuple(replace(cell, tokens_per_s=made.predicted(cell)) for cell in start.cells)
    found = fit(replace(start, cells=cells, on=one_of_three(cells)), tuple(true))
    assert {name: found.constants[name] for name in true} == pytest.approx(true, rel=0.02)


def test_what_is_fitted_is_the_best_with_what_it_is_predicted_with(machines: dict[str, Fitted]) -> None:
    again = fit(machines["b200"], fit_hardware.SPEED)
    assert again.constants == pytest.approx(machines["b200"].constants, rel=0.02)


def test_a_cell_is_the_median_of_its_repeats(tmp_path: Path) -> None:
    repeats = [raw_cell()["repeats"][0] | {"tokens_per_s": rate} for rate in (440.0, 470.0, 450.0)]
    (tmp_path / "new.json").write_text(json.dumps(raw_cell(repeats=repeats)))
    (cell,) = measured.read_cells(tmp_path)
    assert cell.place == ("Qwen3.5-27B", "bf16", "dflash", 15, "humaneval", 1)
    assert (cell.tokens_per_s, cell.ttft_s, cell.acceptance_length) == (450.0, 0.2, 1 + 450 / 50)


def raw_cell(**changes: Any) -> dict[str, Any]:
    repeat = {"tokens_per_s": 450.0, "median_ttft_s": 0.2, "drafts": 50, "accepted": 450}
    return {
        "format": 1,
        "engine": {"model": "Qwen3.5-27B", "precision": "bf16", "method": "dflash", "num_speculative_tokens": 15},
        "workload": "humaneval",
        "acceptance_length": 10.377,
        "concurrency": 1,
        "prompt_tokens": 256,
        "output_tokens": 512,
        "repeats": [repeat, repeat],
    } | changes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(raw_cell(format=2)), "cell.json has format 2; this mxq reads format 1: measure it again"),
        (json.dumps(raw_cell(repeats=[])), "cell.json is not a cell"),
        (json.dumps(raw_cell(engine=None)), "cell.json is not a cell"),
        ("[]", "cell.json has format None"),
        ("{", "cell.json cannot be read"),
    ],
)
def test_results_that_are_no_cells_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "cell.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        measured.read_cells(tmp_path)


def test_a_directory_without_cells_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no cells"):
        measured.read_cells(tmp_path)


def test_published_cells_have_the_published_acceptance() -> None:
    cells = {cell.place: cell for cell in measured.b200_cells(PUBLISHED)}
    cell = cells["Qwen3.5-27B", "bf16", "dflash", 15, "humaneval", 1]
    assert (cell.acceptance_length, cell.tokens_per_s) == (10.377, 572.4)
    assert cells["Qwen3.5-35B-A3B", "bf16", "ar", 0, "gsm8k", 32].acceptance_length == 1
    figures = {cell.place: cell for cell in measured.mi355x_cells(PUBLISHED)}
    packed = figures["Qwen3.5-27B", "mxfp4", "dflash", 15, "humaneval", 1]
    assert (packed.acceptance_length, packed.tokens_per_s) == (10.329, 460)


def test_the_page_has_every_cell(machines: dict[str, Fitted]) -> None:
    page = (ROOT / "benchmarks/PREDICT.md").read_text()
    for cell in machines["h200"].cells:
        method = f"{cell.method}-{cell.k}" if cell.k else cell.method
        assert f"| {cell.model} | {cell.precision} | {method} | {cell.workload} | {cell.concurrency} |" in page
    of_b200 = page[page.index("## NVIDIA B200") : page.index("## NVIDIA H200")]
    shown = sum(line.count(" / ") for line in of_b200.splitlines() if line.startswith("| Qwen3.5"))
    assert shown == len(machines["b200"].cells)


def test_predictions_are_per_machine(machines: dict[str, Fitted]) -> None:
    cell = Cell("Qwen3.5-27B", "bf16", "ar", 0, "any", 1, 1.0, 256, 512, 0.0)
    rates = {name: predicted(one.machine, cell) for name, one in machines.items()}
    assert rates["b200"] > rates["h200"] > rates["mi300x"]
