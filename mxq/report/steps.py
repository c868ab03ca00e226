"""Figures of predictions: speed against budget and concurrency, and where the time of a step goes."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mxq.hardware.predict import Prediction
from mxq.report.drawing import figure
from mxq.report.gallery import NAMES
from mxq.report.pictures import Colour, Panel, Picture, Point, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS = {
    "weights read": ("weights", "experts", "lm_head"),
    "K/V and states": ("K/V", "state"),
    "snapshots of states": ("snapshots",),
    "multiplying, beyond reading": ("operations",),
    "overhead of layers": ("overhead",),
    "drafter": ("draft weights", "draft lm_head", "draft K/V", "draft operations"),
    "overhead of drafting": ("draft overhead",),
    "waiting for the host": ("host",),
}
"""Parts of a step that are drawn together."""

# Okabe and Ito's palette, in an order in which neighbours differ in grey, too.
_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#009E73", "#CC79A7", "#000000")
_LINES = {"dflash": "-", "mtp": "--", "ar": ":"}
_MARKERS = "os^Dv"
"""Of budgets, from the smallest on."""

Curve = tuple[Colour, Sequence[Prediction]]
"""Predictions of one target and method, by budget or by requests in flight."""


def speed_vs_k(panels: Mapping[str, Sequence[Curve]]) -> "Figure":
    """Draw predicted tokens per second against K, with plain decoding as K = 0; panels by title."""
    return figure(
        Picture(
            key="predicted-k",
            title="Predicted throughput against K",
            x_label="draft tokens per pass, K (0: plain decoding)",
            y_label="predicted output tokens/s",
            panels=_panels(panels, lambda one: one.k, lambda one: one.tokens_per_s),
            form="{:.1f}",
        )
    )


def measured_vs_k(panels: Mapping[str, Sequence[tuple[Colour, Sequence[tuple[float, Prediction]]]]]) -> "Figure":
    """Draw measured tokens per second and request as marks, and predicted ones as lines, against K; panels by title.

    A curve is one of :data:`Curve`, with what was measured before each prediction.
    """

    def both(colour: Colour, found: Sequence[tuple[float, Prediction]]) -> tuple[Series, Series]:
        found = sorted(found, key=lambda pair: pair[1].k)
        method = found[-1][1].method
        marks = tuple(Point(one.k, rate / one.load.concurrency) for rate, one in found)
        line = tuple(Point(one.k, one.tokens_per_s / one.load.concurrency) for _, one in found)
        name, marker = f"{NAMES[method]}, {colour}", _MARKERS[method == "mtp"]
        return (
            Series(f"{name}, measured", colour, marks, "", marker),
            Series(f"{name}, predicted", colour, line, _LINES[method], ""),
        )

    return figure(
        Picture(
            key="measured-k",
            title="Measured and predicted throughput against K",
            x_label="draft tokens per pass, K (0: plain decoding)",
            y_label="output tokens/s per request",
            panels=tuple(
                Panel(title, tuple(one for curve in curves for one in both(*curve))) for title, curves in panels.items()
            ),
            form="{:.1f}",
        )
    )


def speedup_vs_concurrency(panels: Mapping[str, Sequence[Curve]]) -> "Figure":
    """Draw predicted speedups over plain decoding of the same target against requests in flight; panels by title."""
    return figure(
        Picture(
            key="predicted-concurrency",
            title="Predicted speedup against requests in flight",
            x_label="requests in flight",
            y_label="predicted speedup over plain decoding",
            panels=_panels(panels, lambda one: one.load.concurrency, lambda one: one.speedup_same),
            form="{:.2f}",
            doubling=True,
            references=(1.0,),
        )
    )


def parts(steps: Mapping[str, Prediction]) -> "Figure":
    """Draw where the predicted time of steps goes, as bars from the first down, in milliseconds."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9.2, 1.3 + 0.34 * len(steps)), dpi=110, layout="constrained")
    axes = drawn.subplots()
    left = [0.0] * len(steps)
    for (group, names), colour in zip(GROUPS.items(), _COLOURS, strict=True):
        wide = [1e3 * sum(one.parts[name] for name in names) for one in steps.values()]
        axes.barh(range(len(steps)), wide, left=left, height=0.7, color=colour, label=group)
        left = [start + width for start, width in zip(left, wide, strict=True)]
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.set_xlabel("predicted time of a step, ms")
    axes.spines[["top", "right"]].set_visible(False)
    drawn.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return drawn


def _panels(
    panels: Mapping[str, Sequence[Curve]], x: Callable[[Prediction], float], y: Callable[[Prediction], float]
) -> tuple[Panel, ...]:
    budgets = sorted({one.k for curves in panels.values() for _, found in curves for one in found if one.k})

    def drawn(target: Colour, found: Sequence[Prediction]) -> Series:
        # A curve over budgets can begin with plain decoding: its last prediction says which method it is of.
        method, ks = found[-1].method, {one.k for one in found}
        k = found[-1].k if len(ks) == 1 else 0
        points = tuple(Point(x(one), y(one)) for one in sorted(found, key=x))
        marker = _MARKERS[budgets.index(k) % len(_MARKERS)] if k else "."
        return Series(f"{NAMES[method]}{f' K={k}' if k else ''}, {target}", target, points, _LINES[method], marker)

    return tuple(Panel(title, tuple(drawn(*curve) for curve in curves)) for title, curves in panels.items())
