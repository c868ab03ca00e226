"""Pictures of AITER's byte orders. What is drawn is what :mod:`mxq.layouts` does to arrays, not a drawing of the text.

Row and column of origin are colours of cividis, which is told apart by everyone, also in grey, and are written into the
cells; gate, up and down have colours of Okabe and Ito's palette.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mxq.layouts.operands import Experts, pad_experts
from mxq.layouts.permutation import Bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = npt.NDArray[Any]

_COLOURS = "cividis"
_PARTS = {"padding": "#dddddd", "gate": "#0072B2", "up": "#D55E00", "down": "#009E73"}
_WIDTH = 9.8
_SMALL, _TINY = 8, 6.5
_LABELS = 12
_UNRELATED = 2**0.5  # of vectors of one length, at right angles to each other
_HARMLESS = 0.3


def bytes_moved(
    permutation: Callable[[Bytes], Bytes],
    address: Callable[[Any, Any, int], Any],
    shape: tuple[int, int],
    *,
    block: tuple[int, int],
    together: int,
    line: int,
) -> "Figure":
    """Draw where the bytes of a matrix go: its addresses, and for each byte of memory the row and column it came from.

    Args:
        permutation: moves bytes, such as :func:`mxq.layouts.aiter.tile16`; given every byte's own row, and column.
        address: its closed form.
        shape: rows and bytes of a row, at most 256 each.
        block: rows and bytes that are together in memory.
        together: bytes of a row that stay side by side.
        line: bytes of memory in a line of the picture.
    """
    row, column = np.indices(shape)
    addresses = address(row, column, shape[1])
    lines = (-1, line)
    figure, (left, middle, right) = _figure(4.6, 3, [1.0, 1.15, 1.15])
    _cells(left, addresses, "the matrix, by address")
    _outline(left, shape, block)
    if together == 1:
        _write(left, addresses, addresses)
    else:
        for top in range(0, shape[0], block[0]):
            for first in range(0, shape[1], block[1]):
                start = addresses[top, first]
                text = f"{start}-\n{start + block[0] * block[1] - 1}"
                middle_of = (first + block[1] / 2 - 0.5, top + block[0] / 2 - 0.5)
                _text(left, middle_of, text, start / addresses.max(), _SMALL)
    left.set_xlabel("byte of the row", fontsize=_SMALL)
    left.set_ylabel("row", fontsize=_SMALL)
    for axes, origin, what in ((middle, row, "row"), (right, column, "byte")):
        moved = permutation(origin.astype(np.uint8)).reshape(lines)
        _cells(axes, moved, f"memory, by {what} of origin")
        axes.set_yticks(range(len(moved))[::4], [str(i * line) for i in range(len(moved))[::4]])
        axes.set_xlabel("+ byte", fontsize=_SMALL)
        axes.set_ylabel("address", fontsize=_SMALL)
        labels = moved[:, ::together]
        names: Numbers = labels if together == 1 or what == "row" else _ranges(labels, together)
        _write(axes, labels, names, together)
        axes.set_xticks(range(0, line, max(together, 4)))
    return figure


def rows_moved(orders: Mapping[str, Callable[[Bytes], Bytes]], rows: int) -> "Figure":
    """Draw where the rows of gate and up go: for each order lines from the rows as stacked to the rows as ordered.

    Args:
        orders: by a title, what moves rows, such as :func:`mxq.layouts.aiter.gu16`.
        rows: of gate and up together, at most 256.
    """
    figure, panels = _figure(4.4, len(orders), [1.0] * len(orders))
    stacked = np.arange(rows)
    for axes, (title, order) in zip(panels, orders.items(), strict=True):
        origin = order(np.repeat(stacked[:, None], 64, 1).astype(np.uint8))[:, 0].astype(int)
        for now, before in enumerate(origin):
            colour = _PARTS["gate" if before < rows // 2 else "up"]
            axes.plot([0, 1], [before, now], color=colour, linewidth=0.9)
            axes.bar([-0.03, 1.03], [1, 1], 0.06, [before - 0.5, now - 0.5], color=colour)
        for x, places, side in ((-0.09, stacked, "right"), (1.09, origin, "left")):
            runs = _runs(places, rows // 2)
            names = [_named(places[start:stop], rows // 2) for start, stop in runs]
            if len(runs) <= _LABELS:
                for (start, stop), name in zip(runs, names, strict=True):
                    axes.text(x, (start + stop - 1) / 2, name, ha=side, va="center", fontsize=_SMALL)
            else:
                axes.text(x, rows / 2, "\n".join([*names[:4], "..."]), ha=side, va="center", fontsize=_SMALL)
        axes.set(title=title, xlim=(-0.75, 1.75), ylim=(rows - 0.5, -0.5))
        axes.set_axis_off()
    return figure


def padded(experts: Experts[Bytes], hidden: int, intermediate: int) -> "Figure":
    """Draw what padding adds to one expert: w13 [2I, H/2] and w2 [H, I/2] before and after.

    Args:
        experts: of which the sizes are taken.
        hidden: H after padding.
        intermediate: I after padding.
    """
    _, h, i = experts.sizes
    names = list(_PARTS)
    w13 = np.repeat([names.index("gate"), names.index("up")], i)[None, :, None].repeat(h // 2, 2).astype(np.uint8)
    w2 = np.full((1, h, i // 2), names.index("down"), np.uint8)
    plain = Experts(w13, w13[..., ::16], w2, w2[..., ::16])
    after = pad_experts(plain, hidden, intermediate, scale_fill=0)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, panels = _figure(3.6, 4, [1.0, 1.0, 0.7, 0.7])
    shown = (("w13", plain.w13), ("w13, padded", after.w13), ("w2", plain.w2), ("w2, padded", after.w2))
    for axes, (title, array) in zip(panels, shown, strict=True):
        rows, width = array.shape[1:]
        axes.imshow(
            array[0], ListedColormap(list(_PARTS.values())), vmin=0, vmax=3, aspect="auto", interpolation="nearest"
        )
        axes.set_title(f"{title} [{rows}, {width}]", fontsize=10)
        edges = [0, *(np.flatnonzero(np.diff(array[0, :, 0])) + 1).tolist(), rows]
        axes.set_yticks([edge - 0.5 for edge in edges], [str(edge) for edge in edges])
        sides = [0, *(np.flatnonzero(np.diff(array[0, 0])) + 1).tolist(), width]
        axes.set_xticks([side - 0.5 for side in sides], [str(side) for side in sides])
        axes.tick_params(labelsize=_SMALL)
        axes.set_xlabel("byte of the row", fontsize=_SMALL)
    panels[0].set_ylabel("row", fontsize=_SMALL)
    patches = [Patch(color=colour, label=name) for name, colour in _PARTS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def errors(relative: Mapping[str, float]) -> "Figure":
    """Draw relative errors of a layer's output, by what is done to its bytes or by how they are read."""
    figure, (axes,) = _figure(0.9 + 0.34 * len(relative), 1, [1.0])
    for y, value in enumerate(relative.values()):
        finite = bool(np.isfinite(value))
        axes.barh(y, value if finite else _UNRELATED, 0.62, color=_PARTS["gate"] if value < _HARMLESS else _PARTS["up"])
        text = "exact" if value == 0 else f"{value:.2g}" if finite else "not a number"
        axes.text(value + 0.02 if finite else 0.02, y, text, va="center", fontsize=9)
    axes.axvline(_UNRELATED, color="#666666", linewidth=0.8, linestyle=":")
    axes.text(_UNRELATED, -0.75, "outputs that have nothing to do with each other", ha="center", fontsize=_SMALL)
    axes.set_yticks(range(len(relative)), list(relative))
    axes.set_ylim(len(relative) - 0.5, -0.6)
    axes.set_xlim(0, max(1.8, *(1.12 * value for value in relative.values() if np.isfinite(value))))
    axes.set_xlabel("relative error of the layer's output")
    axes.tick_params(labelsize=9, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _figure(height: float, panels: int, widths: Sequence[float]) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), dpi=110, layout="constrained")
    grid = figure.subplots(1, panels, squeeze=False, width_ratios=widths)
    return figure, list(grid.flat)


