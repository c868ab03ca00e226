"""What a unit quantized by itself does to the output: held to checkpoints in which it alone is quantized."""

from pathlib import Path
from typing import Any

import block_fp8
import numpy as np
import pytest
import torch
import yaml
from conversion import convert
from decoding import Models, rewrite
from torch import Tensor

from mxq.calibrate.groups import CLASSES, Group, groups, units
from mxq.calibrate.sensitivity import Effect, Probe, cost_of, load
from mxq.checkpoint import Checkpoint
from mxq.convert import recipe
from mxq.convert.plan import Plan, plan
from mxq.decode import load_target
from mxq.errors import MxqError, UsageError
from mxq.formats.mxfp4 import dequantize, quantize
from mxq.models import qwen35

IDS = torch.randint(0, 500, (3, 40), generator=torch.Generator().manual_seed(3))


def nothing(amount: float, title: str | None = None) -> None:
    """No progress."""


def planned(source: Path, name: str = "mxfp4") -> Plan:
    return plan(Checkpoint.open(source), recipe.load(name))


def groups_of(made: Plan) -> list[Group]:
    return groups(made.source, [piece for group in made.groups.values() for piece in group.pieces])


def probe(source: Path, made: Plan, dtype: str = "float32", advance: Any = nothing) -> Probe:
    target = load(source, IDS, dtype, "cpu")
    return Probe(
        target, made.source, IDS, rule=made.recipe.scale_rule, weight_only=made.recipe.weight_only, advance=advance
    )


def effects(source: Path, name: str, by: str) -> dict[str, Effect]:
    made = planned(source, name)
    return {unit.name: effect for unit, effect in probe(source, made).alone(units(groups_of(made), by))}


def only(source: Path, chosen: list[Group], activations: str, tmp_path: Path) -> str:
    """Write a recipe that quantizes some groups and keeps all else, by the names of all tensors."""
    quantized = {piece.module for group in chosen for piece in group.pieces}
    names = {
        module
        for name, tensor in Checkpoint.open(source).tensors.items()
        if not name.endswith("_scale_inv")
        for module in ([piece.module for piece in qwen35.pieces(name, tensor.shape)] or [qwen35.base_name(name)])
    }
    family = "qwen3_5_moe" if any(".experts." in name for name in names) else "qwen3_5"
    rules = {family: {"quantize": sorted(quantized), "keep": sorted(names - quantized)}}
    file = tmp_path / "only.yaml"
    file.write_text(
        yaml.safe_dump(
            {"name": "only", "description": "x", "scale_rule": "even", "activations": activations, "rules": rules}
        )
    )
    return str(file)


