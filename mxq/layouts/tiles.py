"""SWZ on a CPU, both ways, in LLVM's language: numpy moves single bytes there, and this moves words.

Of a tile of 32 rows and 8 columns, rows r and r + 16 belong together. Their 16 bytes go to four words of four bytes, 64
bytes apart: word c has columns c and c + 4 of both.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir

from mxq.formats import machine_code
from mxq.layouts.permutation import Bytes, Permutation

_WORDS = [[8 * row + 4 * half + column for half in (0, 1) for row in (0, 1)] for column in range(4)]
"""For each word the bytes that it has, as they are numbered in two rows one behind the other."""


@dataclass(frozen=True)
class Tiles(Permutation):
    """SWZ as a permutation, for which a CPU has instructions of its own.

    Attributes:
        gate_up: rows 16 b and R/2 + 16 b begin tile b, and not rows 32 b and 32 b + 16.
        back: from SWZ to rows.
    """

    gate_up: bool = False
    back: bool = False

    @property
    def inverse(self) -> "Tiles":
        """The permutation that undoes this one."""
        plain = super().inverse
        return Tiles(plain.split, plain.order, gate_up=self.gate_up, back=not self.back)

    def _moved(self, x: Bytes) -> Bytes:
        rows, columns = x.shape[-2:]
        source = np.ascontiguousarray(x)
        moved = np.empty(x.shape, np.uint8)
        plain, tiled = (moved, source) if self.back else (source, moved)
        step, partner = (16, rows // 2) if self.gate_up else (32, 16)
        sizes = math.prod(x.shape[:-2]), rows // 32, columns // 8, step * columns, partner * columns
        _compiled(self.back)(plain.ctypes.data, tiled.ctypes.data, *sizes)
        return moved


@functools.lru_cache
def _compiled(back: bool) -> Callable[..., None]:
    """Return what moves the bytes.

    Its arguments are addresses of the plain matrices and of their tiles; the numbers of matrices, and of tiles down and
    across; the bytes from a tile's first row to that of the tile below, and from a row to the one it belongs to.
    """
    types = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 5
    name = "unswz" if back else "swz"
    return machine_code.function(name, lambda name: _source(name, back), Path(__file__).read_bytes(), types)


def _source(name: str, back: bool) -> str:
    byte, number = ir.IntType(8), ir.IntType(64)
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), [byte.as_pointer()] * 2 + [number] * 5), name)
    plain, tiled, matrices, down, across, step, partner = function.args
    for pointer in (plain, tiled):
        pointer.add_attribute("noalias")
    b = ir.IRBuilder(function.append_basic_block())
    columns = b.mul(across, number(8))

    def places(pointer: Any, offsets: Sequence[Any], length: int) -> list[Any]:
        kind = ir.VectorType(byte, length).as_pointer()
        return [b.bitcast(b.gep(pointer, [offset]), kind) for offset in offsets]

    def taken(two: Sequence[Any], numbers: Sequence[int]) -> Any:
        return b.shuffle_vector(*two, ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), [*numbers]))

    with machine_code.loop(b, matrices) as matrix, machine_code.loop(b, down) as below:
        tile = b.mul(b.add(b.mul(matrix, down), below), across)
        first = b.add(b.mul(b.mul(b.mul(matrix, down), number(32)), columns), b.mul(below, step))
        with machine_code.loop(b, across) as right, machine_code.loop(b, number(16)) as row:
            upper = b.add(b.add(first, b.mul(row, columns)), b.mul(right, number(8)))
            rows = places(plain, [upper, b.add(upper, partner)], 8)
            start = b.add(b.mul(b.add(tile, right), number(256)), b.mul(row, number(4)))
            words = places(tiled, [b.add(start, number(64 * column)) for column in range(4)], 4)
            if back:
                w = [b.load(place, align=1) for place in words]
                halves = [taken(two, range(8)) for two in (w[:2], w[2:])]
                held = [at for own in _WORDS for at in own]
                for place, of_row in zip(rows, (range(8), range(8, 16)), strict=True):
                    b.store(taken(halves, [held.index(at) for at in of_row]), place, align=1)
            else:
                both = [b.load(place, align=1) for place in rows]
                for place, own in zip(words, _WORDS, strict=True):
                    b.store(taken(both, own), place, align=1)
    b.ret_void()
    return str(function.module)
