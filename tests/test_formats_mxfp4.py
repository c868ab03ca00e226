"""MXFP4 bytes: equal to AMD Quark's, and to what the format's own definition in ml_dtypes says."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mxq.formats import mxfp4

VECTORS = Path(__file__).parent / "data" / "quark_mxfp4_even.npz"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Values of four-bit codes, by ml_dtypes."""
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def e8m0(scale: np.ndarray) -> np.ndarray:
    """Values of scale bytes, by ml_dtypes."""
    return scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def oracle(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize finite float32 [..., 32] with ml_dtypes' rounding and a scale found by comparing, not by bits."""
    amax = np.abs(x).max(axis=-1, keepdims=True).astype(np.float64)
    exponent = np.full(amax.shape, -126)
    for candidate in range(-126, 127):
        exponent[amax >= 3.5 * 2.0**candidate] = candidate
    y = np.clip(x.astype(np.float64) / 2.0**exponent, -6, 6)
    codes = y.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes[codes == 8] = 0
    return codes, (exponent + 127).astype(np.uint8).squeeze(-1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, all NaN being one."""
    return a.dtype == b.dtype and np.array_equal(
        torch.nan_to_num(a.float(), nan=1e38).numpy().view(np.uint32),
        torch.nan_to_num(b.float(), nan=1e38).numpy().view(np.uint32),
    )


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_those_quark_writes(name: str) -> None:
    vectors = np.load(VECTORS)
    x = torch.from_numpy(vectors[f"{name}_even_x_u32"].view(np.float32).copy()).to(DTYPES[name])
    packed, scale = mxfp4.quantize(x)
    amax = x.float().abs().amax(-1)
    ours = ((amax == 0) | ((amax >= 2.0**-120) & (amax <= 2.0**120))).numpy()
    assert ours.sum() > 500
    np.testing.assert_array_equal(scale.numpy()[ours, 0], vectors[f"{name}_even_scale"][ours])
    np.testing.assert_array_equal(packed.numpy()[ours], vectors[f"{name}_even_packed"][ours])


@pytest.mark.parametrize("name", DTYPES)
def test_the_far_ends_decode_to_what_was_encoded_where_quark_is_two_times_off(name: str) -> None:
    vectors = np.load(VECTORS)
    x = torch.from_numpy(vectors[f"{name}_even_x_u32"].view(np.float32).copy()).to(DTYPES[name])
    amax = x.float().abs().amax(-1)
    tiny = (amax > 2.0**-126) & (amax < 1.75 * 2.0**-125)
    huge = torch.isfinite(amax) & (amax >= 1.75 * 2.0**127)
    assert tiny.any()
    assert huge.any()
    for blocks in (tiny, huge):
        packed, scale = mxfp4.quantize(x[blocks])
        codes, scales = oracle(x[blocks].float().numpy())
        np.testing.assert_array_equal(unpack(packed.numpy()), codes)
        np.testing.assert_array_equal(scale.numpy()[:, 0], scales)
        assert set(scales) <= {1, 253}
        theirs = vectors[f"{name}_even_packed"][blocks.numpy()], vectors[f"{name}_even_scale"][blocks.numpy()]
        assert not (np.array_equal(theirs[0], packed.numpy()) and np.array_equal(theirs[1], scale.numpy()[:, 0]))


def test_every_code_under_every_scale_decodes_as_ml_dtypes_says() -> None:
    packed = torch.arange(16, dtype=torch.uint8).repeat(256, 1)  # low nibble 0..15, high nibble 0
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    with np.errstate(over="ignore"):
        expected = e2m1(unpack(packed.numpy())) * e8m0(scale.numpy())
    assert same(mxfp4.dequantize(packed, scale, torch.float32), torch.from_numpy(expected))


def test_every_code_under_every_scale_survives_a_round_trip() -> None:
    """What is decoded is encoded again to the same value, whatever scale the encoder prefers for it."""
    packed = (torch.arange(16, dtype=torch.uint8) * 17).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8).view(255, 1)
    for dtype in DTYPES.values():
        x = mxfp4.dequantize(packed, scale, dtype)
        kept = torch.isfinite(x).all(-1) & (scale[:, 0] >= 1)
        again = mxfp4.dequantize(*mxfp4.quantize(x), dtype)
        assert kept.sum() == 252  # byte 0 is below the smallest scale written; 6 * 2^126 and above is infinite
        assert torch.equal(again[kept], x[kept])


def test_every_bfloat16_magnitude_rounds_as_ml_dtypes_says_under_every_scale() -> None:
    """The first element fixes the scale; the others run over all bfloat16 numbers up to it."""
    patterns = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    for exponent in range(-126, 127):
        largest = np.float32(6.0 * 2.0**exponent) if exponent < 126 else np.float32(3.5 * 2.0**126)
        near = patterns[(patterns <= largest) & (patterns >= largest / 128)]
        near = np.concatenate([near, -near])
        blocks = np.zeros((-(-near.size // 31), 32), dtype=np.float32)
        blocks[:, 1:].flat[: near.size] = near
        blocks[:, 0] = largest
        codes, scales = oracle(blocks)
        packed, scale = mxfp4.quantize(torch.from_numpy(blocks).to(torch.bfloat16))
        np.testing.assert_array_equal(scale.numpy()[:, 0], scales)
        np.testing.assert_array_equal(unpack(packed.numpy()), codes)


def test_ties_go_to_the_even_code_and_the_scale_steps_at_one_and_three_quarters() -> None:
    x = torch.zeros(2, 32)
    x[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    x[1, 0] = 6.99
    packed, scale = mxfp4.quantize(x)
    assert scale[:, 0].tolist() == [127, 127]
    assert unpack(packed.numpy())[0, :9].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 14]
    assert unpack(packed.numpy())[1, 0] == 7  # saturated
    assert mxfp4.quantize(torch.full((32,), 7.0))[1].tolist() == [128]
    assert mxfp4.quantize(torch.full((32,), 3.49))[1].tolist() == [126]


def test_zero_is_plus_zero_and_a_block_of_zeros_has_scale_byte_one() -> None:
    x = torch.zeros(2, 32)
    x[0] = -0.0
    x[1, :3] = torch.tensor([6.0, -0.2, -0.0])
    packed, scale = mxfp4.quantize(x)
    assert scale[:, 0].tolist() == [1, 127]
    assert packed[0].tolist() == [0] * 16
    assert unpack(packed.numpy())[1].tolist() == [7] + [0] * 31
    assert not torch.signbit(mxfp4.fake_quantize(x)).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_number_that_is_none_decodes_to_nan_and_its_neighbours_do_not(bad: float) -> None:
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 40] = bad
    packed, scale = mxfp4.quantize(x)
    assert scale[1].tolist() == [125, 255]
    assert packed[1, 16:].tolist() == [0] * 16
    for decoded in (mxfp4.dequantize(packed, scale), mxfp4.fake_quantize(x)):
        assert torch.isnan(decoded).sum(-1).tolist() == [0, 32, 0]
        assert torch.equal(decoded[1, :32], x[1, :32])


FLOATS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda blocks: 32 * blocks)),
    elements=st.floats(width=32) | st.floats(-8, 8, width=32),
)


@given(FLOATS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=200, deadline=None)
def test_fake_quantize_is_quantize_then_dequantize(values: np.ndarray, dtype: torch.dtype) -> None:
    x = torch.from_numpy(values).to(dtype)
    assert same(mxfp4.fake_quantize(x), mxfp4.dequantize(*mxfp4.quantize(x), dtype))


@given(FLOATS.filter(lambda values: bool(np.isfinite(values).all())))
@settings(max_examples=200, deadline=None)
def test_finite_blocks_match_the_oracle_and_quantizing_twice_changes_nothing(values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    packed, scale = mxfp4.quantize(x)
    codes, scales = oracle(values.reshape(*values.shape[:-1], -1, 32))
    np.testing.assert_array_equal(unpack(packed.numpy()), codes.reshape(values.shape))
    np.testing.assert_array_equal(scale.numpy(), scales)
    once = mxfp4.fake_quantize(x)
    finite = torch.isfinite(once).view(*scale.shape, 32).all(-1, keepdim=True).expand(*scale.shape, 32).reshape(x.shape)
    assert torch.equal(mxfp4.fake_quantize(once)[finite], once[finite])


@given(FLOATS.filter(lambda values: bool((np.abs(values) < 2.0**100).all())), st.integers(-20, 20))
@settings(max_examples=100, deadline=None)
def test_scaling_by_a_power_of_two_moves_only_the_scale_bytes(values: np.ndarray, shift: int) -> None:
    x = torch.from_numpy(np.where(np.abs(values) < 2.0**-90, 0, values).astype(np.float32))
    packed, scale = mxfp4.quantize(x)
    moved_packed, moved_scale = mxfp4.quantize(x * 2.0**shift)
    zero = scale == 1
    assert torch.equal(moved_packed, packed)
    assert torch.equal(moved_scale[~zero].int(), scale[~zero].int() + shift)
    assert (moved_scale[zero] == 1).all()


def test_shapes_lead_and_the_last_axis_is_packed() -> None:
    x = torch.randn(2, 3, 5, 96, generator=torch.Generator().manual_seed(0))
    packed, scale = mxfp4.quantize(x)
    assert (packed.shape, packed.dtype) == ((2, 3, 5, 48), torch.uint8)
    assert (scale.shape, scale.dtype) == ((2, 3, 5, 3), torch.uint8)
    one_by_one = [mxfp4.quantize(row) for row in x.reshape(-1, 96)]
    assert torch.equal(torch.stack([p for p, _ in one_by_one]).view(packed.shape), packed)
    transposed = torch.randn(64, 7, generator=torch.Generator().manual_seed(1)).T
    assert torch.equal(mxfp4.quantize(transposed)[0], mxfp4.quantize(transposed.contiguous())[0])
    assert torch.equal(mxfp4.fake_quantize(transposed), mxfp4.fake_quantize(transposed.contiguous()))


@pytest.mark.parametrize("function", [mxfp4.quantize, mxfp4.fake_quantize])
def test_what_cannot_be_quantized_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"\[4, 48\] is not a multiple of 32"):
        function(torch.zeros(4, 48))
    with pytest.raises(TypeError, match="float64"):
        function(torch.zeros(32, dtype=torch.float64))
    with pytest.raises(ValueError, match="'nearest'"):
        function(torch.zeros(32), "nearest")


def test_packed_and_scale_of_different_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        mxfp4.dequantize(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8))
