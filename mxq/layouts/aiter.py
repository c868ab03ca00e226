"""The byte orders that AITER's MXFP4 kernels read on gfx950 (MI355X): two of bytes, TILE16 and SWZ, and one of rows.

A matrix of N rows and K columns is stored as codes [N, Kb] uint8 with Kb = K/2, the even column in the low nibble, and
scales [N, C] uint8 with C = K/32. Leading axes hold matrices that are independent of each other: experts.

======  ============  ==============================================================================================
TILE16  codes         ``view(L, N/16, 16, Kb/16, 16).permute(0, 1, 3, 2, 4)``: 16 rows of 16 bytes are together
SWZ     scales        ``view(L, R/32, 2, 16, C/8, 2, 4).permute(0, 1, 4, 6, 3, 5, 2)``: 32 rows of 8 bytes are
GU16    rows of both  ``view(L, 2, I/16, 16, ...).transpose(1, 2)``: gate rows 0-15, up rows 0-15, gate's 16-31, ...
======  ============  ==============================================================================================

Source: ROCm/aiter, ``aiter/ops/shuffle.py`` and ``aiter/utility/fp4_utils.py``. From v0.1.5 to v0.1.20.post1 its
functions give the same bytes; what changed is padding, flags and dispatch. The unreleased "klane-inner" shuffles of its
#4398 (``shuffle_weight_a16w4_sep_fp4``, ``..._gui_fp4``) are others, and are not here.

Every function takes a numpy array or a torch tensor of uint8, on any device and any view, and returns contiguous memory
of its own there. The ``..._address`` and ``..._row`` functions are the closed forms, of plain integers or of arrays of
indices: what a kernel computes before it loads.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from mxq.layouts.permutation import Array, Permutation, checked, padded
from mxq.layouts.tiles import Tiles

if TYPE_CHECKING:
    import torch

Index = TypeVar("Index", int, npt.NDArray[Any], "torch.Tensor")

UNDEFINED_FILL = 0  # for scales that AITER leaves uninitialized: 2^-127, and never the NaN that 0xFF is


def tile16(weight: Array, gate_up: bool = False) -> Array:
    """Return codes in the order TILE16: ``shuffle_weight``, ``shuffle_weight_a16w4`` (from v0.1.7).

    Byte (n, b) of a matrix goes to :func:`tile16_address`. With ``gate_up`` the rows go through :func:`gu16` before, at
    no cost.

    Args:
        weight: [..., N, Kb]; N % 16 = 0 and Kb % 32 = 0, with ``gate_up`` N % 32 = 0 and Kb % 64 = 0.
        gate_up: the rows are gate's, then up's, and are to alternate in blocks of 16.

    Returns:
        The same shape.

    Raises:
        TypeError: not uint8.
        ValueError: the shape.
    """
    return _tile16(weight, gate_up)(weight)


def untile16(weight: Array, gate_up: bool = False) -> Array:
    """Undo :func:`tile16`, of the same arguments, shapes and errors. AITER has no such function."""
    return _tile16(weight, gate_up).inverse(weight)


def tile16_address(row: Index, byte: Index, width: int) -> Index:
    """Return where byte (row, byte) of a matrix [N, Kb] is in TILE16: its offset from the matrix's first byte.

    ``((n//16) * (Kb//16) + b//16) * 256 + (n%16) * 16 + b%16``; ``width`` is Kb. As in AITER's ``quant_mxfp4_kernel``
    (``csrc/kernels/quant_mxfp4.cu``, from v0.1.14).
    """
    return ((row // 16) * (width // 16) + byte // 16) * 256 + (row % 16) * 16 + byte % 16


def swz(scale: Array, gate_up: bool = False) -> Array:
    """Return scales in the order SWZ: ``e8m0_shuffle``, ``shuffle_scale_a16w4``, without their padding.

    Byte (r, c) of a matrix goes to :func:`swz_address`. With ``gate_up`` the rows go through :func:`gu16` before, at no
    cost. Use :func:`pad_scale` first where rows or columns do not fit. AITER shuffles the experts of a layer as one
    matrix [E * R, C], which is the same since each has a multiple of 32 rows.

    Args:
        scale: [..., R, C]; R % 32 = 0 and C % 8 = 0.
        gate_up: the rows are gate's, then up's, and are to alternate in blocks of 16.

    Returns:
        The same shape. Triton's kernels get it reshaped to [..., R/32, C * 32].

    Raises:
        TypeError: not uint8.
        ValueError: the shape.
    """
    return _swz(scale, gate_up)(scale)


def unswz(scale: Array, gate_up: bool = False) -> Array:
    """Undo :func:`swz`, of the same arguments, shapes and errors: Triton's ``unshuffle_scale_gemm``."""
    return _swz(scale, gate_up).inverse(scale)


def swz_address(row: Index, column: Index, columns: int) -> Index:
    """Return where byte (row, column) of a matrix [R, C] is in SWZ: its offset from the matrix's first byte.

    ``(r//32) * 32 * C + (c//8) * 256 + (c%4) * 64 + (r%16) * 4 + ((c%8)//4) * 2 + (r%32)//16``; ``columns`` is C, with
    padding. As in AITER's ``csrc/include/mx_quant_utils.h``.
    """
    return (
        (row // 32) * (32 * columns)
        + (column // 8) * 256
        + (column % 4) * 64
        + (row % 16) * 4
        + ((column % 8) // 4) * 2
        + (row % 32) // 16
    )


def gu16(x: Array) -> Array:
    """Return rows g0-15, u0-15, g16-31, u16-31, ... of rows that are gate's, then up's: AITER's "interleave".

    It is the ``gate_up`` of ``shuffle_weight_a16w4`` and ``shuffle_scale_a16w4`` (from v0.1.7), for weights and scales.
    AITER's docstrings read as if rows alternated one by one; that is :func:`pairs`.

    Args:
        x: [..., 2I, X]; I % 16 = 0.

    Returns:
        The same shape; row n is at :func:`gu16_row`.

    Raises:
        TypeError: not uint8.
        ValueError: the shape.
    """
    return _gate_up("GU16", x, 16)(x)


def ungu16(x: Array) -> Array:
    """Undo :func:`gu16`, of the same shapes and errors."""
    return _gate_up("GU16", x, 16).inverse(x)


def gu16_row(row: Index, rows: int) -> Index:
    """Return where ``row`` of ``rows`` = 2I is after :func:`gu16`: ``(i//16) * 32 + 16 * up + i%16`` for row i of I."""
    half = rows // 2
    return (row % half) // 16 * 32 + row // half * 16 + row % half % 16


def pairs(x: Array) -> Array:
    """Return rows g0, u0, g1, u1, ... of rows that are gate's, then up's: gpt-oss's checkpoint, Triton's MoE kernels.

    Args:
        x: [..., 2I, X].

    Returns:
        The same shape; row n is at :func:`pairs_row`.

    Raises:
        TypeError: not uint8.
        ValueError: the number of rows is odd.
    """
    return _gate_up("pairing", x, 1)(x)


def unpairs(x: Array) -> Array:
    """Undo :func:`pairs`, of the same shapes and errors."""
    return _gate_up("pairing", x, 1).inverse(x)


def pairs_row(row: Index, rows: int) -> Index:
    """Return where ``row`` of ``rows`` = 2I is after :func:`pairs`: ``2i + up`` for row i of I."""
    return row % (rows // 2) * 2 + row // (rows // 2)


def pad_scale(scale: Array, rows: int = 256, columns: int = 8, fill: int = UNDEFINED_FILL) -> Array:
    """Return scales [..., R, C] with R and C brought to the next multiple of ``rows`` and ``columns``, as new memory.

    ``e8m0_shuffle`` pads to 256 x 8 and leaves there what memory held before; ``shuffle_scale_a16w4`` pads columns to 8
    with 0x7F (from v0.1.18; it fails before). Zero is what AITER's own quantizers write there, and 127 has been seen
    to spoil ``gemm_a4w4`` where K is not a multiple of 256.

    Raises:
        TypeError: not uint8.
        ValueError: less than two axes.
    """
    _, r, c = checked(scale, "padding")
    return padded(scale, -(-r // rows) * rows, -(-c // columns) * columns, fill)


def multiple(what: str, shape: Iterable[int], name: str, value: int, of: int) -> None:
    """Raise ValueError unless ``value``, called ``name``, of what has this ``shape`` is a multiple of ``of``."""
    if value % of:
        raise ValueError(f"{what} of {[*shape]}: {name} = {value} is not a multiple of {of}")


def _tile16(x: Array, gate_up: bool) -> Permutation:
    what = "TILE16 with GU16" if gate_up else "TILE16"
    matrices, rows, width = checked(x, what)
    multiple(what, x.shape, "N", rows, 32 if gate_up else 16)
    multiple(what, x.shape, "K/2", width, 64 if gate_up else 32)
    if gate_up:
        return Permutation((matrices, 2, rows // 32, 16, width // 16, 16), (0, 2, 1, 4, 3, 5), word=16)
    return Permutation((matrices, rows // 16, 16, width // 16, 16), (0, 1, 3, 2, 4), word=16)


def _swz(x: Array, gate_up: bool) -> Tiles:
    what = "SWZ with GU16" if gate_up else "SWZ"
    matrices, rows, columns = checked(x, what)
    multiple(what, x.shape, "rows", rows, 32)
    multiple(what, x.shape, "K/32", columns, 8)
    if gate_up:
        return Tiles((matrices, 2, rows // 32, 16, columns // 8, 2, 4), (0, 2, 4, 6, 3, 5, 1), gate_up=True)
    return Tiles((matrices * rows // 32, 2, 16, columns // 8, 2, 4), (0, 3, 5, 2, 4, 1))


def _gate_up(what: str, x: Array, block: int) -> Permutation:
    matrices, rows, width = checked(x, what)
    multiple(what, x.shape, "rows", rows, 2 * block)
    return Permutation((matrices, 2, rows // (2 * block), block, width), (0, 2, 1, 3, 4))
