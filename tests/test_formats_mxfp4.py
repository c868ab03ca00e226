"""MXFP4 tensors: every code, scale byte and bfloat16 number as ml_dtypes has them; shapes, edges, cost."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import mxfp4_oracle as oracle
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from mxq.formats import elements, mxfp4
from mxq.formats.rules import RULES
from mxq.formats.scales import reciprocal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, all NaN being one."""
    return a.dtype == b.dtype and np.array_equal(
        torch.nan_to_num(a.float(), nan=1e38).numpy().view(np.uint32),
        torch.nan_to_num(b.float(), nan=1e38).numpy().view(np.uint32),
    )


def bf16_patterns() -> npt.NDArray[np.float32]:
    """All bfloat16 numbers, NaN and infinities among them."""
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def test_every_byte_under_every_scale_decodes_as_ml_dtypes_says() -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
    with np.errstate(over="ignore"):
        expected = oracle.e2m1(oracle.unpack(packed.numpy())) * np.repeat(oracle.e8m0(scale.numpy()), 32, axis=1)
    assert same(mxfp4.dequantize(packed, scale, torch.float32), torch.from_numpy(expected))
    assert same(mxfp4.scale_values(scale[:, 0]), torch.from_numpy(oracle.e8m0(scale[:, 0].numpy())))


@pytest.mark.parametrize("rule", RULES)
def test_every_code_under_every_scale_survives_a_round_trip(rule: str) -> None:
    """What is decoded is encoded again to the same value, whatever scale the rule prefers for it."""
    codes = torch.arange(16, dtype=torch.uint8)
    if rule == "ceil":
        codes[codes & 7 == 7] -= 1  # it never writes 6, for which it would double the scale
    packed = (codes * 17).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8).view(255, 1)
    for dtype in (torch.float32, torch.bfloat16):
        x = mxfp4.dequantize(packed, scale, dtype)
        kept = torch.isfinite(x).all(-1) & (scale[:, 0] >= 1)
        again = mxfp4.dequantize(*mxfp4.quantize(x, rule), dtype)
        assert kept.sum() == 252  # byte 0 is below the smallest scale written; 6 * 2^126 and above is infinite
        assert torch.equal(again[kept], x[kept])


def test_every_bfloat16_number_rounds_as_ml_dtypes_says_under_every_scale() -> None:
    """All 65,536, saturated ones too: what the elements of a block go through once its scale is known."""
    patterns = bf16_patterns()
    finite = patterns[np.isfinite(patterns)]
    magnitude = np.abs(finite.astype(np.float64))
    for byte in range(1, 254):
        scale = torch.tensor(byte << 23, dtype=torch.int32)
        y = torch.from_numpy(finite) * reciprocal(scale)
        exponent = np.full(finite.shape[:1], byte - 127)
        expected = oracle.codes_of(finite[:, None], exponent)[:, 0]
        held = (y.abs() < 2.0**100).numpy()
        assert held[magnitude <= 16 * 2.0 ** (byte - 127)].all()  # no rule lets a block go beyond 16
        codes = elements.encode(y, signed_zero=True).numpy()
        np.testing.assert_array_equal(codes[held], expected[held])
        unsigned = elements.encode(y, signed_zero=False).numpy()
        np.testing.assert_array_equal(unsigned, np.where(codes == 8, 0, codes))
        np.testing.assert_array_equal(elements.rounded(y).numpy()[held], oracle.e2m1(expected)[held])


