"""Codes and scales against the source: which rule made them, what was done to them, and what is damage."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import foreign
import pytest
import torch
from checkpoints import Tensors, read_all, rewrite
from conversion import convert

from mxq.formats import mxfp4
from mxq.formats.rules import RULES
from mxq.layouts import aiter as orders
from mxq.verify.findings import Problem
from mxq.verify.requantize import FLOOR_DB
from mxq.verify.run import verify

LAYER = "model.language_model.layers.1."
UP, DOWN = LAYER + "mlp.up_proj", LAYER + "mlp.down_proj"
OUT = LAYER + "linear_attn.out_proj"  # square
EXPERTS = "model.language_model.layers.2.mlp.experts"


def converted(source: Path, out: Path) -> Path:
    return foreign.quark(convert(source, out / "ours"), out / "quark")


@pytest.fixture(scope="module")
def dense(dense_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(dense_source, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def moe(moe_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(moe_source, tmp_path_factory.mktemp("moe"))


def defective(original: Path, directory: Path, edit: Callable[[Tensors], object]) -> Path:
    path = shutil.copytree(original, directory / "defective")
    rewrite(path, edit)
    return path


def found(path: Path, source: Path, rows: int = 0) -> tuple[list[Problem], str]:
    report = verify(path, source, rows=rows)
    return report.problems, report.checks[-1].covered


def quantize_again(tensors: Tensors, source: Path, rule: Callable[[str], str]) -> None:
    originals = read_all(source)
    for name in [name for name in tensors if f"{name}_scale" in tensors]:
        tensors[name], tensors[f"{name}_scale"] = mxfp4.quantize(originals[name], rule(name))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [0, 16])
def test_the_rule_that_another_tool_used_is_found(
    dense: Path, dense_source: Path, tmp_path: Path, rule: str, rows: int
) -> None:
    path = defective(dense, tmp_path, lambda tensors: quantize_again(tensors, dense_source, lambda name: rule))
    problems, covered = found(path, dense_source, rows)
    assert problems == []
    assert re.search(rf"the scale rule (\w+ or )*{rule}( or \w+)* makes 100\.00% of the blocks", covered)
    assert ("though the config says even" in covered) == (rule != "even")


def test_zeros_of_any_sign_and_scale_are_zeros(dense: Path, tmp_path: Path, dense_source: Path) -> None:
    source = shutil.copytree(dense_source, tmp_path / "source")
    rewrite(source, lambda tensors: tensors[f"{UP}.weight"][:3].zero_())

    def edit(tensors: Tensors) -> None:
        tensors[f"{UP}.weight"][:3] = torch.tensor([0x08, 0x80, 0x88], dtype=torch.uint8)[:, None]
        tensors[f"{UP}.weight_scale"][:3] = torch.tensor([0, 104, 1], dtype=torch.uint8)[:, None]

    assert found(defective(dense, tmp_path, edit), source)[0] == []


def test_a_weight_that_became_zeros_and_zeros_that_became_one(dense: Path, dense_source: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{UP}.weight"].zero_()
        tensors[f"{UP}.weight_scale"].zero_()

    (problem,) = found(defective(dense, tmp_path, edit), dense_source)[0]
    assert problem.what == f"{UP} (0.0 dB) is not what the source's weight is in MXFP4, nor near it"
    source = shutil.copytree(dense_source, tmp_path / "source")
    rewrite(source, lambda tensors: tensors[f"{UP}.weight"].zero_())
    assert found(dense, source)[0][0].what.startswith(f"{UP} (-inf dB) is not what the source's weight is")


@pytest.mark.parametrize("form", [foreign.compressed_tensors, foreign.autoround])
def test_one_code_or_scale_that_changed_is_damage_whatever_the_rule(
    dense: Path, dense_source: Path, tmp_path: Path, form: Callable[[Path, Path], Path]
) -> None:
    def edit(tensors: Tensors) -> None:
        quantize_again(tensors, dense_source, lambda name: "floor" if "mlp" in name else "mse")
        tensors[f"{UP}.weight"][300, 17] ^= 0x10
        tensors[f"{DOWN}.weight_scale"][9, 3] += 1

    path = shutil.copytree(dense.parent / "ours", tmp_path / "ours")
    rewrite(path, edit)
    (problem,) = found(form(path, tmp_path / "theirs"), dense_source)[0]
    assert problem.places == (f"{DOWN} row 9", f"{UP} row 300")


def test_tuned_codes_are_no_damage_as_long_as_they_are_near(dense: Path, dense_source: Path, tmp_path: Path) -> None:
    """As GPTQ and SignRound: a tenth of the codes is rounded the other way."""
    generator = torch.Generator().manual_seed(1)

    def tune(tensors: Tensors) -> None:
        for name in [name for name in tensors if f"{name}_scale" in tensors]:
            codes = tensors[name]
            step = torch.rand(codes.shape, generator=generator) < 0.2
            up = step & ((codes & 7) > 0) & ((codes & 7) < 7)
            tensors[name] = torch.where(up, codes + 1, codes)

    path = defective(dense, tmp_path, tune)
    problems, covered = found(path, dense_source)
    assert problems == []
    assert "codes are tuned, not rounded" in covered
    rewrite(path, lambda tensors: tensors[f"{UP}.weight"].copy_(tensors[f"{UP}.weight"].flip(0)))
    (problem,) = found(path, dense_source)[0]
    assert problem.what.startswith(f"{UP} (-")


def swap_nibbles(tensors: Tensors) -> None:
    for name in [name for name in tensors if f"{name}_scale" in tensors]:
        tensors[name] = tensors[name] << 4 | tensors[name] >> 4


def test_nibbles_swapped_everywhere(dense: Path, dense_source: Path, tmp_path: Path) -> None:
    (problem,) = found(defective(dense, tmp_path, swap_nibbles), dense_source)[0]
    assert len(problem.places) == 25  # more than are looked into
    assert "the two codes of every byte are swapped" in problem.what


@pytest.mark.parametrize(("shift", "words"), [(1, "1 too high"), (-1, "1 too low"), (3, "3 too high")])
def test_scales_that_are_off(dense: Path, dense_source: Path, tmp_path: Path, shift: int, words: str) -> None:
    path = defective(dense, tmp_path, lambda tensors: tensors[f"{UP}.weight_scale"].add_(shift))
    (problem,) = found(path, dense_source)[0]
    assert problem.what.startswith(f"{UP} (")
    assert problem.what.endswith(f"the scale bytes are {words}")


def test_the_mildest_defect_is_below_the_floor_and_the_worst_rounding_above(dense_source: Path) -> None:
    x = read_all(dense_source)[f"{UP}.weight"].float()

    def sqnr(x: torch.Tensor, rule: str, shift: int = 0) -> float:
        packed, scale = mxfp4.quantize(x, rule)
        noise = x - mxfp4.dequantize(packed, (scale.int() + shift).to(torch.uint8), torch.float32)
        return float(10 * torch.log10(x.square().sum() / noise.square().sum()))

    for rule in RULES:
        assert sqnr(x, rule) > 16.5
        assert sqnr(x, rule, -1) < 6.1 < FLOOR_DB
        assert sqnr(x, rule, 1) < 0.2
    worst = torch.full((1, 32), 0.25)
    worst[0, 0] = 3.5
    assert 8.0 < sqnr(worst, "even") < FLOOR_DB  # one block may be, a matrix is not


def test_a_transposed_matrix(dense: Path, dense_source: Path, tmp_path: Path) -> None:
    def transpose(tensors: Tensors) -> None:
        x = read_all(dense_source)[f"{OUT}.weight"].T.contiguous()
        tensors[f"{OUT}.weight"], tensors[f"{OUT}.weight_scale"] = mxfp4.quantize(x)

    (problem,) = found(defective(dense, tmp_path, transpose), dense_source)[0]
    assert problem.what.endswith("it is transposed")


def shuffled_weight(packed: torch.Tensor) -> torch.Tensor:
    """AITER's shuffle_weight, by the address of each byte."""
    rows, width = packed.shape
    n, b = torch.meshgrid(torch.arange(rows), torch.arange(width), indexing="ij")
    shuffled = torch.empty_like(packed).view(-1)
    shuffled[((n // 16) * (width // 16) + b // 16) * 256 + (n % 16) * 16 + b % 16] = packed
    return shuffled.view(rows, width)


@pytest.mark.parametrize(
    ("weight", "scale", "words"),
    [(True, False, "the codes are"), (False, True, "the scales are"), (True, True, "codes and scales are")],
)
def test_layouts_of_kernels_in_the_file(
    dense: Path, dense_source: Path, tmp_path: Path, weight: bool, scale: bool, words: str
) -> None:
    def shuffle(tensors: Tensors) -> None:
        if weight:
            tensors[f"{UP}.weight"] = shuffled_weight(tensors[f"{UP}.weight"])
        if scale:
            tensors[f"{UP}.weight_scale"] = orders.swz(tensors[f"{UP}.weight_scale"])

    (problem,) = found(defective(dense, tmp_path, shuffle), dense_source)[0]
    assert problem.what.startswith(f"{UP} (")
    assert f"{words} in AITER's order for its kernels" in problem.what


def test_scales_in_another_order_everywhere_are_not_taken_for_tuning(
    dense: Path, dense_source: Path, tmp_path: Path
) -> None:
    def shuffle(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            tensors[name] = orders.swz(tensors[name])

    (problem,) = found(defective(dense, tmp_path, shuffle), dense_source, rows=16)[0]
    assert len(problem.places) == 25
    assert "the scales are in AITER's order" in problem.what


def permute(tensors: Tensors, order: list[int], block: str) -> None:
    old = dict(tensors)
    for place, expert in enumerate(order):
        for projection in ("gate", "up", "down"):
            for suffix in ("weight", "weight_scale"):
                name = f"{projection}_proj.{suffix}"
                tensors[f"{block}.{place}.{name}"] = old[f"{block}.{expert}.{name}"]


def test_experts_in_another_order(moe: Path, moe_source: Path, tmp_path: Path) -> None:
    path = defective(moe, tmp_path, lambda tensors: permute(tensors, [1, 2, 3, 0], EXPERTS))
    (problem,) = found(path, moe_source, rows=16)[0]
    assert len(problem.places) == 12
    assert problem.what.endswith("the experts are in another order")


def test_gate_and_up_swapped(moe: Path, moe_source: Path, tmp_path: Path) -> None:
    def swap(tensors: Tensors) -> None:
        old = dict(tensors)
        for expert in range(4):
            for suffix in ("weight", "weight_scale"):
                for one, other in (("gate", "up"), ("up", "gate")):
                    name = f"{EXPERTS}.{expert}.{{}}_proj.{suffix}"
                    tensors[name.format(one)] = old[name.format(other)]

    problems = found(defective(moe, tmp_path, swap), moe_source, rows=16)[0]
    assert sorted(problem.what.rpartition(": it ")[2] for problem in problems) == [
        "holds gate_proj: the two are swapped",
        "holds up_proj: the two are swapped",
    ]
