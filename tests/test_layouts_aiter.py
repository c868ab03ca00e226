"""AITER's layouts: its own bytes, the order of every byte written out in loops, and the way back.

``aiter_layout_vectors.npz``: what functions of AITER gave on a CPU (after v0.1.20: ``shuffle_weight``,
``e8m0_shuffle``, ``shuffle_weight_a16w4`` and ``shuffle_scale_a16w4``, and for ``pad_...`` vLLM 0.32's steps for
``AITER_MXFP4_MXFP4`` around them). ``a4w4`` is the separated form, ``itlv`` the interleaved one; ``..._valid`` is false
where AITER left memory uninitialized; of larger results there is the SHA-256.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxq.layouts import aiter as orders
from mxq.layouts import operands, permutation
from mxq.layouts.operands import Experts, Linear

Bytes = npt.NDArray[np.uint8]
Layout = Callable[[Any], Any]

GOLDEN: dict[str, Bytes] = dict(np.load(Path(__file__).parent / "data" / "aiter_layout_vectors.npz"))
SOURCES = {"moe": "moe_e2_i128_h256", "pad": "pad_e2_i64_h256_to_i128_h256"}
OPERANDS = {"w13": "w13", "w13_scale": "s13", "w2": "w2", "w2_scale": "s2"}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def golden_experts(source: str) -> Experts[Bytes]:
    return Experts(*(GOLDEN[f"{SOURCES[source]}_{short}"] for short in OPERANDS.values()))


def equal(got: Bytes, name: str) -> bool:
    if f"{name}_sha256" in GOLDEN:
        return hashlib.sha256(got.tobytes()).digest() == GOLDEN[f"{name}_sha256"].tobytes()
    expected = GOLDEN[name]
    valid = GOLDEN.get(f"{name}_valid", np.ones(expected.shape, bool))
    return got.size == expected.size and np.array_equal(got.reshape(expected.shape)[valid], expected[valid])


def wrong() -> list[str]:
    """The golden results that the package does not give."""
    dense = operands.dense_asm(Linear(GOLDEN["dense_n32_k256_w"], GOLDEN["dense_n32_k256_s"]))
    got = {"dense_n32_k256_w_out": dense.weight, "dense_n32_k256_s_out": dense.scale}
    for shape in ("256x8", "512x16", "100x5"):
        got[f"scale_{shape}_out"] = orders.swz(orders.pad_scale(GOLDEN[f"scale_{shape}_in"]))
    padded = operands.pad_experts(golden_experts("pad"), 256, 128)
    for name, experts in (
        ("moe_e2_i128_h256_a4w4", operands.moe_a4w4(golden_experts("moe"))),
        ("moe_e2_i128_h256_itlv", operands.moe_interleaved(golden_experts("moe"))),
        ("pad_e2_i64_h256_to_i128_h256_a4w4", operands.moe_a4w4(padded)),
    ):
        got |= {f"{name}_{short}": getattr(experts, operand) for operand, short in OPERANDS.items()}
    return [name for name, array in got.items() if not equal(array, name)]


def test_bytes_are_aiters() -> None:
    assert wrong() == []


def swapped(x: Bytes) -> Bytes:
    return np.roll(x, x.shape[-2] // 2, axis=-2)


def transposed_tile(scale: Bytes, gate_up: bool = False) -> Bytes:
    *_, r, c = scale.shape
    tiles = orders.swz(scale, gate_up).reshape(-1, r // 32, c // 8, 4, 16, 4)
    return np.ascontiguousarray(tiles.swapaxes(3, 4)).reshape(scale.shape)


def padded_as_one(x: Bytes, rows: int, columns: int, fill: int) -> Bytes:
    """Padding of gate and up behind both."""
    halves = x.shape[1] if x.ndim == 4 else 1
    together = x.reshape(len(x), -1, x.shape[-1])
    return np.pad(
        together, [(0, 0), (0, halves * (rows - x.shape[-2])), (0, columns - x.shape[-1])], constant_values=fill
    )


DEFECTS: dict[str, tuple[Any, str, Callable[..., Bytes], list[str]]] = {
    "gate and up swapped": (
        operands,
        "tile16",
        lambda w, gate_up=False: orders.tile16(swapped(w), gate_up),
        ["a4w4_w13"],
    ),
    "gate and up swapped before they are interleaved": (
        operands,
        "tile16",
        lambda w, gate_up=False: orders.tile16(swapped(w) if gate_up else w, gate_up),
        ["itlv_w13"],
    ),
    "rows interleaved for the separated kernels": (
        operands,
        "tile16",
        lambda w, gate_up=False: orders.tile16(w, gate_up=w.shape[-1] == 128),
        ["a4w4_w13"],
    ),
    "rows in pairs": (
        operands,
        "swz",
        lambda s, gate_up=False: orders.swz(orders.pairs(s) if gate_up else s),
        ["itlv_s13"],
    ),
    "scales of gate and up not interleaved": (operands, "swz", lambda s, gate_up=False: orders.swz(s), ["itlv_s13"]),
    "tile of scales transposed": (operands, "swz", transposed_tile, ["a4w4_s13", "a4w4_s2", "itlv_s13", "itlv_s2"]),
    "weights left plain": (
        operands,
        "tile16",
        lambda w, gate_up=False: w,
        ["a4w4_w13", "a4w4_w2", "itlv_w13", "itlv_w2"],
    ),
    "gate and up padded as one": (
        operands,
        "padded",
        padded_as_one,
        ["i128_h256_a4w4_w13", "i128_h256_a4w4_s13"],
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, defective, noticed = DEFECTS[name]
    monkeypatch.setattr(module, function, defective)
    found = wrong()
    assert all(any(result.endswith(operand) for result in found) for operand in noticed), found


# --- the order of every byte, as a kernel that reads them one after the other meets them


def tile16_order(rows: list[int], width: int) -> Iterator[tuple[int, int]]:
    for top in range(0, len(rows), 16):
        for left in range(0, width, 16):
            for row in rows[top : top + 16]:
                for byte in range(left, left + 16):
                    yield row, byte


def swz_order(rows: list[int], columns: int) -> Iterator[tuple[int, int]]:
    for top in range(0, len(rows), 32):
        for left in range(0, columns, 8):
            for column in range(left, left + 4):
                for below in range(top, top + 16):
                    for c in (column, column + 4):
                        for r in (below, below + 16):
                            yield rows[r], c


def plain_order(rows: list[int], columns: int) -> Iterator[tuple[int, int]]:
    for row in rows:
        for column in range(columns):
            yield row, column


def stacked(rows: int) -> list[int]:
    return list(range(rows))


def blocks_of_16(rows: int) -> list[int]:
    out = []
    for block in range(0, rows // 2, 16):
        out += [*range(block, block + 16), *range(rows // 2 + block, rows // 2 + block + 16)]
    return out


def paired(rows: int) -> list[int]:
    return [row for gate in range(rows // 2) for row in (gate, rows // 2 + gate)]


def address_of(name: str) -> Callable[[int, int, int, int], int]:
    """The package's own closed form of where (row, column) of a matrix goes."""
    return {
        "tile16": lambda r, c, rows, columns: orders.tile16_address(r, c, columns),
        "tile16 gate_up": lambda r, c, rows, columns: orders.tile16_address(orders.gu16_row(r, rows), c, columns),
        "swz": lambda r, c, rows, columns: orders.swz_address(r, c, columns),
        "swz gate_up": lambda r, c, rows, columns: orders.swz_address(orders.gu16_row(r, rows), c, columns),
        "gu16": lambda r, c, rows, columns: orders.gu16_row(r, rows) * columns + c,
        "pairs": lambda r, c, rows, columns: orders.pairs_row(r, rows) * columns + c,
    }[name]


