"""Figures of predictions show the numbers of the predictions, and say that they are predicted."""

from collections.abc import Sequence
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from published_shapes import setup

from mxq.hardware.acceptance import of_length
from mxq.hardware.cost import PARTS
from mxq.hardware.predict import Load, Prediction, predict
from mxq.report import steps


def predicted(method: str, k: int, concurrency: int = 1) -> Prediction:
    accepted = of_length(1 + k / 2, k) if k else None
    return predict(setup("Qwen3.5-27B", "mi355x"), method, Load(concurrency, 1024), accepted)


def curves(axes: Axes) -> dict[str, tuple[list[Any], Any]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))  # type: ignore[arg-type]
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def widths(figure: Figure) -> list[list[float]]:
    """By group, the lengths of its bars."""
    (axes,) = figure.axes
    return [[bar.get_width() for bar in bars] for bars in axes.containers]


def test_speed_against_the_budget() -> None:
    found: dict[str, Sequence[Prediction]] = {
        method: [predicted(method, 7), predicted("ar", 0), predicted(method, 3)][::-1] for method in ("dflash", "mtp")
    }
    figure = steps.speed_vs_k({"chat": [("bf16", found["dflash"]), ("mxfp4", found["mtp"])]})
    drawn = curves(figure.axes[0])
    assert legend(figure) == list(drawn) == ["DFlash, bf16", "MTP, mxfp4"]
    by_k = {one.k: one.tokens_per_s for one in found["dflash"]}
    assert drawn["DFlash, bf16"] == ([0, 3, 7], pytest.approx([by_k[k] for k in (0, 3, 7)]))
    assert "predicted" in figure.get_supylabel()


def test_measured_beside_predicted() -> None:
    arms = predicted("mtp", 7, 8), predicted("ar", 0, 8), predicted("mtp", 3, 8)
    found = [(100.0 * one.k + 80, one) for one in arms]
    figure = steps.measured_vs_k({"8 in flight": [("mxfp4", found)]})
    drawn = curves(figure.axes[0])
    assert legend(figure) == list(drawn) == ["MTP, mxfp4, measured", "MTP, mxfp4, predicted"]
    assert drawn["MTP, mxfp4, measured"] == ([0, 3, 7], [10, 47.5, 97.5])
    by_k = {one.k: one.tokens_per_s / 8 for _, one in found}
    assert drawn["MTP, mxfp4, predicted"] == ([0, 3, 7], pytest.approx([by_k[k] for k in (0, 3, 7)]))
    marks, line = figure.axes[0].get_lines()
    assert (marks.get_linestyle(), line.get_marker()) == ("None", "None"), "what was measured is no line"


def test_speedup_against_requests_in_flight() -> None:
    found = {k: [predicted("dflash", k, c) for c in (1, 8, 32)] for k in (3, 15)}
    figure = steps.speedup_vs_concurrency({"chat": [("bf16", one) for one in found.values()]})
    drawn = curves(figure.axes[0])
    assert list(drawn) == ["DFlash K=3, bf16", "DFlash K=15, bf16"]
    assert drawn["DFlash K=15, bf16"] == ([1, 8, 32], pytest.approx([one.speedup_same for one in found[15]]))
    assert len({line.get_marker() for line in figure.axes[0].get_lines()[-2:]}) == 2
    assert "predicted" in figure.get_supylabel()


def test_where_the_time_goes() -> None:
    assert sorted(part for parts in steps.GROUPS.values() for part in parts) == sorted(PARTS)
    shown = {"plain": predicted("ar", 0), "DFlash": predicted("dflash", 15, 32)}
    figure = steps.parts(shown)
    bars = widths(figure)
    assert legend(figure) == list(steps.GROUPS)
    assert [sum(group[i] for group in bars) for i in range(2)] == pytest.approx(
        [1e3 * one.step_s for one in shown.values()]
    )
    snapshots = bars[list(steps.GROUPS).index("snapshots of states")]
    assert snapshots == pytest.approx([0, 1e3 * shown["DFlash"].parts["snapshots"]])
    assert "predicted" in figure.axes[0].get_xlabel()
