"""The recipe mxfp4 against the real amd-quark: what both quantize has the same bytes."""

from dataclasses import dataclass

import pytest
import quark_export
import torch
from checkpoints import Tensors, read_all
from conversion import convert

from mxq import testbed
from mxq.convert import recipe

pytestmark = [pytest.mark.slow]

FAMILIES = {"dense": "qwen3_5", "moe": "qwen3_5_moe"}
BOTH = {"dense": 50, "moe": 48}
ALONE: dict[tuple[str, str], tuple[set[str], set[str]]] = {
    ("dense", "recipe"): (set(), set()),
    ("dense", "template"): (set(), {"linear_attn.in_proj_a", "linear_attn.in_proj_b"}),
    ("moe", "recipe"): (set(), set()),
    ("moe", "template"): (set(), set()),
}
"""By model, and by what Quark is told to leave out: what the recipe keeps, or what its template for the architecture
says. The modules of a layer that mxq alone quantizes, and those that Quark alone does."""


@dataclass(frozen=True)
class Made:
    """What both made of the testbed: ``quark[kind, which]`` as in ALONE."""

    mxq: dict[str, Tensors]
    quark: dict[tuple[str, str], Tensors]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("quark")
    jobs = {}
    for kind, which in ALONE:
        rules = recipe.load("mxfp4").rules[FAMILIES[kind]]
        kept = tuple(rule.pattern for rule in rules if not rule.quantizes)  # to Quark they are shell patterns too
        jobs[kind, which] = testbed.path(f"testbed:{kind}"), root / f"{kind}-{which}", kept * (which == "recipe")
    quark_export.export(jobs.values())
    ours = {kind: read_all(convert(testbed.path(f"testbed:{kind}"), root / kind)) for kind in FAMILIES}
    return Made(ours, {key: read_all(out) for key, (_, out, _) in jobs.items()})


def quantized(tensors: Tensors) -> set[str]:
    """The modules that are."""
    return {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}


def differing(ours: Tensors, theirs: Tensors) -> list[str]:
    """Codes and scales, of modules that both quantize, in which not every byte is the same."""
    modules = sorted(quantized(ours) & quantized(theirs))
    names = [f"{module}.{suffix}" for module in modules for suffix in ("weight", "weight_scale")]
    assert all(tensors[name].dtype == torch.uint8 for name in names for tensors in (ours, theirs))
    return [name for name in names if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize(("kind", "which"), ALONE)
def test_both_write_the_same_bytes(made: Made, kind: str, which: str) -> None:
    ours, theirs = made.mxq[kind], made.quark[kind, which]
    mine, its = quantized(ours), quantized(theirs)
    alone = tuple({name.split(".", 4)[-1] for name in modules} for modules in (mine - its, its - mine))
    assert alone == ALONE[kind, which]
    assert len(mine & its) == BOTH[kind]
    assert differing(ours, theirs) == []


@pytest.mark.parametrize("suffix", ["weight", "weight_scale"])
def test_one_bit_is_a_difference(made: Made, suffix: str) -> None:
    name = f"model.language_model.layers.0.mlp.experts.1.down_proj.{suffix}"
    changed = made.mxq["moe"][name].clone()
    changed[3, 5] ^= 1
    assert differing(made.mxq["moe"] | {name: changed}, made.quark["moe", "recipe"]) == [name]
