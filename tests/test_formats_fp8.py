"""FP8 in blocks means what ml_dtypes and torch say it does, to the bit, in float32 and as the nearest bfloat16."""

import ml_dtypes
import numpy as np
import pytest
import torch

from mxq.formats.fp8 import dequantize, values

ALL = np.arange(256, dtype=np.uint8)


def test_all_codes_mean_what_ml_dtypes_and_torch_say() -> None:
    theirs = ALL.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(values(), theirs)
    np.testing.assert_array_equal(values(), torch.from_numpy(ALL).view(torch.float8_e4m3fn).float().numpy())
    assert np.signbit(values()[0x80])
    assert set(ALL[np.isnan(values())]) == {0x7F, 0xFF}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_torchs(dtype: torch.dtype) -> None:
    """Every code under scales of every size: products that are subnormal, overflow, are NaN, tie between bfloat16."""
    rng = np.random.default_rng(0)
    scales = (rng.standard_normal(512) * np.exp2(rng.integers(-149, 128, 512))).astype(np.float32)
    scales[:4] = [0, 1, 1.0078125, -(2.0**127)]
    codes = np.tile(ALL, (len(scales), 1))
    out = np.empty(codes.shape, np.uint32 if dtype == torch.float32 else np.uint16)
    dequantize(codes, scales[:, None], np.arange(len(scales)), 256, out)
    product = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scales)[:, None]
    got = torch.from_numpy(out).view(dtype).float()
    torch.testing.assert_close(got, product.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit(), product.signbit())


def test_every_element_gets_the_scale_of_its_block() -> None:
    codes = np.full((70, 300), 0x38, np.uint8)  # ones
    scales = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    out = np.empty(codes.shape, np.uint32)
    dequantize(codes, scales, np.arange(70) // 32, 128, out)
    np.testing.assert_array_equal(out.view(np.float32), scales.repeat(32, 0).repeat(128, 1)[:70, :300])