def _cells(axes: "Axes", values: Numbers, title: str) -> None:
    axes.imshow(values, _COLOURS, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=_SMALL, length=2)


def _outline(axes: "Axes", shape: tuple[int, int], block: tuple[int, int]) -> None:
    for top in range(0, shape[0], block[0]):
        axes.axhline(top - 0.5, color="white", linewidth=1.2)
    for first in range(0, shape[1], block[1]):
        axes.axvline(first - 0.5, color="white", linewidth=1.2)


def _write(axes: "Axes", values: Numbers, names: Numbers, together: int = 1) -> None:
    for y, x in np.ndindex(values.shape):
        _text(
            axes, (x * together + (together - 1) / 2, y), str(names[y, x]), values[y, x] / max(1, values.max()), _TINY
        )


def _text(axes: "Axes", place: tuple[float, float], text: str, shade: float, size: float) -> None:
    axes.text(*place, text, ha="center", va="center", fontsize=size, color="white" if shade < 0.55 else "black")


def _ranges(first: Numbers, count: int) -> Numbers:
    return np.array([[f"{value}-{value + count - 1}" for value in line] for line in first])


def _runs(places: Numbers, half: int) -> list[tuple[int, int]]:
    """Ranges of places whose rows follow each other and are all gate's or all up's."""
    breaks = [
        index for index in range(1, len(places)) if places[index] != places[index - 1] + 1 or places[index] == half
    ]
    return list(zip([0, *breaks], [*breaks, len(places)], strict=True))


def _named(places: Numbers, half: int) -> str:
    first, last = int(places[0]) % half, int(places[-1]) % half
    return f"{'gate' if places[0] < half else 'up'} {first}" + (f"-{last}" if last != first else "")
