"""Figures hold the run's numbers, and name what they show."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from scripted import ScriptedEngine, decode, small_plan
from served import ServedCell, serve, server_plan

from mxq.analysis import Summary, summarise
from mxq.analysis.intervals import intervals
from mxq.errors import UsageError
from mxq.evaluate import Cell, read_run, run
from mxq.report.figures import COLOURS, acceptance_vs_k, speed_vs_concurrency, survival


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    path = tmp_path_factory.mktemp("runs") / "run"
    run(small_plan(budgets=[3, 7, 15], names=["a", "b", "c", "d"]), path, ScriptedEngine(), decode)
    return summarise(read_run(path))


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def curves(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    with_bars = {str(c.get_label()): c.lines[0] for c in axes.containers if isinstance(c, ErrorbarContainer)}
    lines = {str(line.get_label()): line for line in axes.get_lines()} | with_bars
    return {label: (list(line.get_xdata()), list(line.get_ydata())) for label, line in lines.items()}  # type: ignore[arg-type]


def test_intervals_are_drawn(summary: Summary) -> None:
    known = intervals(summary.run)
    bars = panels(acceptance_vs_k(summary))["a"].containers
    (dflash,) = [c for c in bars if isinstance(c, ErrorbarContainer) and c.get_label() == "DFlash, bf16"]
    bands = panels(survival(summary, "dflash-3"))["a"].collections
    assert len(bands) == len(summary.targets)
    for k, ends in zip((3, 7, 15), dflash.lines[2][0].get_segments(), strict=True):
        cell = summary.cell("bf16", f"dflash-{k}", "a")
        assert cell
        pooled = known.of(cell).pooled
        assert pooled
        assert [end[1] for end in ends] == pytest.approx([pooled.lower, pooled.upper])


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_acceptance_against_the_budget(summary: Summary) -> None:
    figure = acceptance_vs_k(summary)
    assert list(panels(figure)) == ["a", "b", "c", "d"]
    for workload, axes in panels(figure).items():
        drawn = curves(axes)
        assert drawn["ceiling, K + 1"] == ([3.0, 7.0, 15.0], [4.0, 8.0, 16.0])
        for target in ("bf16", "mxfp4"):
            x, y = drawn[f"DFlash, {target}"]
            assert x == [3, 7, 15]
            for k, length in zip(x, y, strict=True):
                cell = summary.cell(target, f"dflash-{k}", workload)
                assert cell
                assert cell.acceptance
                assert length == cell.acceptance.pooled
    assert legend(figure) == ["ceiling, K + 1", "DFlash, bf16", "DFlash, mxfp4"]
    assert "acceptance length" in figure.get_supylabel()
    assert "K" in figure.get_supxlabel()


def test_survival_curves(summary: Summary) -> None:
    figure = survival(summary)
    for workload, axes in panels(figure).items():
        for line in axes.get_lines():
            cell = summary.cell(str(line.get_label()), "dflash-15", workload)
            assert cell
            assert cell.acceptance
            assert list(line.get_xdata()) == list(range(1, 16))  # type: ignore[arg-type]
            assert tuple(line.get_ydata()) == cell.acceptance.survival  # type: ignore[arg-type]
            assert line.get_color() == COLOURS[str(line.get_label())]
    assert legend(figure) == ["bf16", "mxfp4"]
    assert "dflash-15" in figure.get_supxlabel()
    assert "dflash-3" in survival(summary, "dflash-3").get_supxlabel()


def test_speed_against_concurrency(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        if cell.workload == "b":  # faster than anything in the first panel
            made.now = [at / 3 for at in made.now]

    path = serve(tmp_path / "run", server_plan(concurrencies=(1, 4, 16), repeats=3, names=["a", "b"]), change=change)
    summary = summarise(read_run(path))
    for relative in (False, True):
        figure = speed_vs_concurrency(summary, relative=relative)
        assert list(panels(figure)) == ["a", "b"]
        for workload, axes in panels(figure).items():
            low, high = axes.get_ylim()
            assert low == 0
            drawn = {str(c.get_label()): c for c in axes.containers if isinstance(c, ErrorbarContainer)}
            plain = {"plain, bf16", "plain, mxfp4"}
            assert drawn.keys() == {"DFlash K=3, bf16", "DFlash K=3, mxfp4"} | (set() if relative else plain)
            for target in ("bf16", "mxfp4"):
                line, _, (bars,) = drawn[f"DFlash K=3, {target}"]
                assert line.get_color() == COLOURS[target]
                assert list(line.get_xdata()) == [1, 4, 16]
                assert max(line.get_ydata()) < high
                for at, y, (lowest, highest) in zip((1, 4, 16), line.get_ydata(), bars.get_segments(), strict=True):
                    cell = summary.cell(target, "dflash-3", workload, at)
                    assert cell
                    assert cell.speed
                    value = cell.speed.speedup_same_precision if relative else cell.speed.tokens_per_s
                    assert value
                    assert [lowest[1], y, highest[1]] == pytest.approx([value.lowest, value.median, value.highest])


def test_emulated_speed_is_not_drawn(tmp_path: Path) -> None:
    summary = summarise(read_run(serve(tmp_path / "run", server_plan(), mxfp4="emulated")))
    assert not any("mxfp4" in label for label in legend(speed_vs_concurrency(summary)))
    plan = server_plan()
    alone = replace(
        plan,
        targets={"mxfp4": plan.targets["mxfp4"]},
        arms=tuple(arm for arm in plan.arms if arm.target == "mxfp4"),
    )
    emulated = summarise(read_run(serve(tmp_path / "alone", alone, mxfp4="emulated")))
    with pytest.raises(UsageError, match="no speed that can be shown"):
        speed_vs_concurrency(emulated)


def test_acceptance_is_drawn_at_the_lowest_concurrency(tmp_path: Path) -> None:
    summary = summarise(read_run(serve(tmp_path / "run", server_plan(concurrencies=(2, 4)))))
    x, y = curves(panels(acceptance_vs_k(summary))["sums"])["DFlash, bf16"]
    cell = summary.cell("bf16", "dflash-3", "sums", 2)
    assert cell
    assert cell.acceptance
    assert (x, y) == ([3.0], [cell.acceptance.pooled])


def test_figures_can_be_saved(summary: Summary, tmp_path: Path) -> None:
    for draw in (acceptance_vs_k, survival):
        for ending, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            file = tmp_path / f"figure.{ending}"
            draw(summary).savefig(file)
            assert file.read_bytes().startswith(magic)


def test_what_the_run_does_not_have(summary: Summary, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no mtp-3") as caught:
        survival(summary, "mtp-3")
    assert "dflash-7" in str(caught.value.hint)
    plan = small_plan()
    plain = replace(plan, drafter=None, arms=tuple(arm for arm in plan.arms if arm.method == "ar"))
    run(plain, tmp_path / "run", ScriptedEngine(), decode)
    for draw in (acceptance_vs_k, survival):
        with pytest.raises(UsageError, match="no speculative arm"):
            draw(summarise(read_run(tmp_path / "run")))