@torch.inference_mode()
def logits(path: Path, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """What a checkpoint says of the samples, and its final hidden states, but for the last token."""
    target = load_target(path, dtype=dtype)
    hidden = [target.prompt(target.start(len(ids)), ids).hidden[:-1] for ids in IDS]
    return [(target.logits(one), one) for one in hidden]


def check_against(effect: Effect, source: Path, converted: Path, dtype: torch.dtype) -> None:
    """Hold an effect to the formulas, computed by numpy from two checkpoints that were loaded each by itself."""
    divergence, same, errors = [], [], []
    for (a, before), (b, after) in zip(logits(source, dtype), logits(converted, dtype), strict=True):
        p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (a.double().numpy(), b.double().numpy()))
        p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
        divergence.append((p * np.log(p / q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        x, y = before.double().numpy(), after.double().numpy()
        errors.append(np.linalg.norm(y - x, axis=-1) / np.linalg.norm(x, axis=-1))
    assert effect.divergence.estimate == pytest.approx(np.mean(divergence), rel=1e-6)
    assert effect.divergence.estimate > 1e-6
    assert effect.agreement.estimate == pytest.approx(np.mean(same), abs=1e-12)
    assert effect.hidden_error == pytest.approx(np.mean(errors), rel=1e-5)
    assert effect.divergence.lower < np.mean(divergence) < effect.divergence.upper
    assert effect.divergence.prompts == len(IDS)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-weight-only"])
def test_a_unit_alone_is_the_checkpoint_in_which_it_alone_is_quantized(source: Path, name: str, tmp_path: Path) -> None:
    made = planned(source, name)
    found = groups_of(made)
    tested = probe(source, made)
    measured = dict(tested.alone(units(found, "group")))
    picked = found if len(found) < 5 else [group for group in found if group.layer in (1, 3)]
    for number, unit in enumerate(one for one in measured if one.groups[0] in picked):
        file = only(source, list(unit.groups), made.recipe.activations, tmp_path)
        converted = convert(source, tmp_path / f"one{number}", file)
        check_against(measured[unit], source, converted, torch.float32)
    # Nothing of one unit was left behind for the next, or for all together.
    again = dict(tested.alone([unit for unit in measured if unit.first_layer == 3]))
    assert all(again[unit] == measured[unit] for unit in again)
    whole = tested.together(found, "everything")
    check_against(whole, source, convert(source, tmp_path / "whole", name), torch.float32)


def test_classes_and_layers_are_the_checkpoints_of_all_their_groups(dense_source: Path, tmp_path: Path) -> None:
    made = planned(dense_source)
    found = groups_of(made)
    for by, name in (("class", "GDN in_proj"), ("layer", "layer 2")):
        unit = next(unit for unit in units(found, by) if unit.name == name)
        [(_, effect)] = probe(dense_source, made, "bfloat16").alone([unit])
        file = only(dense_source, list(unit.groups), "dynamic", tmp_path)
        check_against(effect, dense_source, convert(dense_source, tmp_path / by, file), torch.bfloat16)


def test_block_fp8_is_quantized_from_its_products(dense_source: Path, tmp_path: Path) -> None:
    source = block_fp8.write(dense_source, tmp_path / "fp8")
    made = planned(source)
    unit = next(unit for unit in units(groups_of(made), "group") if unit.name == "layer 1 MLP down")
    [(_, effect)] = probe(source, made).alone([unit])
    file = only(source, list(unit.groups), "dynamic", tmp_path)
    check_against(effect, source, convert(source, tmp_path / "one", file), torch.float32)


def test_experts_stored_one_by_one(moe_source: Path, tmp_path: Path) -> None:
    def split(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name and not name.startswith("mtp.")]:
            for piece in qwen35.pieces(name, tensors[name].shape):
                tensor = tensors[name]
                rows = tensor.view(-1, tensor.shape[-1])[piece.start : piece.stop]
                tensors[f"{piece.module}.weight"] = rows
            del tensors[name]

    single = rewrite(moe_source, tmp_path / "single", split)
    assert effects(single, "mxfp4", "layer") == effects(moe_source, "mxfp4", "layer")


def on_grid(tensors: dict[str, Tensor], part: str) -> None:
    for name in [name for name in tensors if part in name and not name.startswith("mtp.")]:
        tensors[name] = dequantize(*quantize(tensors[name]), torch.bfloat16)


def test_weights_on_the_grid_lose_nothing(dense_source: Path, tmp_path: Path) -> None:
    source = rewrite(dense_source, tmp_path / "grid", lambda tensors: on_grid(tensors, ".down_proj"))
    measured = effects(source, "mxfp4-weight-only", "class")
    exact = measured.pop("MLP down")
    assert (exact.divergence.estimate, exact.agreement.estimate, exact.hidden_error) == (0, 1, 0)
    assert all(effect.divergence.estimate > 0 for effect in measured.values())
    # Activations are not on any grid.
    assert effects(source, "mxfp4", "class")["MLP down"].divergence.estimate > 0


def plant(tensors: dict[str, Tensor], layer: int) -> None:
    """Put an element into every block of down_proj beside which the others round to nothing, and that nothing reads."""
    start = f"model.language_model.layers.{layer}.mlp."
    if f"{start}down_proj.weight" in tensors:
        down, up = tensors[f"{start}down_proj.weight"], tensors[f"{start}up_proj.weight"]
    else:
        down = tensors[f"{start}experts.down_proj"]
        up = tensors[f"{start}experts.gate_up_proj"][:, down.shape[-1] :]
    down[..., ::32] = 60 * down.abs().max()
    up[..., ::32, :] = 0


def test_a_group_with_outliers_comes_first(source: Path, tmp_path: Path) -> None:
    bad = rewrite(source, tmp_path / "bad", lambda tensors: plant(tensors, 0))
    before, after = (effects(path, "mxfp4", "group") for path in (source, bad))
    worst = max(after, key=lambda unit: after[unit].divergence.estimate)
    assert worst in ("layer 0 MLP down", "layer 0 routed experts")
    assert after[worst].divergence.estimate > 3 * before[worst].divergence.estimate


def test_groups_are_never_a_part_of_what_engines_fuse(source: Path) -> None:
    made = planned(source, "mxfp4-moe-full")
    found = groups_of(made)
    modules = [piece.module for group in found for piece in group.pieces]
    assert len(modules) == len(set(modules)) == sum(len(group.pieces) for group in made.groups.values())
    whole: dict[str, set[str]] = {}
    for group in found:
        assert group.kind in CLASSES
        for piece in group.pieces:
            fused = qwen35.experts_module(piece.module) or qwen35.fused_module(piece.module)
            if fused is not None:
                whole.setdefault(fused, set()).add(group.name)
    assert whole
    assert all(len(names) == 1 for names in whole.values())
    kinds = {group.kind for group in found}
    assert kinds == (
        {"routed experts", "shared expert"}
        if made.family == "qwen3_5_moe"
        else set(CLASSES[:2]) | {"GDN in_proj", "GDN out", "MLP gate/up", "MLP down"}
    )


def test_bytes_saved_are_those_of_the_files(source: Path) -> None:
    made = planned(source)
    found = groups_of(made)
    assert sum(group.bytes_saved for group in found) == made.bytes_before - made.bytes_after
    for by in ("class", "layer"):
        assert sum(unit.bytes_saved for unit in units(found, by)) == made.bytes_before - made.bytes_after


def test_progress_ends_at_its_total(dense_source: Path) -> None:
    made = planned(dense_source)
    found = groups_of(made)
    done: list[float] = []
    tested = probe(dense_source, made, advance=lambda amount, title=None: done.append(amount))
    list(tested.alone(units(found, "layer")))
    tested.together(found, "everything")
    assert sum(done) == cost_of(units(found, "layer"), 4, len(IDS))


def test_samples_longer_than_the_model_takes(dense_source: Path) -> None:
    with pytest.raises(UsageError, match=r"samples of 2,049 tokens: \S+ takes at most 2,048; make them shorter"):
        load(dense_source, torch.zeros(1, 2049, dtype=torch.int64), "float32", "cpu")
    with pytest.raises(UsageError, match="no device 'gpu9' here"):
        load(dense_source, IDS, "float32", "gpu9")


def test_a_model_that_computes_nan(dense_models: Models, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.language_model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")

    source = rewrite(dense_models.target, tmp_path / "nan", spoil)
    with pytest.raises(MxqError, match="what the model computes is not finite"):
        probe(source, planned(source))
