"""``mxq sensitivity``: what each part of a model, quantized by itself, does to the output."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxq import files
from mxq.cli.tables import show, table
from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.progress import note, progress

if TYPE_CHECKING:
    from mxq.calibrate.groups import Unit
    from mxq.calibrate.sensitivity import Effect

_EPILOG = """\b
KL: how far the distribution of every next token is from the unquantized
model's, KL(unquantized || quantized) in nats, mean over tokens, with a 95 %
interval over samples. Same token: share of tokens where both would choose the
same. Hidden: relative error of the output of the final norm, which MTP reads.
Saves: by how much the checkpoint is smaller.

\b
Examples:
  mxq sensitivity testbed:dense
  mxq sensitivity testbed:moe --by layer --samples 16
  mxq sensitivity testbed:dense --recipe mxfp4-weight-only --json
  mxq sensitivity ./Qwen3.5-27B --by group --calib ./text.jsonl --device cuda
"""


@click.command(epilog=_EPILOG)
@click.argument("model")
@click.option("--recipe", default="mxfp4", show_default=True, help="A recipe of mxq's, or a YAML file of yours.")
@click.option(
    "--by",
    type=click.Choice(["class", "layer", "group"]),
    default="class",
    show_default=True,
    help="What is quantized by itself: a class of modules in all layers, a layer, or a class in one layer.",
)
@click.option(
    "--calib",
    metavar="NAME|FILE",
    multiple=True,
    help="Text to measure on: a workload, or a file; repeatable.  [default: the testbed's own for testbed models]",
)
@click.option("--samples", metavar="N", type=click.IntRange(min=1), default=32, show_default=True, help="Of the text.")
@click.option(
    "--length", metavar="N", type=click.IntRange(min=2), default=256, show_default=True, help="Tokens of each sample."
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With which samples are drawn.",
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True, help="Arithmetic."
)
@click.option(
    "--device", metavar="NAME", default="cpu", show_default=True, help="torch's name of the device, such as cuda:0."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write JSON here, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    model: str,
    recipe: str,
    by: str,
    calib: tuple[str, ...],
    samples: int,
    length: int,
    seed: int,
    dtype: str,
    device: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Quantize each part of MODEL by itself, everything else staying as it is, and measure how far the output moves.

    Weights are quantized as the recipe says, and activations before them if it says so. MODEL is a directory, a model's
    id on the Hugging Face hub, or a testbed model. It is loaded once, and nothing is written but --out. Last, all parts
    are quantized together: the sum of their errors alone says about as much if errors add up.
    """
    if out is not None and ((out.exists() and not out.is_file()) or not out.parent.is_dir()):
        raise UsageError(f"--out {out} is not a file in a directory that exists", "give the path of a JSON file")
    # Before torch is loaded: its threads spin while they wait, see `mxq eval`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from mxq.calibrate import Calibration
    from mxq.calibrate.groups import groups, units
    from mxq.calibrate.sensitivity import Probe, cost_of, load
    from mxq.calibrate.text import tokens
    from mxq.checkpoint import Checkpoint, open_headers, resolve
    from mxq.convert import recipe as recipes
    from mxq.convert.plan import plan

    chosen = recipes.load(recipe)
    if chosen.algorithm is not None:
        raise UsageError(
            f"recipe {chosen.name}: {chosen.algorithm} chooses codes in the whole model, and a part alone has none",
            "take a recipe that rounds to the nearest, such as mxfp4",
        )
    plan(open_headers(model), chosen)  # before a model is fetched for nothing
    planned = plan(Checkpoint.open(resolve(model)), chosen)
    pieces = [piece for group in planned.groups.values() for piece in group.pieces]
    found = groups(planned.source, pieces)
    if len(pieces) > sum(len(group.pieces) for group in found):
        note("MTP is left out: what it drafts does not change what the target says")
    if not found:
        raise UsageError(f"recipe {chosen.name} quantizes no module of a decoder layer", "take one that does")
    measured_units = units(found, by)
    asked = Calibration(",".join(calib) or None, samples, length, seed)
    text = tokens(asked, model, planned.source.path, planned.vocabulary)
    target = load(planned.source.path, text.ids, dtype, device)
    layers = len(target.model.layers)
    effects: list[tuple[Unit, Effect]] = []
    together: Effect | None = None
    try:
        with progress("measuring", cost_of(measured_units, layers, samples), "layers") as advance:
            probe = Probe(
                target,
                planned.source,
                text.ids,
                rule=chosen.scale_rule,
                weight_only=chosen.weight_only,
                advance=advance,
            )
            effects.extend(probe.alone(measured_units))
            together = probe.together(found, "everything")
    except KeyboardInterrupt:
        if effects and not as_json:
            _show(effects, None)
        left = f"{len(effects)} of {len(measured_units)} units were measured"
        raise InterruptedRunError(f"interrupted; {left}", "the same command starts over") from None
    facts = {
        "model": model,
        "recipe": chosen.name,
        "by": by,
        "text": text.facts,
        "dtype": dtype,
        "device": device,
        "units": [
            {
                "unit": unit.name,
                **effect.as_json(),
                "bytes_saved": unit.bytes_saved,
                "modules": [pattern for group in unit.groups for pattern in group.patterns],
            }
            for unit, effect in _sorted(effects)
        ],
        "sum_of_units": {"kl": _sum(effects)},
        "together": {**together.as_json(), "bytes_saved": sum(group.bytes_saved for group in found)},
    }
    if out is not None:
        try:
            files.write_json(out, facts)
        except OSError as error:
            raise MxqError(f"cannot write {out}: {error.strerror}", "make room, or give another file") from None
    if as_json:
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    _show(effects, together)
    activations = "activations as they are" if chosen.weight_only else "their activations too"
    click.echo(
        f"{model}, recipe {chosen.name}: weights in MXFP4, {activations};\n{samples} samples of {length} tokens, "
        f"text {text.facts['set']}, {dtype} on {device}"
    )
    if out is not None:
        note(f"wrote {out}")


def _sorted(effects: "list[tuple[Unit, Effect]]") -> "list[tuple[Unit, Effect]]":
    return sorted(effects, key=lambda one: -one[1].divergence.estimate)


def _sum(effects: "list[tuple[Unit, Effect]]") -> float:
    return sum(effect.divergence.estimate for _, effect in effects)


def _show(effects: "list[tuple[Unit, Effect]]", together: "Effect | None") -> None:
    shown = table("quantized alone", ">KL", ">95 % interval", ">same token", ">hidden", ">saves", ">KL per GB")
    saved = sum(unit.bytes_saved for unit, _ in effects)

    def add(name: str, effect: "Effect", saves: int) -> None:
        kl = effect.divergence
        ends = f"{kl.lower:.6f} to {kl.upper:.6f}" if kl.bounded else "-"
        cells: list[Any] = [f"{kl.estimate:.6f}", ends, f"{effect.agreement.estimate:.2%}"]
        cells += [f"{effect.hidden_error:.4f}", files.size(saves), f"{kl.estimate / saves * 1e9:.3g}"]
        shown.add_row(name, *cells)

    for unit, effect in _sorted(effects):
        add(unit.name, effect, unit.bytes_saved)
    if together is not None:
        shown.add_section()
        shown.add_row("sum of these", f"{_sum(effects):.6f}", "", "", "", files.size(saved), "")
        add("all together", together, saved)
    show(shown)
