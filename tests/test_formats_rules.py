"""Scale rules: every magnitude, the errors that two of them compare, and what must hold for any block."""

import mxfp4_oracle as oracle
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mxq.formats import mxfp4
from mxq.formats.rules import RULES, scale_rule
from mxq.formats.scales import scale_bits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIMPLE = [name for name, rule in RULES.items() if not rule.finer]
SEARCHING = [name for name, rule in RULES.items() if rule.finer]
Floats = npt.NDArray[np.float32]


def exponents(x: Floats, rule: str) -> npt.NDArray[np.int64]:
    """What mxq stores for blocks [n, 32], none of zeros."""
    return mxfp4.quantize(torch.from_numpy(x), rule)[1].numpy()[..., 0].astype(np.int64) - 127


def bf16(x: Floats) -> Floats:
    return torch.from_numpy(x).bfloat16().float().numpy()


# Blocks of one binade or many, whose elements lie on the grid of some scale, halfway between, or anywhere.
GRID = st.sampled_from([value / 8 for value in range(129)])
BLOCKS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.just(32)),
    elements=st.one_of(GRID, GRID.map(lambda value: -value), st.floats(-16, 16, width=32), st.floats(-1, 1, width=32)),
    fill=st.sampled_from([0.0, 0.25, 1.0, -1.25]),
)
NORMAL = BLOCKS.map(lambda x: np.where(np.abs(x) < 2.0**-60, np.float32(0), x))
NONZERO = NORMAL.filter(lambda x: bool(x.any(axis=-1).all()))
ANY = hnp.arrays(np.float32, (2, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@pytest.mark.parametrize("rule", SIMPLE)
def test_every_bfloat16_magnitude_gets_the_scale_that_comparing_finds(rule: str) -> None:
    patterns = np.arange(1, 0x7F80, dtype=np.uint32)
    for bits in (patterns, patterns | 0x8000):
        x = (bits << 16).view(np.float32)[:, None] * np.eye(1, 32, 17, dtype=np.float32)
        np.testing.assert_array_equal(exponents(x, rule), oracle.exponents(x, rule))


@pytest.mark.parametrize("binade", [-127, -126, 0, 127])
def test_every_mantissa_carries_where_the_rule_says(binade: int) -> None:
    """In blocks of one element: all 2^23 mantissas of [1, 2), and of other binades some and those beside a step."""
    steps = torch.tensor([0, 1 << 22, 3 << 21, 1 << 23], dtype=torch.int32)
    beside = (steps[:, None] + torch.arange(-2, 3, dtype=torch.int32)).flatten().clamp(0, (1 << 23) - 1)
    mantissas = torch.cat((torch.arange(0, 1 << 23, 1 if binade == 0 else 1021, dtype=torch.int32), beside))
    amax = (mantissas + ((binade + 127) << 23)).view(torch.float32)
    value = amax.double()
    start = 2.0**binade if binade > -127 else 0.0
    above = {"floor": value < start, "even": value >= 1.75 * start, "rceil": value > 1.5 * start, "ceil": value > start}
    for rule in SIMPLE:
        expected = torch.full(amax.shape, binade - 2) + above[rule].long()
        actual = (scale_bits(amax[:, None], rule)[:, 0] >> 23) - 127
        assert torch.equal(actual.long(), expected.clamp(min=-126)), rule
    if binade >= 0:  # as AITER writes it: the float32 quotient's exponent, one more unless it is a power of two
        sixth = (amax / 6).view(torch.int32)
        by_division = (sixth >> 23) + ((sixth & 0x7FFFFF) != 0).int()
        assert torch.equal(scale_bits(amax[:, None], "rceil")[:, 0] >> 23, by_division)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_weights_are_quantized_as_the_oracle_does(rule: str, dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(300, 32, generator=generator) * 2.0 ** torch.randint(-12, 12, (300, 1), generator=generator)
    x[::3] = (x[::3] * 8).round() / 8  # ties, many of them between scales
    x[7], x[8], x[9, 3:] = 0.0, -0.0, 0.0
    x = x.to(DTYPES[dtype])
    packed, scale = mxfp4.quantize(x, rule)
    codes, scales = oracle.quantize(x.float().numpy(), rule)
    np.testing.assert_array_equal(scale.numpy()[:, 0], scales)
    np.testing.assert_array_equal(oracle.unpack(packed.numpy()), codes)


@pytest.mark.parametrize("rule", RULES)
@given(x=BLOCKS | ANY)
@settings(max_examples=60, deadline=None)
def test_any_finite_block_is_quantized_as_the_oracle_does(rule: str, x: Floats) -> None:
    packed, scale = mxfp4.quantize(torch.from_numpy(x), rule)
    codes, scales = oracle.quantize(x, rule)
    np.testing.assert_array_equal(scale.numpy()[:, 0], scales)
    np.testing.assert_array_equal(oracle.unpack(packed.numpy()), codes)


# At the scale 2^-1 the largest element, 4.0625, loses little more than 1, the others nothing; at 2^0 they become 0.
CLIPPED = np.full((1, 32), 0.25, dtype=np.float32) + np.eye(1, 32, dtype=np.float32) * np.float32(3.8125)


@given(x=NONZERO | ANY.filter(lambda x: bool(x.any(axis=-1).all())), narrow=st.booleans())
@example(x=CLIPPED, narrow=False)
@settings(max_examples=80, deadline=None)
def test_no_scale_at_all_has_a_lower_squared_error_than_that_of_mse(x: Floats, narrow: bool) -> None:
    x = bf16(x) if narrow else x
    x = x[np.isfinite(x).all(axis=-1) & x.any(axis=-1)]
    chosen = exponents(x, "mse")
    lowest = oracle.error(x, chosen)
    for distance in (-40, *range(-6, 7), 40):
        other = np.clip(chosen + distance, oracle.LOWEST, oracle.HIGHEST)
        this = oracle.error(x, other)
        assert (lowest <= this).all()
        # Of equals, the coarsest that is not coarser than ceil's.
        allowed = (other > chosen) & (other <= oracle.exponents(x, "ceil"))
        assert (lowest < this)[allowed].all()


def test_the_third_scale_of_mse_is_one_that_wins() -> None:
    assert exponents(CLIPPED, "mse").tolist() == [-1]
    assert exponents(CLIPPED, "diffs").tolist() == [1]
    assert exponents(CLIPPED, "ceil").tolist() == [1]


@given(x=NONZERO)
@settings(max_examples=100, deadline=None)
def test_diffs_takes_the_better_of_two_and_of_equals_the_coarser(x: Floats) -> None:
    ceil = oracle.exponents(x, "ceil")
    coarse, fine = oracle.error(x, ceil), oracle.error(x, np.maximum(ceil - 1, oracle.LOWEST))
    np.testing.assert_array_equal(exponents(x, "diffs"), np.where((fine < coarse).astype(bool), ceil - 1, ceil))


def test_ties_between_scales_keep_the_coarser() -> None:
    x = np.zeros((3, 32), dtype=np.float32)
    x[0, :3] = 3.0, 2.0, -1.0  # whole at ceil's scale 2^0 and at 2^-1
    x[1, :1] = 5.0  # 4 or 6 at either of 2^0 and 2^1
    x[2, :2] = 7.0, 0.5  # 8 or 6: either loses 1; and 0.5, a code or a tie to 0, that decides
    assert oracle.exponents(x, "ceil").tolist() == [0, 1, 1]
    for rule in SEARCHING:
        assert exponents(x, rule).tolist() == [0, 1, 0]


@pytest.mark.parametrize("rule", SEARCHING)
@given(x=NONZERO, order=st.permutations(range(32)), dtype=st.sampled_from(list(DTYPES.values())))
@settings(max_examples=100, deadline=None)
def test_the_order_of_elements_is_nothing_to_the_scale(
    rule: str, x: Floats, order: list[int], dtype: torch.dtype
) -> None:
    values = torch.from_numpy(x).to(dtype)
    packed, scale = mxfp4.quantize(values, rule)
    moved_packed, moved_scale = mxfp4.quantize(values[:, order], rule)
    assert torch.equal(moved_scale, scale)
    np.testing.assert_array_equal(oracle.unpack(moved_packed.numpy()), oracle.unpack(packed.numpy())[:, order])


@pytest.mark.parametrize("rule", SEARCHING)
@given(x=NONZERO)
@settings(max_examples=100, deadline=None)
def test_sums_of_errors_are_exact_in_float32_for_sixteen_bit_elements(rule: str, x: Floats) -> None:
    """What `rules` promises to whoever computes them in another order and without float64."""
    for dtype in (torch.bfloat16, torch.float16):
        blocks = torch.from_numpy(x).to(dtype).float()
        top = oracle.exponents(blocks.numpy(), "ceil")
        scale = torch.from_numpy(np.ldexp(np.float32(1), top))[:, None]
        first, *others = (
            torch.from_numpy(oracle.e2m1(oracle.codes_of(blocks.numpy(), top - step))) * 2.0**-step
            for step in range(RULES[rule].finer + 1)
        )
        for other in others:
            terms = (first - other) * (first + other - 2 * (blocks / scale))
            exact = (first - other).double() * (first.double() + other - 2 * (blocks / scale).double())
            assert torch.equal(terms.double(), exact)
            assert torch.equal(terms.cumsum(dim=-1).double(), exact.cumsum(dim=-1))


@pytest.mark.parametrize("rule", RULES)
@given(x=NORMAL, shift=st.integers(-50, 50))
@settings(max_examples=60, deadline=None)
def test_scaling_by_a_power_of_two_moves_only_the_scale_bytes(rule: str, x: Floats, shift: int) -> None:
    packed, scale = mxfp4.quantize(torch.from_numpy(x), rule)
    moved_packed, moved_scale = mxfp4.quantize(torch.from_numpy(np.ldexp(x, shift)), rule)
    zero = torch.from_numpy(~x.any(axis=-1, keepdims=True))
    assert torch.equal(moved_packed, packed)
    assert torch.equal(moved_scale.int(), scale.int() + torch.where(zero, 0, shift))
    assert set(scale[zero].tolist()) <= {oracle.ZERO_BYTES[rule]}


@pytest.mark.parametrize("rule", RULES)
@given(x=BLOCKS | ANY, dtype=st.sampled_from(list(DTYPES.values())))
@settings(max_examples=60, deadline=None)
def test_quantizing_what_was_quantized_changes_nothing(rule: str, x: Floats, dtype: torch.dtype) -> None:
    values = torch.from_numpy(x).to(dtype)
    once = mxfp4.dequantize(*mxfp4.quantize(values, rule), torch.float32)
    held = torch.isfinite(once).all(dim=-1)
    twice = mxfp4.dequantize(*mxfp4.quantize(once, rule), torch.float32)
    assert torch.equal(twice[held], once[held])


@pytest.mark.parametrize("rule", RULES)
@given(x=NORMAL)
@settings(max_examples=60, deadline=None)
def test_the_negative_of_a_block_has_its_scale_and_its_signs_turned(rule: str, x: Floats) -> None:
    packed, scale = mxfp4.quantize(torch.from_numpy(x), rule)
    turned_packed, turned_scale = mxfp4.quantize(torch.from_numpy(-x), rule)
    codes, turned = oracle.unpack(packed.numpy()), oracle.unpack(turned_packed.numpy())
    assert torch.equal(scale, turned_scale)
    unsigned_zero = (codes == 0) & (not RULES[rule].signed_zero)
    np.testing.assert_array_equal(turned, np.where(unsigned_zero, 0, codes ^ 8))


@given(x=ANY.filter(lambda x: bool(x.any(axis=-1).all())))
@settings(max_examples=100, deadline=None)
def test_rules_keep_their_order_and_two_never_saturate(x: Floats) -> None:
    found = {rule: exponents(x, rule) for rule in RULES}
    for finer, coarser in (("floor", "even"), ("even", "rceil"), ("rceil", "ceil"), ("mse", "ceil"), ("diffs", "ceil")):
        assert (found[finer] <= found[coarser]).all()
    amax = np.abs(x).max(axis=-1).astype(np.float64)
    for rule, most in (("ceil", 4.0), ("rceil", 6.0)):
        assert (amax <= most * 2.0 ** found[rule]).all()


def test_a_rule_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="'nearest'; use one of even, floor, ceil, rceil, diffs, mse"):
        scale_rule("nearest")
