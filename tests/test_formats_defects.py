"""Defects planted in the number format: the comparison with the oracle that the other tests make notices each."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import mxfp4_oracle as oracle
import numpy as np
import pytest
import torch
from torch import Tensor

from mxq.formats import elements, mxfp4, rules, scales

Plant = Callable[[pytest.MonkeyPatch], None]


def blocks() -> Iterator[Tensor]:
    """Blocks that tell rules apart: at every step of a rule and beside it, ties of codes and of scales, zeros."""
    bits = torch.tensor([0, 1, 1 << 21, (1 << 22) - 1, 1 << 22, (1 << 22) + 1, (3 << 21) - 1, 3 << 21, (1 << 23) - 1])
    steps = torch.zeros(len(bits), 32)
    steps[:, 5] = (bits.int() + (127 << 23)).view(torch.float32)
    steps[:, 6] = -0.01
    yield steps
    generator = torch.Generator().manual_seed(3)
    yield torch.randn(200, 32, generator=generator) * 0.02
    yield (torch.randn(400, 32, generator=generator) * 6).round() / 4
    clipped = torch.full((1, 32), 0.25)
    clipped[0, 0] = 4.0625
    yield torch.cat((clipped, torch.zeros(1, 32), torch.full((1, 32), -0.0), torch.full((1, 32), 2.0**-126)))


def right(rule: str) -> bool:
    for x in blocks():
        packed, scale = mxfp4.quantize(x, rule)
        codes, expected = oracle.quantize(x.numpy(), rule)
        if not (np.array_equal(scale.numpy()[:, 0], expected) and np.array_equal(oracle.unpack(packed.numpy()), codes)):
            return False
        decoded = torch.from_numpy(oracle.e2m1(codes) * oracle.e8m0(expected)[:, None])
        for ours in (mxfp4.fake_quantize(x, rule), mxfp4.dequantize(packed, scale, torch.float32)):
            if not (torch.equal(ours, decoded) and torch.equal(torch.signbit(ours), torch.signbit(decoded))):
                return False
    return True


@pytest.mark.parametrize("rule", rules.RULES)
def test_without_a_defect_every_rule_is_right(rule: str) -> None:
    assert right(rule)


def changed(rule: str, **fields: int | bool) -> Plant:
    """A rule with other constants."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setitem(rules.RULES, rule, replace(rules.RULES[rule], **fields))  # type: ignore[arg-type]
        patch.setitem(scales._CARRY, rule, torch.tensor(rules.RULES[rule].carry, dtype=torch.int32))

    return plant


CARRIES = {"floor": 0, "even": 1 << 21, "rceil": (1 << 22) - 1, "ceil": (1 << 23) - 1, "diffs": (1 << 23) - 1}


@pytest.mark.parametrize("rule", CARRIES)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_carry_that_is_one_off(rule: str, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(rule, carry=CARRIES[rule] + off)(monkeypatch)
    assert not right(rule)


@pytest.mark.parametrize(
    ("rule", "plant"),
    [
        ("rceil", changed("rceil", carry=1 << 22)),  # AITER before 0.1.16
        ("diffs", changed("diffs", finer=0)),
        ("diffs", changed("diffs", finer=2)),
        ("mse", changed("mse", finer=1)),
        ("mse", changed("mse", carry=1 << 21)),
        ("even", changed("even", signed_zero=True)),
        ("rceil", changed("rceil", signed_zero=False)),
        *((rule, changed(rule, zero_byte=127)) for rule in rules.RULES),
    ],
)
def test_a_rule_with_another_constant(rule: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert not right(rule)


def replaced(module: object, name: str, function: Callable[..., Tensor]) -> Plant:
    return lambda patch: patch.setattr(module, name, function)


def half_up(y: Tensor) -> Tensor:
    """Round ties away from zero."""
    return elements_rounded(torch.nextafter(y, y * 2))


def finer_of_equals(blocks: Tensor, scale: Tensor, finer: int) -> Tensor:
    errors = [((elements.rounded(blocks / s) * s - blocks) ** 2).sum(-1, keepdim=True) for s in lower(scale, finer)]
    best = torch.stack(errors[::-1]).argmin(dim=0)
    return scale - ((finer - best) << 23).int()


def largest_error(blocks: Tensor, scale: Tensor, finer: int) -> Tensor:
    """Compare the largest error and not the sum."""
    errors = [(elements.rounded(blocks / s) * s - blocks).abs().amax(-1, keepdim=True) for s in lower(scale, finer)]
    return scale - (torch.stack(errors).argmin(dim=0) << 23).int()


def lower(scale: Tensor, finer: int) -> list[Tensor]:
    return [(scale - (step << 23)).clamp(min=1 << 23).view(torch.float32) for step in range(finer + 1)]


elements_rounded, elements_encode, reciprocal = elements.rounded, elements.encode, scales.reciprocal


@pytest.mark.parametrize("rule", rules.RULES)
@pytest.mark.parametrize(
    "plant",
    [
        replaced(elements, "rounded", half_up),
        replaced(elements, "rounded", lambda y: elements_rounded(y).clamp(-3, 3)),
        replaced(elements, "rounded", lambda y: elements_rounded(y / 2) * 2),
        replaced(elements, "encode", lambda y, signed_zero: elements_encode(y, signed_zero=not signed_zero)),
        replaced(elements, "encode", lambda y, signed_zero: elements_encode(half_up(y), signed_zero=signed_zero)),
        replaced(elements, "encode", lambda y, signed_zero: elements_encode(y, signed_zero=signed_zero) ^ 8),
        replaced(mxfp4, "reciprocal", lambda scale: reciprocal(scale) * 2),
        replaced(mxfp4, "scale_values", lambda scale: torch.exp2(scale.float() - 128)),
        lambda patch: patch.setattr(elements, "VALUES", elements.VALUES[8:] + elements.VALUES[:8]),
        lambda patch: patch.setattr(scales, "_SMALLEST", 2 << 23),
    ],
    ids="half-up clamp coarse zero-sign code-half-up code-sign twice half-scale table smallest".split(),
)
def test_a_wrong_element_or_scale(rule: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert not right(rule)


@pytest.mark.parametrize("rule", ["diffs", "mse"])
@pytest.mark.parametrize("search", [finer_of_equals, largest_error, lambda blocks, scale, finer: scale])
def test_a_wrong_comparison_of_errors(
    rule: str, search: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scales, "_lowest_error", search)
    assert not right(rule)
