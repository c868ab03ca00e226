"""Pictures of byte orders hold what the closed forms say, and are labelled with it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from mxq.layouts.aiter import gu16, pairs, swz, swz_address, tile16, tile16_address
from mxq.layouts.operands import Experts
from mxq.report import layouts

ORDERS: dict[str, tuple[Any, Any, tuple[int, int], dict[str, Any]]] = {
    "TILE16": (tile16, tile16_address, (32, 64), {"block": (16, 16), "together": 16, "line": 64}),
    "SWZ": (swz, swz_address, (64, 16), {"block": (32, 8), "together": 1, "line": 16}),
}


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("name", ORDERS)
def test_every_byte_is_drawn_at_its_address(name: str) -> None:
    permutation, address, shape, options = ORDERS[name]
    matrix, by_row, by_byte = layouts.bytes_moved(permutation, address, shape, **options).axes
    at, rows, columns = (np.asarray(axes.images[0].get_array()) for axes in (matrix, by_row, by_byte))
    for row, column in np.ndindex(shape):
        place = address(row, column, shape[1])
        assert (at[row, column], rows.flat[place], columns.flat[place]) == (place, row, column)
    together = options["together"]
    assert texts(by_row) == [str(row) for row in rows.reshape(-1)[::together]]
    first = columns.reshape(-1)[::together]
    assert texts(by_byte) == [str(c) if together == 1 else f"{c}-{c + together - 1}" for c in first]
    starts = at[:: options["block"][0], :: options["block"][1]].reshape(-1)
    assert texts(matrix) == [f"{s}-\n{s + 255}" for s in starts] if together > 1 else [str(a) for a in at.reshape(-1)]
    assert [axes.get_ylabel() for axes in (matrix, by_row, by_byte)] == ["row", "address", "address"]


@pytest.mark.parametrize(
    ("order", "labels"),
    [
        (gu16, ["gate 0-15", "up 0-15", "gate 16-31", "up 16-31"]),
        (pairs, ["gate 0\nup 0\ngate 1\nup 1\n..."]),
    ],
)
def test_rows_are_named_where_they_go(order: Callable[..., Any], labels: list[str]) -> None:
    (axes,) = layouts.rows_moved({"order": order}, 64).axes
    assert axes.get_title() == "order"
    assert texts(axes) == ["gate 0-31", "up 0-31", *labels]
    ends = sorted(int(np.asarray(line.get_ydata())[1]) for line in axes.get_lines())
    assert ends == list(range(64))


def test_padding_is_behind_each_half() -> None:
    def empty(*shape: int) -> Any:
        return np.zeros(shape, np.uint8)

    experts = Experts(empty(1, 128, 96), empty(1, 128, 6), empty(1, 192, 32), empty(1, 192, 2))
    figure = layouts.padded(experts, 256, 128)
    after = np.asarray(figure.axes[1].images[0].get_array())
    assert after.shape == (256, 128)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [names[after[row, 0]] for row in (0, 63, 64, 127, 128, 191, 192)] == [
        *("gate", "gate", "padding", "padding", "up", "up", "padding")
    ]
    assert names[after[0, 96]] == "padding"
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["0", "64", "128", "192", "256"]


def test_errors_are_written_beside_their_bars() -> None:
    figure = layouts.errors({"right": 0.0, "rounded": 0.141, "wrong": 1.4, "broken": float("nan")})
    (axes,) = figure.axes
    assert texts(axes)[:4] == ["exact", "0.14", "1.4", "not a number"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["right", "rounded", "wrong", "broken"]