@pytest.mark.parametrize("rule", ["even", "rceil"])
def test_every_bfloat16_number_up_to_a_blocks_largest_gets_its_code(rule: str) -> None:
    """The first element fixes the scale; the others run over all numbers up to it that are not next to nothing."""
    patterns = bf16_patterns()
    for exponent in range(oracle.LOWEST, oracle.HIGHEST + 1):
        largest = np.float32(6.0 * 2.0**exponent) if exponent < 126 else np.float32(3.5 * 2.0**126)
        near = patterns[(np.abs(patterns) <= largest) & (np.abs(patterns) >= largest / 128)]
        blocks = np.zeros((-(-near.size // 31), 32), dtype=np.float32)
        blocks[:, 1:].flat[: near.size] = near
        blocks[:, 0] = largest
        codes, scales = oracle.quantize(blocks, rule)
        packed, scale = mxfp4.quantize(torch.from_numpy(blocks).to(torch.bfloat16), rule)
        np.testing.assert_array_equal(scale.numpy()[:, 0], scales)
        np.testing.assert_array_equal(oracle.unpack(packed.numpy()), codes)


def test_ties_go_to_the_even_code_and_scales_step_where_the_rule_says() -> None:
    x = torch.zeros(2, 32)
    x[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    x[1, 0] = 6.99
    packed, scale = mxfp4.quantize(x)
    assert scale[:, 0].tolist() == [127, 127]
    assert oracle.unpack(packed.numpy())[0, :9].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 14]
    assert oracle.unpack(packed.numpy())[1, 0] == 7  # saturated
    steps = {
        "floor": ((3.99, 126), (4.0, 127), (7.99, 127), (8.0, 128)),
        "even": ((3.49, 126), (3.5, 127), (6.99, 127), (7.0, 128)),
        "rceil": ((3.0, 126), (3.01, 127), (6.0, 127), (6.01, 128)),
        "ceil": ((2.0, 126), (2.01, 127), (4.0, 127), (4.01, 128)),
    }
    for rule, cases in steps.items():
        for amax, byte in cases:
            assert mxfp4.quantize(torch.full((32,), amax), rule)[1].tolist() == [byte], (rule, amax)


@pytest.mark.parametrize("rule", RULES)
def test_zeros_have_the_sign_and_the_scale_byte_of_the_rules_author(rule: str) -> None:
    x = torch.zeros(3, 32)
    x[0] = -0.0
    x[2, :4] = torch.tensor([6.0, -0.2, -0.0, 0.2])
    packed, scale = mxfp4.quantize(x, rule)
    kept = 8 if rule == "rceil" else 0
    zero_byte = oracle.ZERO_BYTES[rule]
    assert scale[:2, 0].tolist() == [zero_byte, zero_byte]
    assert set(packed[0].tolist()) == {kept << 4 | kept}
    assert set(packed[1].tolist()) == {0}
    assert oracle.unpack(packed.numpy())[2, 1:4].tolist() == [kept, kept, 0]
    negative = torch.signbit(mxfp4.fake_quantize(x, rule))
    assert negative.any(-1).tolist() == [rule == "rceil", False, rule == "rceil"]


@pytest.mark.parametrize("rule", RULES)
def test_a_block_with_a_number_that_is_none_decodes_to_nan_and_its_neighbours_do_not(rule: str) -> None:
    patterns = bf16_patterns()
    bad = torch.from_numpy(patterns[~np.isfinite(patterns)]).to(torch.bfloat16)
    assert len(bad) == 256
    x = torch.ones(len(bad), 96, dtype=torch.bfloat16)
    x[:, 40] = bad
    x[:, 41] = -0.0
    packed, scale = mxfp4.quantize(x, rule)
    assert (scale[:, 1] == 255).all()
    assert (packed[:, 16:32] == 0).all()
    assert (scale[:, ::2] == scale[0, 0]).all()
    for decoded in (mxfp4.dequantize(packed, scale), mxfp4.fake_quantize(x, rule)):
        assert torch.isnan(decoded[:, 32:64]).all()
        assert torch.equal(decoded[:, :32], x[:, :32])
        assert torch.equal(decoded[:, 64:], x[:, 64:])


@pytest.mark.parametrize("rule", RULES)
@given(
    values=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda blocks: 32 * blocks)),
        elements=st.floats(width=32) | st.floats(-8, 8, width=32),
    ),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=80, deadline=None)
def test_fake_quantize_is_quantize_then_dequantize(
    rule: str, values: npt.NDArray[np.float32], dtype: torch.dtype
) -> None:
    x = torch.from_numpy(values).to(dtype)
    assert same(mxfp4.fake_quantize(x, rule), mxfp4.dequantize(*mxfp4.quantize(x, rule), dtype))


class Operations(TorchDispatchMode):
    """Counts the operations that do work: not views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and not func.name().startswith("aten::_unsafe_view"):
            self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rule", "most"), [("even", 19), ("floor", 19), ("ceil", 19), ("rceil", 20)])
def test_fake_quantize_is_few_operations_and_no_tables(rule: str, most: int) -> None:
    """It runs before every quantized linear of a decode step, where an operation costs more than its numbers."""
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    with Operations() as counted:
        mxfp4.fake_quantize(x, rule)
    assert counted.names.total() <= most, counted.names
    assert not {"aten::index.Tensor", "aten::gather", "aten::index_select"} & set(counted.names)


def test_shapes_lead_and_the_last_axis_is_packed() -> None:
    x = torch.randn(2, 3, 5, 96, generator=torch.Generator().manual_seed(0))
    transposed = torch.randn(64, 7, generator=torch.Generator().manual_seed(1)).T
    for rule in RULES:
        packed, scale = mxfp4.quantize(x, rule)
        assert (packed.shape, packed.dtype) == ((2, 3, 5, 48), torch.uint8)
        assert (scale.shape, scale.dtype) == ((2, 3, 5, 3), torch.uint8)
        one_by_one = [mxfp4.quantize(row, rule) for row in x.reshape(-1, 96)]
        assert torch.equal(torch.stack([p for p, _ in one_by_one]).view(packed.shape), packed)
        assert torch.equal(mxfp4.quantize(transposed, rule)[0], mxfp4.quantize(transposed.contiguous(), rule)[0])
        assert torch.equal(mxfp4.fake_quantize(transposed, rule), mxfp4.fake_quantize(transposed.contiguous(), rule))
        assert mxfp4.quantize(x[:0], rule)[0].shape == (0, 3, 5, 48)


@pytest.mark.parametrize("function", [mxfp4.quantize, mxfp4.fake_quantize])
def test_what_cannot_be_quantized_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match=r"\[4, 48\] is not a multiple of 32"):
        function(torch.zeros(4, 48))
    with pytest.raises(TypeError, match="float64"):
        function(torch.zeros(32, dtype=torch.float64))
    with pytest.raises(ValueError, match="'nearest'"):
        function(torch.zeros(32), "nearest")


def test_the_input_is_left_as_it_was() -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    for rule in RULES:
        mxfp4.quantize(x, rule)
        mxfp4.fake_quantize(x, rule)
    assert torch.equal(x, before)


def test_packed_and_scale_of_different_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        mxfp4.dequantize(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8))