# name: layout, inverse, its order, its order of rows, rows and columns are multiples of
PERMUTATIONS: dict[str, tuple[Layout, Layout, Any, Any, int, int]] = {
    "tile16": (orders.tile16, orders.untile16, tile16_order, stacked, 16, 32),
    "tile16 gate_up": (
        lambda x: orders.tile16(x, gate_up=True),
        lambda x: orders.untile16(x, gate_up=True),
        tile16_order,
        blocks_of_16,
        32,
        64,
    ),
    "swz": (orders.swz, orders.unswz, swz_order, stacked, 32, 8),
    "swz gate_up": (
        lambda x: orders.swz(x, gate_up=True),
        lambda x: orders.unswz(x, gate_up=True),
        swz_order,
        blocks_of_16,
        32,
        8,
    ),
    "gu16": (orders.gu16, orders.ungu16, plain_order, blocks_of_16, 32, 1),
    "pairs": (orders.pairs, orders.unpairs, plain_order, paired, 2, 1),
}


def sources(layout: Layout, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Which element of an array of ``shape`` the layout puts where: its two bytes are moved one after the other."""
    index = np.arange(np.prod(shape)).reshape(shape)
    assert index.size < 2**16
    low, high = (layout((index >> shift & 255).astype(np.uint8)).astype(np.int64) for shift in (0, 8))
    return low | high << 8


@pytest.mark.parametrize("name", PERMUTATIONS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_byte_is_where_the_closed_form_says(name: str, data: st.DataObject) -> None:
    layout, _, order, row_order, of_rows, of_columns = PERMUTATIONS[name]
    rows = of_rows * data.draw(st.integers(1, 4))
    columns = of_columns * data.draw(st.integers(1, 3))
    matrices = data.draw(st.integers(1, 2))
    found = sources(layout, (matrices, rows, columns)).reshape(matrices, -1)
    address = address_of(name)
    for matrix in range(matrices):
        for place, (row, column) in enumerate(order(row_order(rows), columns)):
            assert found[matrix, place] == (matrix * rows + row) * columns + column
            assert address(row, column, rows, columns) == place


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_closed_forms_take_arrays_of_indices(name: str) -> None:
    layout, _, _, _, of_rows, of_columns = PERMUTATIONS[name]
    rows, columns = 2 * of_rows, 2 * of_columns
    r, c = np.indices((rows, columns))
    address: Any = address_of(name)
    x = np.random.default_rng(0).integers(0, 256, (rows, columns), np.uint8)
    out = layout(x).reshape(-1)
    assert np.array_equal(out[address(r, c, rows, columns)], x)
    assert torch.equal(
        torch.from_numpy(out)[address(torch.from_numpy(r), torch.from_numpy(c), rows, columns)], torch.from_numpy(x)
    )


@pytest.mark.parametrize("name", PERMUTATIONS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_inverse_undoes_it_whatever_the_view(name: str, data: st.DataObject) -> None:
    layout, inverse, _, _, of_rows, of_columns = PERMUTATIONS[name]
    leading = data.draw(st.lists(st.integers(0, 3), max_size=2))
    rows, columns = (of * data.draw(st.integers(1, 3)) for of in (of_rows, of_columns))
    shape, seed = (*leading, rows, columns), data.draw(st.integers(0, 99))
    made = np.random.default_rng(seed).integers(0, 256, (*leading, rows + 3, 2 * columns + 1), np.uint8)
    view = data.draw(st.sampled_from(["whole", "unaligned", "strided", "shifted", "transposed", "reversed"]))
    x = {
        "whole": lambda: made[..., :rows, :columns].copy(),
        "unaligned": lambda: np.append(0, made[..., :rows, :columns]).astype(np.uint8)[1:].reshape(shape),
        "strided": lambda: made[..., 1 : rows + 1, : 2 * columns : 2],
        "shifted": lambda: made[..., 3 : rows + 3, 1 : columns + 1],
        "transposed": lambda: made[..., :rows, :columns].swapaxes(-1, -2).copy().swapaxes(-1, -2),
        "reversed": lambda: made[..., rows - 1 :: -1, columns - 1 :: -1],
    }[view]()
    assert x.shape == shape
    before = x.copy()
    out = layout(x)
    assert out.shape == x.shape
    assert out.dtype == np.uint8
    assert out.flags.c_contiguous
    assert not np.shares_memory(out, made)
    assert np.array_equal(inverse(out), x)
    assert np.array_equal(layout(inverse(x)), x)
    assert np.array_equal(x, before)
    if view != "reversed":  # torch has no negative strides
        for device in DEVICES:
            tensor = torch.from_numpy(x)
            tensor = tensor.to(device) if device == "cpu" else tensor.to(device).mT.contiguous().mT
            moved = layout(tensor)
            assert moved.device.type == device
            assert moved.is_contiguous()
            assert moved.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not x.size
            assert np.array_equal(moved.cpu().numpy(), out)
            assert np.array_equal(inverse(moved).cpu().numpy(), x)


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_torch_itself_moves_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    layout, inverse, _, _, of_rows, of_columns = PERMUTATIONS[name]
    x = np.random.default_rng(0).integers(0, 256, (2, 3 * of_rows, 2 * of_columns), np.uint8)
    monkeypatch.setattr(permutation, "_numpy_can", lambda tensor: False)
    for tensor in (torch.from_numpy(x), torch.from_numpy(x).mT.contiguous().mT):
        moved = layout(tensor)
        assert moved.is_contiguous()
        assert np.array_equal(moved.numpy(), layout(x))
        assert np.array_equal(inverse(moved).numpy(), x)


# --- whole layers

MOE: dict[str, tuple[Layout, Layout, int]] = {
    "a4w4": (operands.moe_a4w4, operands.undo_moe_a4w4, 256),
    "interleaved": (operands.moe_interleaved, operands.undo_moe_interleaved, 128),
    "triton": (operands.moe_triton, operands.undo_moe_triton, 256),
}


def random_experts(e: int, h: int, i: int) -> Experts[Bytes]:
    rng = np.random.default_rng(h + i)
    shapes = [(e, 2 * i, h // 2), (e, 2 * i, h // 32), (e, h, i // 2), (e, h, i // 32)]
    return Experts(*(rng.integers(0, 256, shape, np.uint8) for shape in shapes))


def as_torch(experts: Experts[Bytes], device: str) -> Experts[torch.Tensor]:
    return Experts(*(torch.from_numpy(x).to(device) for x in astuple(experts)))


def same(a: Any, b: Any) -> bool:
    pairs = zip(astuple(a), astuple(b), strict=True)
    return all(x.shape == y.shape and np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 64), (320, 96), (512, 256)])
def test_experts_come_back_padded_or_not(name: str, hidden: int, intermediate: int, device: str) -> None:
    layout, undo, multiple = MOE[name]
    plain = random_experts(2, hidden, intermediate)
    larger = operands.pad_experts(plain, -(-hidden // 256) * 256, -(-intermediate // multiple) * multiple)
    assert same(operands.unpad_experts(larger, hidden, intermediate), plain)
    laid_out = layout(larger)
    assert same(undo(laid_out), larger)
    assert same(operands.unpad_experts(undo(laid_out), hidden, intermediate), plain)
    with_torch = layout(as_torch(larger, device))
    assert {x.device.type for x in astuple(with_torch)} == {device}
    assert same(Experts(*(x.cpu() for x in astuple(with_torch))), laid_out)
    assert same(Experts(*(x.cpu() for x in astuple(undo(with_torch)))), larger)


def test_padding_is_what_an_engine_leaves_there() -> None:
    plain = random_experts(1, 32, 32)
    larger = operands.pad_experts(plain, 64, 96)
    gate, up = larger.w13[0, :96], larger.w13[0, 96:]
    assert np.array_equal(gate[:32, :16], plain.w13[0, :32])
    assert np.array_equal(up[:32, :16], plain.w13[0, 32:])
    assert not gate[32:].any()
    assert not up[:, 16:].any()
    assert not larger.w2[0, 32:].any()
    assert set(larger.w13_scale[0, 32:96].ravel()) == set(larger.w2_scale[0, :, 1:].ravel()) == {1}
    a4w4 = operands.moe_a4w4(operands.pad_experts(plain, 256, 128))
    assert set(orders.unswz(a4w4.w2_scale)[..., 4:].ravel()) == {0}
    itlv = operands.moe_interleaved(operands.pad_experts(plain, 128, 128))
    assert set(orders.unswz(itlv.w2_scale)[..., 4:].ravel()) == {0x7F}


def test_interleaved_scales_with_padded_columns_are_read_in_their_place() -> None:
    plain = random_experts(2, 128, 128)
    out = operands.moe_interleaved(plain).w13_scale
    for expert, row, column in ((0, 0, 0), (1, 17, 3), (1, 200, 2), (0, 255, 1)):
        place = orders.swz_address(orders.gu16_row(row, 256), column, 8)
        assert out[expert].reshape(-1)[place] == plain.w13_scale[expert, row, column]


def test_tritons_experts_are_columns_of_pairs() -> None:
    plain = random_experts(2, 256, 256)
    for experts in (operands.moe_triton(plain), operands.moe_triton(as_torch(plain, "cpu"))):
        w13, w2 = (np.asarray(x) for x in (experts.w13, experts.w2))
        assert w13.shape == (2, 128, 512)
        assert w2.shape == (2, 128, 256)
        assert w13.strides[-2] == w2.strides[-2] == 1
        for gate in (0, 1, 100, 255):
            assert np.array_equal(w13[1, :, 2 * gate], plain.w13[1, gate])
            assert np.array_equal(w13[1, :, 2 * gate + 1], plain.w13[1, 256 + gate])
        assert np.array_equal(w2, plain.w2.swapaxes(1, 2))
        assert not np.shares_memory(w2, plain.w2)
        scale = np.asarray(experts.w13_scale)
        assert scale.shape == (2, 256, 16)
        memory = scale.swapaxes(1, 2).reshape(2, -1)
        for place, (row, column) in enumerate(swz_order(paired(512), 8)):
            assert memory[1, place] == plain.w13_scale[1, row, column]


def unswizzled(block: Bytes) -> Bytes:
    """What a Triton kernel does to scales it has loaded, [N/32, K], to have [N, K/32] of a tile: in registers."""
    n, k = block.shape[0] * 32, block.shape[1]
    return block.reshape(n // 32, k // 256, 4, 16, 2, 2).transpose(0, 5, 3, 1, 4, 2).reshape(n, k // 32)


@pytest.mark.parametrize(("n", "k"), [(32, 256), (64, 512), (512, 256)])
def test_what_tritons_kernels_load_is_the_plain_layer(n: int, k: int) -> None:
    """Tile by tile, as ``_moe_gemm_a16w4``, ``_moe_gemm_a4w4`` and ``_gemm_afp4wfp4_preshuffle_kernel`` read.

    Which elements a tile has, ``unswizzle_mx_scale_cdna4``, the order of a tile of the dense weight, and the columns
    that ``_swiglu`` takes for gate and up: ROCm/aiter, ``aiter/ops/triton/_triton_kernels`` (40a9537, 0dc0617, 029a0a1,
    a3dc140). That is how its kernels read, and not how its functions write, which are elsewhere.
    """

    def tiles(x: Bytes, units: tuple[int, int], order: Callable[[Bytes], Bytes]) -> Bytes:
        """All tiles of n rows and k columns; a row of ``x`` has units[0] rows, and units[1] bytes for 32 columns."""
        down, across = n // units[0], k * units[1] // 32
        rows = [
            np.hstack([order(x[r : r + down, c : c + across]) for c in range(0, x.shape[1], across)])
            for r in range(0, x.shape[0], down)
        ]
        return np.vstack(rows)

    plain = random_experts(2, 512, 512)
    laid_out = operands.moe_triton(plain)
    for e in range(2):
        for name, halves in (("w13", 2), ("w2", 1)):
            codes = tiles(getattr(laid_out, name)[e].T, (1, 16), lambda block: block)
            scales = tiles(getattr(laid_out, f"{name}_scale")[e].T, (32, 32), unswizzled)
            for got, expected in ((codes, getattr(plain, name)[e]), (scales, getattr(plain, f"{name}_scale")[e])):
                columns = got.reshape(len(got) // halves, halves, -1).swapaxes(0, 1)  # of the result: gate, up, gate
                assert np.array_equal(columns.reshape(expected.shape), expected)

    rng = np.random.default_rng(0)
    layer = Linear(rng.integers(0, 256, (512, 256), np.uint8), rng.integers(0, 256, (512, 16), np.uint8))
    dense = operands.dense_triton(layer)
    codes = tiles(
        dense.weight,
        (16, 256),
        lambda block: block.reshape(n // 16, k // 64, 2, 16, 16).transpose(0, 3, 1, 2, 4).reshape(n, k // 2),
    )
    assert np.array_equal(codes, layer.weight)
    assert np.array_equal(tiles(dense.scale, (32, 32), unswizzled), layer.scale)


def test_dense_layers_come_back() -> None:
    rng = np.random.default_rng(0)
    layer = Linear(rng.integers(0, 256, (96, 256), np.uint8), rng.integers(0, 256, (96, 16), np.uint8))
    asm, triton = operands.dense_asm(layer), operands.dense_triton(layer)
    assert triton.weight.shape == (6, 4096)
    assert triton.scale.shape == (3, 512)
    assert triton.weight.tobytes() == asm.weight.tobytes()
    assert triton.scale.tobytes() == asm.scale.tobytes()
    assert same(operands.undo_dense_asm(asm), layer)
    assert same(operands.undo_dense_triton(triton), layer)
    with_torch = Linear(torch.from_numpy(layer.weight), torch.from_numpy(layer.scale))
    assert same(operands.dense_triton(with_torch), triton)
    assert same(operands.undo_dense_triton(operands.dense_triton(with_torch)), layer)


# --- what does not fit


def zeros(*shape: int) -> Bytes:
    return np.zeros(shape, np.uint8)


def dense(n: int, k: int) -> Linear[Bytes]:
    return Linear(zeros(n, k // 2), zeros(n, k // 32))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "TILE16 rows": (lambda: orders.tile16(zeros(24, 32)), r"TILE16 of \[24, 32\]: N = 24 is not a multiple of 16"),
    "TILE16 columns": (lambda: orders.tile16(zeros(2, 16, 48)), r"TILE16 of \[2, 16, 48\]: K/2 = 48 .* of 32"),
    "TILE16 undone": (lambda: orders.untile16(zeros(24, 32)), r"\[24, 32\]: N = 24 .* of 16"),
    "TILE16 GU16 rows": (
        lambda: orders.tile16(zeros(48, 64), True),
        r"TILE16 with GU16 of \[48, 64\]: N = 48 .* of 32",
    ),
    "TILE16 GU16 columns": (lambda: orders.tile16(zeros(32, 32), True), r"\[32, 32\]: K/2 = 32 .* of 64"),
    "one axis": (lambda: orders.tile16(zeros(32)), r"TILE16 of \[32\]: rows and columns are needed"),
    "SWZ rows": (lambda: orders.swz(zeros(100, 8)), r"SWZ of \[100, 8\]: rows = 100 .* of 32"),
    "SWZ columns": (lambda: orders.swz(zeros(32, 12)), r"SWZ of \[32, 12\]: K/32 = 12 .* of 8"),
    "SWZ undone": (lambda: orders.unswz(zeros(32, 12)), r"SWZ of \[32, 12\]"),
    "GU16": (lambda: orders.gu16(zeros(48, 5)), r"GU16 of \[48, 5\]: rows = 48 .* of 32"),
    "pairs": (lambda: orders.pairs(zeros(3, 5)), r"pairing of \[3, 5\]: rows = 3 .* of 2"),
    "dense N": (lambda: operands.dense_asm(dense(48, 256)), r"dense_asm of \[48, 128\]: N = 48 .* of 32"),
    "dense K": (lambda: operands.dense_asm(dense(32, 128)), r"dense_asm of \[32, 64\]: K = 128 .* of 256"),
    "dense Triton K": (lambda: operands.dense_triton(dense(32, 320)), r"dense_triton of .*: K = 320 .* of 256"),
    "dense scale": (
        lambda: operands.dense_asm(Linear(zeros(32, 128), zeros(32, 16))),
        r"scale \[32, 16\] is not \[N, K/32\] with N = 32, K = 256",
    ),
    "dense axes": (lambda: operands.dense_asm(Linear(zeros(1, 32, 128), zeros(1, 32, 8))), r"a weight is \[N, K/2\]"),
    "dense Triton undone": (lambda: operands.undo_dense_triton(dense(32, 256)), r"scale \[32, 8\] is not \[N/32, K\]"),
    "dense Triton weight": (lambda: operands.undo_dense_triton(Linear(zeros(2, 24), zeros(1, 8))), r"\[2, 24\] is not"),
    "H a4w4": (
        lambda: operands.moe_a4w4(random_experts(1, 128, 128)),
        r"moe_a4w4 of \[1, 128, 64\]: H = 128 .* of 256",
    ),
    "I a4w4": (lambda: operands.moe_a4w4(random_experts(1, 256, 64)), r"moe_a4w4 of \[1, 256, 32\]: I = 64 .* of 128"),
    "H interleaved": (lambda: operands.moe_interleaved(random_experts(1, 64, 128)), r"H = 64 .* of 128"),
    "I interleaved": (lambda: operands.moe_interleaved(random_experts(1, 128, 192)), r"I = 192 .* of 128"),
    "H Triton": (lambda: operands.moe_triton(random_experts(1, 128, 256)), r"moe_triton of .*: H = 128 .* of 256"),
    "I Triton": (lambda: operands.moe_triton(random_experts(1, 256, 128)), r"moe_triton of .*: I = 128 .* of 256"),
    "experts apart": (
        lambda: operands.moe_a4w4(replace(random_experts(1, 256, 128), w13=zeros(1, 256, 64))),
        r"moe_a4w4: w13 is \[1, 256, 64\], not \[1, 256, 128\] as w2 of \[1, 256, 64\] asks for",
    ),
    "experts of two axes": (
        lambda: operands.moe_a4w4(replace(random_experts(1, 256, 128), w2=zeros(256, 64))),
        r"w2 of \[256, 64\] has no three axes",
    ),
    "undone twice": (
        lambda: operands.undo_moe_a4w4(operands.undo_moe_a4w4(operands.moe_a4w4(random_experts(1, 256, 128)))),
        r"moe_a4w4: w2_scale is \[1, 256, 4\], not \[1, 256, 8\]",
    ),
    "Triton undone twice": (lambda: operands.undo_moe_triton(random_experts(1, 256, 512)), r"moe_triton: w13 is "),
    "padded smaller": (
        lambda: operands.pad_experts(random_experts(1, 256, 128), 256, 64),
        r"I = 128 does not fit into 64",
    ),
    "padded to a part of a block": (
        lambda: operands.pad_experts(random_experts(1, 256, 128), 272, 128),
        r"H = 272 is not a multiple of 32",
    ),
    "cut larger": (
        lambda: operands.unpad_experts(random_experts(1, 256, 128), 512, 128),
        r"H = 512 is larger than 256",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_shape_and_rule(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("function", [orders.tile16, orders.swz, orders.gu16, orders.pairs, orders.pad_scale])
@pytest.mark.parametrize("x", [np.zeros((32, 64), np.int8), torch.zeros(32, 64), np.zeros((32, 64), ">u2")], ids=str)
def test_only_bytes_are_moved(function: Layout, x: Any) -> None:
    with pytest.raises(TypeError, match=r"uint8, not .*view it as uint8 first"):
        function(x)
