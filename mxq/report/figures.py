"""Figures of a run. They need matplotlib (``pip install mxq[plot]``), imported when the first one is drawn.

Colour always means the target and the line always means the method; one small panel per workload, all on one scale.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mxq.analysis.summary import Summary
from mxq.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and vermilion of Okabe and Ito's palette: told apart by everyone, also in grey.
COLOURS = {"bf16": "#0072B2", "mxfp4": "#D55E00"}
_LINES = {"dflash": ("-", "o"), "mtp": ("--", "s")}
_NAMES = {"ar": "plain", "dflash": "DFlash", "mtp": "MTP"}
_BUDGETS = "os^Dv"
"""Markers of budgets, from the smallest on, where one method has several."""
_GREY = "#666666"


def acceptance_vs_k(summary: Summary) -> "Figure":
    """Draw pooled acceptance length against the budget K, methods by line and targets by colour."""
    _need_speculation(summary)
    from matplotlib.ticker import MaxNLocator

    figure, panels = _panels(summary.workloads, "draft tokens per pass, K", "acceptance length (pooled)")
    budgets = sorted({arm.num_speculative_tokens for arm in summary.run.arms if arm.num_speculative_tokens})
    for workload, axes in panels:
        axes.plot(budgets, [k + 1 for k in budgets], color=_GREY, linewidth=0.8, linestyle=":", label="ceiling, K + 1")
        for method, (style, marker) in _LINES.items():
            for target in summary.targets:
                points = [
                    (cell.arm.num_speculative_tokens, cell.acceptance.pooled)
                    for cell in summary.lowest
                    if (cell.workload, cell.arm.target, cell.arm.method) == (workload, target, method)
                    and cell.acceptance
                ]
                if points:
                    axes.plot(
                        *zip(*sorted(points), strict=True),
                        color=COLOURS[target],
                        linestyle=style,
                        marker=marker,
                        markersize=4,
                        label=f"{_NAMES[method]}, {target}",
                    )
        axes.set_xticks(budgets)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    return _with_legend(figure, panels)


def survival(summary: Summary, configuration: str | None = None) -> "Figure":
    """Draw the share of verify passes that accepted at least i drafts, bf16 against MXFP4.

    ``configuration`` is one of ``summary.configurations``; by default the last, which has the largest budget of DFlash
    if the run has DFlash.
    """
    _need_speculation(summary)
    chosen = configuration or summary.configurations[-1]
    if chosen not in summary.configurations:
        raise UsageError(f"the run has no {chosen}", f"it has {', '.join(summary.configurations)}")
    figure, panels = _panels(summary.workloads, f"drafts accepted, at least ({chosen})", "share of verify passes")
    for workload, axes in panels:
        for target in summary.targets:
            cell = summary.cell(target, chosen, workload)
            if cell and cell.acceptance:
                curve = cell.acceptance.survival
                marker = "o" if target == "bf16" else "^"
                positions = range(1, len(curve) + 1)
                axes.plot(positions, curve, color=COLOURS[target], marker=marker, markersize=3, label=target)
                axes.set_xticks(sorted({1, *range(5, len(curve) + 1, 5), len(curve)}))
        axes.set_ylim(0, 1.02)
    return _with_legend(figure, panels)


def speed_vs_concurrency(summary: Summary, *, relative: bool = False) -> "Figure":
    """Draw output tokens per second against requests in flight, with the range over repeats.

    ``relative``: draw the speedup over plain decoding of the same target instead. What must not be shown as the speed
    of MXFP4 is not drawn.
    """
    label = "speedup over plain decoding" if relative else "output tokens/s"
    budgets = sorted({arm.num_speculative_tokens for arm in summary.run.arms if arm.num_speculative_tokens})
    figure, panels = _panels(summary.workloads, "requests in flight", label)
    for workload, axes in panels:
        for arm in summary.run.arms:
            cells = [c for c in summary.cells if (c.workload, c.arm) == (workload, arm) and c.speed]
            found = [
                (c.concurrency, s.speedup_same_precision if relative else s.tokens_per_s)
                for c in cells
                if (s := c.speed)
            ]
            points = [(at, value) for at, value in sorted(found, key=lambda point: point[0]) if value]
            if not points or (relative and arm.method == "ar"):
                continue
            middle = [value.median for _, value in points]
            k = arm.num_speculative_tokens
            axes.errorbar(
                [at for at, _ in points],
                middle,
                yerr=[
                    [m - value.lowest for m, (_, value) in zip(middle, points, strict=True)],
                    [value.highest - m for m, (_, value) in zip(middle, points, strict=True)],
                ],
                color=COLOURS[arm.target],
                linestyle=_LINES[arm.method][0] if k else ":",
                marker=_BUDGETS[budgets.index(k) % len(_BUDGETS)] if k else ".",
                markersize=4,
                linewidth=1.1,
                capsize=2,
                label=f"{_NAMES[arm.method]}{f' K={k}' if k else ''}, {arm.target}",
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(summary.concurrencies, [str(at) for at in summary.concurrencies])
        axes.minorticks_off()
    panels[0][1].set_ylim(bottom=0)  # of all: they share it. Not before the last is drawn, since it fixes the top too
    if not any(axes.has_data() for _, axes in panels):
        raise UsageError("the run has no speed that can be shown", "see the notes of its tables")
    return _with_legend(figure, panels)


def _need_speculation(summary: Summary) -> None:
    if not summary.configurations:
        raise UsageError("the run has no speculative arm, so there is nothing to draw", "run it with --spec dflash")


Panels = list[tuple[str, "Axes"]]


def _panels(workloads: Iterable[str], x_label: str, y_label: str) -> tuple["Figure", Panels]:
    from matplotlib.figure import Figure

    names = list(workloads)
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(1.0 + 2.9 * columns, 0.9 + 2.3 * rows), dpi=110, layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    panels: Panels = []
    for index, axes in enumerate(grid.flat):
        if index >= len(names):
            axes.set_axis_off()
            continue
        axes.set_title(names[index], fontsize=10)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        panels.append((names[index], axes))
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    return figure, panels


def _with_legend(figure: "Figure", panels: Panels) -> "Figure":
    by_label = {
        label: handle for _, axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(by_label.values(), by_label.keys(), loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure
