"""Every code under every scale in bfloat16: what the format says, bit for bit, and where bfloat16 ends."""

import ml_dtypes
import mxfp4_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxq.formats import mxfp4, tables
from mxq.formats.rules import BLOCK

# Row b: all 256 bytes of codes, 512 elements in 16 blocks, under scale byte b.
CODES = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
SCALES = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 512 // BLOCK, axis=1)


def bits(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy()


def test_every_byte_of_codes_under_every_scale_is_what_ml_dtypes_reads() -> None:
    values = tables.dequantize(torch.from_numpy(CODES), torch.from_numpy(SCALES))
    assert values.dtype == torch.bfloat16
    exact = oracle.e2m1(oracle.unpack(CODES)).astype(np.float64) * oracle.e8m0(SCALES[:, :1]).astype(np.float64)
    fits = np.abs(exact) < 2.0**128
    assert fits[: tables.SAFE_BYTE + 1].all()
    assert not fits[tables.SAFE_BYTE + 1].all()
    found = values.double().numpy()
    np.testing.assert_array_equal(found[fits], exact[fits])  # not one is rounded
    np.testing.assert_array_equal(np.signbit(found[fits]), np.signbit(exact[fits]))
    large = np.isfinite(exact) & ~fits
    np.testing.assert_array_equal(found[large], np.copysign(np.inf, exact[large]))
    assert np.isnan(found[255]).all()
    in_range = slice(0, tables.SAFE_BYTE + 1)
    as_bf16 = exact[in_range].astype(ml_dtypes.bfloat16).view(np.int16)
    np.testing.assert_array_equal(bits(values)[in_range], as_bf16)


def test_it_is_the_readable_reference_bit_for_bit() -> None:
    packed, scale = torch.from_numpy(CODES), torch.from_numpy(SCALES)
    reference = mxfp4.dequantize(packed, scale)
    np.testing.assert_array_equal(bits(tables.dequantize(packed, scale))[:255], bits(reference)[:255])
    assert reference[255].isnan().all()
    strided = packed.T.contiguous().T[:255, ::2], scale[:255, ::2]
    np.testing.assert_array_equal(bits(tables.dequantize(*strided)), bits(mxfp4.dequantize(*strided)))


def test_codes_and_scales_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        tables.dequantize(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_quantized_again_by_even_the_values_are_the_same_and_mostly_the_bytes_too(data: st.DataObject) -> None:
    """From scale byte 1 on and below 2^128 the values return, whichever rule chose the scales.

    The bytes return too where the largest magnitude is 4 or 6, as ``even`` itself always leaves it, or the scale is the
    lowest, and no zero is negative. Other blocks get a smaller scale with larger codes.
    """
    byte = data.draw(st.integers(1, tables.SAFE_BYTE))
    largest = data.draw(st.integers(0, 7))
    codes = data.draw(st.lists(st.integers(0, largest), min_size=BLOCK, max_size=BLOCK))
    codes[data.draw(st.integers(0, BLOCK - 1))] = largest
    signs = data.draw(st.lists(st.sampled_from([0, 8]), min_size=BLOCK, max_size=BLOCK))
    signed = torch.tensor([code | sign for code, sign in zip(codes, signs, strict=True)], dtype=torch.uint8)
    packed, scale = (signed[::2] | signed[1::2] << 4)[None], torch.tensor([[byte]], dtype=torch.uint8)
    values = tables.dequantize(packed, scale)
    again = mxfp4.quantize(values, "even")
    assert torch.equal(tables.dequantize(*again), values)  # -0 equals 0
    if (largest >= 6 or byte == 1) and 8 not in signed:
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1], scale)
