"""The section of a report about what converting did to each matrix."""

from mxq.analysis.layers import MatrixError, by_layer, matrix_errors
from mxq.evaluate import Run
from mxq.report.page.content import Cell, Grid, Section, cells
from mxq.report.pictures import Panel, Picture, Point, Series

_WORST = 10


def conversion_section(run: Run) -> Section:
    """Return errors by kind of matrix and layer; empty where the run keeps none."""
    errors = matrix_errors(run)
    if not errors:
        return Section("conversion", "Conversion error")
    return Section(
        "conversion",
        "Conversion error",
        text=(
            "The error of every quantized matrix: the norm of what rounding changed over the norm of the matrix. It is "
            "of weights alone; what it does to acceptance is in the sections above.",
        ),
        grids=(_kinds(errors), _worst(errors)),
        pictures=(_by_layer(errors),),
    )


def _by_layer(errors: tuple[MatrixError, ...]) -> Picture:
    panels, several = [], False
    for kind, layers in by_layer(errors).items():
        several = several or any(one.matrices > 1 for one in layers)
        points = [
            Point(
                one.layer,
                100 * one.median,
                None if one.matrices == 1 else 100 * one.lowest,
                None if one.matrices == 1 else 100 * one.highest,
            )
            for one in layers
        ]
        panels.append(Panel(kind, (Series("mxfp4", "mxfp4", tuple(points), "-", "."),)))
    depth = max((int(point.x) for panel in panels for point in panel.series[0].points), default=0)
    step = max(1, -(-depth // 6))
    return Picture(
        key="conversion",
        title="Error of the weights by layer",
        x_label="layer",
        y_label="relative error, %",
        panels=tuple(panels),
        form="{:.2f}",
        x_ticks=tuple(range(0, depth + 1, step)),
        bottom=None,
        intervals="whiskers are the range over the matrices of a layer, such as its experts" if several else "",
    )


def _kinds(errors: tuple[MatrixError, ...]) -> Grid:
    rows = []
    for kind in sorted({error.kind for error in errors}):
        mine = sorted((error for error in errors if error.kind == kind), key=lambda error: error.relative_error)
        middle, worst = mine[len(mine) // 2], mine[-1]
        saturated, zeros = max(error.saturated for error in mine), max(error.zero_blocks for error in mine)
        numbers = (f"{middle.relative_error:.2%}", f"{worst.relative_error:.2%}", f"{worst.sqnr_db:.2f}")
        rows.append(cells([kind, str(len(mine)), *numbers, f"{saturated:.3%}", f"{zeros:.2%}"]))
    columns = ("matrices", "median error", "largest error", "its SQNR, dB", "most saturated", "most zero blocks")
    return Grid("Errors by kind of matrix", ("", *columns), tuple(rows))


def _worst(errors: tuple[MatrixError, ...]) -> Grid:
    worst = sorted(errors, key=lambda error: error.sqnr_db)[:_WORST]
    rows = tuple(cells([error.module, Cell(f"{error.relative_error:.2%}"), f"{error.sqnr_db:.2f}"]) for error in worst)
    return Grid("The matrices with the largest errors", ("", "relative error", "SQNR, dB"), rows, folded=True)
