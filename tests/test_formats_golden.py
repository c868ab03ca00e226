"""Bytes that AMD Quark and AITER wrote themselves.

``quark_mxfp4_*.npz``: amd-quark 0.13 on a CPU, blocks of several kinds with the bytes it wrote for them in each of its
modes. ``aiter_mxfp4.npz``: AITER's own quantizer in PyTorch (``per_1x32_f4_quant``, after 0.1.20). Floats are stored
by their bits; bfloat16 as uint16, in ``quark_mxfp4_even.npz`` as float32.
"""

from pathlib import Path

import mxfp4_oracle as oracle
import numpy as np
import numpy.typing as npt
import pytest
import torch

from mxq.formats import mxfp4

DATA = Path(__file__).parent / "data"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODES = ("even", "floor", "ceil", "diffs")


class Blocks:
    """Blocks of one kind: ``x`` [n, 32], their ``packed`` [n, 16] and ``scale`` [n] as somebody else wrote them."""

    def __init__(self, x: npt.NDArray[np.float32], packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8]) -> None:
        self.x, self.packed, self.scale = x, packed, scale
        self.amax = np.abs(x).max(axis=-1)

    def __getitem__(self, chosen: npt.NDArray[np.bool_]) -> "Blocks":
        return Blocks(self.x[chosen], self.packed[chosen], self.scale[chosen])

    def __len__(self) -> int:
        return len(self.x)

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        return oracle.unpack(self.packed)

    def quantized(self, dtype: torch.dtype, rule: str) -> "Blocks":
        packed, scale = mxfp4.quantize(torch.from_numpy(self.x).to(dtype), rule)
        return Blocks(self.x, packed.numpy(), scale.numpy()[:, 0])


def quark(dtype: str, mode: str) -> Blocks:
    if mode == "even":
        vectors = np.load(DATA / "quark_mxfp4_even.npz")
        x = vectors[f"{dtype}_even_x_u32"].view(np.float32)
    else:
        vectors = np.load(DATA / "quark_mxfp4_rules.npz")
        x = widened(vectors[f"{dtype}_{mode}_x"])
    return Blocks(x, vectors[f"{dtype}_{mode}_packed"], vectors[f"{dtype}_{mode}_scale"])


def aiter_blocks(mode: str) -> Blocks:
    vectors = np.load(DATA / "aiter_mxfp4.npz")
    x = widened(vectors["x"]).reshape(-1, 32)
    return Blocks(x, vectors[f"{mode}_packed"].reshape(-1, 16), vectors[f"{mode}_scale"].reshape(-1))


def widened(bits: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16 if bits.dtype == np.uint16 else bits).view(np.float32)


def ordinary(blocks: Blocks) -> Blocks:
    """Blocks of zeros, and finite ones between 2^-120 and 2^120."""
    return blocks[(blocks.amax == 0) | ((blocks.amax >= 2.0**-120) & (blocks.amax <= 2.0**120))]


def off_by_a_logarithm(blocks: Blocks, dtype: str, mode: str) -> npt.NDArray[np.bool_]:
    """Where Quark's logarithm of the largest magnitude, taken in the input's type, rounds to the wrong side."""
    if mode == "even":
        return np.zeros(len(blocks), dtype=bool)
    function = torch.floor if mode == "floor" else torch.ceil
    exact = function(torch.log2(torch.from_numpy(blocks.amax).double()))
    return (function(torch.log2(torch.from_numpy(blocks.amax).to(DTYPES[dtype]))).double() != exact).numpy()


def squares_fit_float32(blocks: Blocks) -> npt.NDArray[np.bool_]:
    return (blocks.amax == 0) | ((blocks.amax > 2.0**-60) & (blocks.amax < 2.0**60))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_those_quark_writes(dtype: str, mode: str) -> None:
    blocks = ordinary(quark(dtype, mode))
    blocks = blocks[~off_by_a_logarithm(blocks, dtype, mode)]
    if mode == "diffs":
        blocks = blocks[squares_fit_float32(blocks)]
    assert len(blocks) > (500 if mode == "even" else 100)
    assert (blocks.amax == 0).sum() > 10
    ours = blocks.quantized(DTYPES[dtype], mode)
    np.testing.assert_array_equal(ours.scale, blocks.scale)
    np.testing.assert_array_equal(ours.packed, blocks.packed)


