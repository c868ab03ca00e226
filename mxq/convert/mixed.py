"""Mixed recipes: which groups of modules stay as they are, by measured error under a budget of bytes.

A budget of B lets the output have at most B times the bytes of all tensors that the recipe would write with nothing
kept. Of every group (:mod:`mxq.calibrate.groups`) the error at the output is measured when it alone is quantized
(:mod:`mxq.calibrate.sensitivity`); kept are those groups whose errors add up to the most that fits. That is the 0/1
knapsack problem, and it is solved exactly where the sizes of groups have a common divisor that goes into the budget at
most 100,000 times, as those of real models do; else sizes are rounded up to a 100,000th of it. Errors are taken to add
up; how far they do, the errors of everything quantized and of the choice say, which are measured too.

What comes out is an ordinary recipe: one whose ``except`` names what is kept. The choice is part of what a conversion
is, in its journal and its manifest, so that one which was stopped is continued with the same choice.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxq.calibrate.groups import Group, groups, units
from mxq.convert.calibration import text
from mxq.convert.origin import begun
from mxq.convert.partial import check, conversion_there
from mxq.convert.plan import Plan
from mxq.convert.recipe import Recipe, Rule
from mxq.errors import UsageError
from mxq.files import size, versions
from mxq.progress import note, progress

if TYPE_CHECKING:
    from mxq.calibrate.text import Samples

_UNITS = 100_000
_DTYPE = "bfloat16"  # that of the models and of engines: a model in float32 would need twice the memory


def candidates(plan: Plan) -> list[Group]:
    """Return the groups that a plan would quantize and a mixed recipe may keep: all but those of MTP."""
    return groups(plan.source, [piece for group in plan.groups.values() for piece in group.pieces])


def most_bytes(plan: Plan) -> int:
    """Return how many bytes a mixed recipe's output may have, given the plan with nothing kept.

    Raises:
        UsageError: the budget is too small for any group, or large enough for all of them.
    """
    recipe, found, least = plan.recipe, candidates(plan), plan.bytes_after
    assert recipe.budget is not None
    if not found:
        raise UsageError(f"recipe {recipe.name} quantizes no module of a decoder layer", "there is nothing to keep")
    smallest = min(found, key=lambda group: group.bytes_saved)
    most = math.floor(Fraction(str(recipe.budget)) * least)
    what = f"recipe {recipe.name}: a budget of {recipe.budget:g} times {size(least)}, {plan.source.path} in MXFP4,"
    if most < least + smallest.bytes_saved:
        enough = math.ceil((least + smallest.bytes_saved) / least * 10_000) / 10_000
        raise UsageError(
            f"{what} has no room: {smallest.name} takes {size(smallest.bytes_saved)} more where it is kept",
            f"write a recipe that extends {recipe.name} with a budget of {enough:g} or more, or take one without",
        )
    if most >= least + sum(group.bytes_saved for group in found):
        raise UsageError(f"{what} is room to keep everything: nothing would be quantized", "give a smaller budget")
    return most


def choose(found: Sequence[Group], errors: Sequence[float], room: int) -> list[Group]:
    """Return the groups to keep: those of the largest sum of ``errors`` that take at most ``room`` bytes more.

    In the order of ``found``, and always the same ones for the same arguments. A group without error is not kept.
    """
    unit = max(math.gcd(*(group.bytes_saved for group in found)), math.ceil(room / _UNITS), 1)
    capacity = room // unit
    best, taken = np.zeros(capacity + 1), np.zeros((len(found), capacity + 1), np.bool_)
    sizes = [-(-group.bytes_saved // unit) for group in found]
    for number, (needs, error) in enumerate(zip(sizes, errors, strict=True)):
        if needs <= capacity and error > 0:
            with_it = best[: capacity + 1 - needs] + error
            taken[number, needs:] = with_it > best[needs:]
            best[needs:] = np.maximum(with_it, best[needs:])
    kept: list[Group] = []
    left = capacity
    for number in reversed(range(len(found))):
        if taken[number, left]:
            kept.append(found[number])
            left -= sizes[number]
    return kept[::-1]


def prepare(plan: Plan, spec: str, out: Path, given: Sequence[str], data_dir: Path | None = None) -> "Samples":
    """Return the text to measure on, when all that can be refused without the weights has been.

    Args:
        plan: by a mixed recipe, with nothing kept, from headers; the tokenizer must be beside them.
        spec: names the source.
        out: where it shall be converted to.
        given: what the user wants for the recipe's text.
        data_dir: where published workloads are read from, if not from the hub.

    Raises:
        UsageError: as :func:`most_bytes`; there is no text, or too little; the tokenizer does not fit; ``out`` cannot
            be written, or what is unfinished there is of another source, budget or text.
        MxqError: the disk has no room; the journal is damaged.
    """
    most, samples = most_bytes(plan), text(plan, spec, given, data_dir)
    known = {name: value for name, value in begun(plan, spec).items() if name != "recipe"}
    check(out, most, known | {"mixed": _asked(plan, samples)})
    return samples


def resolve(plan: Plan, out: Path, samples: "Samples", device: str) -> Recipe:
    """Return the recipe of a plan with its choice made: as an unfinished conversion to ``out`` has it, or by measuring.

    Args:
        plan: as for :func:`prepare`, of weights that are all here.
        out: where it shall be converted to.
        samples: from :func:`prepare`.
        device: what measures, as torch calls it.

    Raises:
        UsageError: samples are longer than what the model takes.
        MxqError: the model cannot be loaded, or computes what is not finite.
    """
    there = conversion_there(out)
    if there is not None:
        note("what is kept was chosen when this conversion began")
    choice: dict[str, Any] = there["choice"] if there is not None else _measured(plan, samples, device)
    names = {one["group"] for one in choice["groups"] if one["kept"]}
    kept = [group for group in candidates(plan) if group.name in names]
    return excepting(plan.recipe, plan.family, kept, {"mixed": _asked(plan, samples), "choice": choice})


def _asked(plan: Plan, samples: "Samples") -> dict[str, Any]:
    return {"budget": plan.recipe.budget, "text": samples.facts, "dtype": _DTYPE}


def excepting(recipe: Recipe, family: str, kept: Sequence[Group], chosen: dict[str, Any]) -> Recipe:
    """Return an ordinary recipe that keeps groups; ``chosen`` is what a manifest says of how they were chosen."""
    rules = [Rule(pattern, "except") for group in kept for pattern in group.patterns]
    return dataclasses.replace(
        recipe,
        rules=recipe.rules | {family: (*recipe.rules[family], *rules)},
        calibration=None,
        budget=None,
        chosen=chosen,
    )


def _measured(plan: Plan, samples: "Samples", device: str) -> dict[str, Any]:
    """Measure every group, choose, and measure the choice; return all of it as JSON can hold it."""
    from mxq.calibrate.sensitivity import Probe, cost_of, load

    recipe, found, least, most = plan.recipe, candidates(plan), plan.bytes_after, most_bytes(plan)
    target = load(plan.source.path, samples.ids, _DTYPE, device)
    alone = units(found, "group")
    total = cost_of(alone, len(target.model.layers), len(samples.ids), together=2)
    with progress("measuring", total, "layers") as advance:
        probe = Probe(
            target,
            plan.source,
            samples.ids,
            rule=recipe.scale_rule,
            weight_only=recipe.weight_only,
            advance=advance,
        )
        effects = {unit.name: effect for unit, effect in probe.alone(alone)}
        kept = choose(found, [effects[group.name].divergence.estimate for group in found], most - least)
        names = {group.name for group in kept}
        mixed = probe.together([group for group in found if group.name not in names], "what is not kept")
        everything = probe.together(kept, "everything")
    if mixed.divergence.estimate >= everything.divergence.estimate:
        note(
            f"note: keeping {len(kept)} groups gains nothing on this text: KL {mixed.divergence.estimate:.6f}, "
            f"{everything.divergence.estimate:.6f} with everything quantized"
        )
    return {
        "measured_by": versions("torch", "transformers") | {"device": device.partition(":")[0]},
        "bytes": {
            "everything_quantized": least,
            "at_most": most,
            "chosen": least + sum(group.bytes_saved for group in kept),
        },
        "everything_quantized": everything.as_json(),
        "chosen": mixed.as_json(),
        "groups": [
            {
                "group": group.name,
                "kept": group.name in names,
                "bytes_saved": group.bytes_saved,
                **effects[group.name].as_json(),
            }
            for group in sorted(found, key=lambda group: -effects[group.name].divergence.estimate)
        ],
    }