@pytest.mark.parametrize(
    ("dtype", "mode", "count"), [("float32", "floor", 5), ("bfloat16", "floor", 38), ("bfloat16", "ceil", 31)]
)
def test_scales_are_right_where_quark_rounds_the_logarithm(dtype: str, mode: str, count: int) -> None:
    blocks = ordinary(quark(dtype, mode))
    blocks = blocks[off_by_a_logarithm(blocks, dtype, mode)]
    assert len(blocks) == count
    ours = blocks.quantized(DTYPES[dtype], mode)
    codes, scale = oracle.quantize(blocks.x, mode)
    np.testing.assert_array_equal(ours.scale, scale)
    np.testing.assert_array_equal(ours.codes, codes)
    # Quark's logarithm reaches a power of two from below and falls back to one from above.
    np.testing.assert_array_equal(blocks.scale.astype(int) - ours.scale, 1 if mode == "floor" else -1)


def test_diffs_compares_where_quark_cannot() -> None:
    """Quark's squares overflow and vanish far from 1, and in bfloat16 its two scales can be one binade too low."""
    for dtype in DTYPES:
        blocks = ordinary(quark(dtype, "diffs"))
        ours = blocks.quantized(DTYPES[dtype], "diffs")
        codes, scale = oracle.quantize(blocks.x, "diffs")
        np.testing.assert_array_equal(ours.scale, scale)
        np.testing.assert_array_equal(ours.codes, codes)
        differs = ours.scale != blocks.scale
        far = ~squares_fit_float32(blocks)
        assert (differs & far).sum() >= 20
        kept_ceil = blocks[differs & far].scale == oracle.exponents(blocks[differs & far].x, "ceil") + 127
        assert kept_ceil.mean() > 0.8  # the others: see off_by_a_logarithm
        assert (differs & ~far).tolist() == (differs & ~far & off_by_a_logarithm(blocks, dtype, "diffs")).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_the_far_ends_are_right_and_quark_is_at_least_two_times_off_near_the_lowest_scale(
    dtype: str, mode: str
) -> None:
    blocks = quark(dtype, mode)
    blocks = blocks[np.isfinite(blocks.amax) & (blocks.amax > 0)]
    far = blocks[(blocks.amax < 2.0**-120) | (blocks.amax > 2.0**120)]
    assert len(far) > 90
    ours = far.quantized(DTYPES[dtype], mode)
    codes, scale = oracle.quantize(far.x, mode)
    np.testing.assert_array_equal(ours.scale, scale)
    np.testing.assert_array_equal(ours.codes, codes)
    assert {1, 253 if mode == "even" else 252} <= set(ours.scale)
    assert ours.scale.max() <= 253

    # Where their rule asks for 2^-127 or less, Quark divides by that and stores the byte of 2^-126.
    tiny = far[(far.amax > 1.4 * 2.0**-127) & (far.amax < 1.5 * 2.0**-125)]
    assert len(tiny) > 10
    largest = np.abs(decoded(tiny)).max(axis=-1) / tiny.amax
    assert largest.min() > 1.5
    if mode == "even":
        huge = far[far.amax >= 1.75 * 2.0**127]
        assert set(huge.scale) == {254}  # one too high


def test_infinity_and_nan_are_what_quark_loses() -> None:
    """Quark writes finite bytes for them: here, a block that decodes to NaN."""
    for dtype in DTYPES:
        blocks = quark(dtype, "even")
        blocks = blocks[~np.isfinite(blocks.amax)]
        assert len(blocks) > 50
        assert blocks.scale.max() <= 254
        assert set(blocks.quantized(DTYPES[dtype], "even").scale) == {255}


@pytest.mark.parametrize("mode", ["rceil", *MODES[:3]])
def test_bytes_are_those_aiter_writes(mode: str) -> None:
    """Its own rule to the bit; of Quark's, AITER keeps the sign of zeros and writes byte 0 for a block of them."""
    blocks = ordinary(aiter_blocks(mode))
    assert len(blocks) == 22
    ours = blocks.quantized(torch.bfloat16, mode)
    zero = blocks.amax == 0
    assert zero.sum() == 1
    assert (blocks.codes == 8).sum() > 10
    assert blocks.scale[zero].tolist() == [0]
    np.testing.assert_array_equal(ours.scale[~zero], blocks.scale[~zero])
    if mode == "rceil":
        assert ours.scale[zero].tolist() == [0]
        np.testing.assert_array_equal(ours.packed, blocks.packed)
    else:
        assert ours.scale[zero].tolist() == [oracle.ZERO_BYTES[mode]]
        np.testing.assert_array_equal(ours.codes, np.where(blocks.codes == 8, 0, blocks.codes))


def decoded(blocks: Blocks) -> npt.NDArray[np.float32]:
    return oracle.e2m1(blocks.codes) * oracle.e8m0(blocks.scale)[:, None]
