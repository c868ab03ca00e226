"""``mxq predict``: how fast a configuration would be on hardware that is not here."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxq.cli.tables import show, table
from mxq.errors import UsageError
from mxq.files import size

if TYPE_CHECKING:
    from mxq.hardware.acceptance import Accepted
    from mxq.hardware.cost import Setup
    from mxq.hardware.predict import Load, Prediction

_BUDGET = 15
_CONCURRENCY = (1, 8, 32)
_CONTEXT = 1024
_SHOWN = 0.005
"""Parts of a step below this share of it are not shown; --json has all."""
_EPILOG = """\b
How far to believe it: benchmarks/PREDICT.md has predictions beside published
and measured speeds, misses included, and says what is left out.

\b
Examples:
  mxq predict Qwen/Qwen3.5-27B --hardware mi355x --spec dflash -k 15 \\
      --drafter z-lab/Qwen3.5-27B-DFlash --acceptance 10.377
  mxq predict --architecture 27b/config.json --hardware b200 \\
      --precision mxfp4 --spec mtp -k 7 --acceptance 6.027 --concurrency 1,8
  mxq predict ./Qwen3.5-35B-A3B-MXFP4 --hardware mi355x --concurrency 32
  mxq predict Qwen/Qwen3.5-27B --hardware h200 --spec mtp -k 3 \\
      --survival 0.93,0.86,0.79 --json
  mxq predict --run ./run --hardware mi355x    (project a measured run)
"""


class _Numbers(click.ParamType[tuple[float, ...]]):
    """``0.9,0.8,0.7`` -> numbers."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r:.40} is not a list of numbers; write it as 0.9,0.8,0.7", param, ctx)


class _Counts(click.ParamType[tuple[int, ...]]):
    """``1,8,32`` -> counts, ascending."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = value.split(",")
        if not all(re.fullmatch(r"[0-9]{1,6}", part) and int(part) for part in parts):
            self.fail(
                f"{value!r:.40} is not a list of requests in flight; write it as 1,8,32, each below 1000000", param, ctx
            )
        return tuple(sorted({int(part) for part in parts}))


@click.command(epilog=_EPILOG)
@click.argument("model", required=False)
@click.option(
    "--architecture",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A config.json in place of MODEL: no weights are needed.",
)
@click.option(
    "--hardware", metavar="NAME", required=True, help="mi355x, mi300x, h200, b200, or a YAML file like theirs."
)
@click.option(
    "--precision",
    type=click.Choice(["bf16", "mxfp4"]),
    help="Of the target's weights, MXFP4 as the recipe has it.  [default: as MODEL is]",
)
@click.option(
    "--spec",
    "method",
    type=click.Choice(["ar", "mtp", "dflash"]),
    help="Plain decoding, the model's own MTP head, or a DFlash drafter.  [default: ar]",
)
@click.option("--drafter", "--draft", metavar="MODEL", help="DFlash drafter, or its config.json.")
@click.option(
    "-k", "--budget", type=click.IntRange(1, 1000), metavar="K", help=f"Drafts per verify pass.  [default: {_BUDGET}]"
)
@click.option("--acceptance", type=float, metavar="A", help="Acceptance length, 1 to K + 1.")
@click.option(
    "--survival", type=_Numbers(), metavar="S,S", help="In its place: shares of passes that accept 1, 2, ... K."
)
@click.option("--run", metavar="RUN", help="Project the arms of a measured run, with the acceptance that they had.")
@click.option(
    "--concurrency", type=_Counts(), metavar="N,N", help="Requests in flight.  [default: 1,8,32; with --run, its own]"
)
@click.option(
    "--context",
    type=click.IntRange(1, 1 << 24),
    metavar="N",
    help="Mean tokens before a step.  [default: 1024; with --run, its own]",
)
@click.option("--prompt-tokens", type=click.IntRange(1, 1 << 24), metavar="N", help="Count prefill of such prompts in;")
@click.option("--output-tokens", type=click.IntRange(1, 1 << 24), metavar="N", help="with answers of so many tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every part of a step.")
def command(
    model: str | None,
    architecture: Path | None,
    hardware: str,
    precision: str | None,
    run: str | None,
    drafter: str | None,
    concurrency: tuple[int, ...] | None,
    context: int | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the speed of MODEL on one GPU, from bytes, operations and fitted overheads.

    MODEL is a directory, a hub id or a testbed model; only its config is looked at, and nothing needs to run. Every
    number is a prediction: nothing is measured.
    """
    from mxq.hardware import machine

    on = machine.load(hardware)
    load = _load(context, prompt_tokens, output_tokens)
    if run is not None:
        from mxq.cli import projection

        _refuse_beside_run(precision=precision, **options)
        projection.show(run, on, model, architecture, drafter, concurrency, load, as_json)
        return
    method, accepted = _accepted(**options)
    if drafter is not None and method != "dflash":
        raise UsageError(f"a drafter with {method}", "only --spec dflash takes one")
    if method == "dflash" and drafter is None and model is not None and model.startswith("testbed:"):
        drafter = f"{model}-dflash"
    setup = _setup(on, model, architecture, precision, drafter)
    from mxq.hardware.predict import Load, predict

    loads = [replace(load or Load(1, _CONTEXT), concurrency=requests) for requests in concurrency or _CONCURRENCY]
    predicted = [predict(setup, method, one, accepted) for one in loads]
    name = str(architecture or model)
    if as_json:
        click.echo(json.dumps(as_dict(name, setup, predicted), indent=2))
    else:
        show_predictions(name, setup, predicted, assumed=accepted is not None and accepted.assumed)


def _load(context: int | None, prompt_tokens: int | None, output_tokens: int | None) -> "Load | None":
    """Return the lengths that were given, for one request in flight; None if none were."""
    from mxq.hardware.predict import Load

    if (prompt_tokens is None) != (output_tokens is None):
        raise UsageError("prefill needs both, --prompt-tokens and --output-tokens", "give the other one, too")
    if prompt_tokens is None or output_tokens is None:
        return None if context is None else Load(1, context)
    if context is not None:
        raise UsageError("--context beside --prompt-tokens and --output-tokens, which give it", "leave it out")
    return Load.of_request(1, prompt_tokens, output_tokens)


def _refuse_beside_run(**options: Any) -> None:
    names = {"precision": "--precision", "method": "--spec", "budget": "-k"}
    for option, value in options.items():
        if value is not None:
            name = names.get(option, f"--{option}")
            raise UsageError(f"{name} with --run, which says that itself", f"leave {name} out")


def _accepted(
    method: str | None, budget: int | None, acceptance: float | None, survival: tuple[float, ...] | None
) -> tuple[str, "Accepted | None"]:
    from mxq.hardware.acceptance import of_length, of_survival

    if method in (None, "ar"):
        given = {"-k": budget, "--acceptance": acceptance, "--survival": survival}
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name} with plain decoding, which drafts nothing", "add --spec mtp or --spec dflash")
        return "ar", None
    assert method is not None
    if (acceptance is None) == (survival is None):
        raise UsageError(
            "speculation needs one of --acceptance and --survival, which decide its speed",
            "measure it with `mxq eval`, or take a published acceptance length",
        )
    if survival is not None:
        return method, of_survival(survival, len(survival) if budget is None else budget)
    assert acceptance is not None
    return method, of_length(acceptance, _BUDGET if budget is None else budget)


def _setup(
    on: Any, model: str | None, architecture: Path | None, precision: str | None, drafter: str | None
) -> "Setup":
    from mxq.hardware.opening import setup

    chosen = model if architecture is None else architecture
    if chosen is None or (model is not None and architecture is not None):
        raise UsageError("give one of MODEL and --architecture", "mxq predict MODEL --hardware NAME")
    return setup(on, chosen, precision, drafter)


def as_dict(name: str, setup: "Setup", predicted: Sequence["Prediction"]) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    return {
        "kind": "prediction",
        "model": name,
        "precision": precision_of(setup),
        "hardware": setup.machine.name,
        "gpu": setup.machine.gpu,
        "sources": setup.machine.sources,
        "predictions": [one.as_json() for one in predicted],
    }


def precision_of(setup: "Setup") -> str:
    """Return ``bf16`` or ``mxfp4``."""
    return "mxfp4" if setup.packed.any else "bf16"


def show_predictions(name: str, setup: "Setup", predicted: Sequence["Prediction"], *, assumed: bool) -> None:
    """Print predictions of one configuration, by concurrency."""
    first = predicted[0]
    what = (
        f"{first.method} K {first.k}, acceptance length {first.acceptance_length:.3f}" if first.k else "plain decoding"
    )
    click.echo(f"Predicted, not measured: {name}, {precision_of(setup)}, {what}, on one {setup.machine.gpu}\n")
    speculative = bool(first.k)
    shown = table(
        *(">in flight", ">tok/s", ">of one request", ">step ms"),
        *([">over plain", ">over plain bf16", ">break-even length", ">best K"] if speculative else [">over bf16"]),
        ">memory",
    )
    for one in predicted:
        rest = [_times(one.speedup_bf16)]
        if one.best_k is not None:
            reached = one.break_even is not None and one.break_even <= one.k + 1
            reach = f"{one.break_even:.2f}" if reached else f"none up to {one.k + 1}"
            rest = [_times(one.speedup_same), *rest, reach, f"{one.best_k[0]} ({one.best_k[1]:.0f} tok/s)"]
        rates = [f"{one.tokens_per_s:.1f}", f"{one.tokens_per_s / one.running:.1f}", f"{1e3 * one.step_s:.2f}"]
        shown.add_row(str(one.load.concurrency), *rates, *rest, size(round(one.memory.total)))
    show(shown)
    for one in predicted:
        if one.running < one.load.concurrency:
            click.echo(
                f"of {one.load.concurrency} requests, memory has room for {one.running} at once: the others wait"
            )
    click.echo("\nWhere the time of a step goes, ms:\n")
    _show_parts(predicted)
    if assumed:
        click.echo(
            "\nbest K: from a length alone, with every draft taken to be as likely once those before it are accepted;\n"
            "--survival says more"
        )


def _show_parts(predicted: Sequence["Prediction"]) -> None:
    shown = table("part", *(f">{one.load.concurrency} in flight" for one in predicted))
    for part in predicted[0].parts:
        values = [(one.parts[part], one.parts[part] / one.step_s) for one in predicted]
        if any(share >= _SHOWN for _, share in values):
            shown.add_row(part, *(f"{1e3 * seconds:.2f} ({share:.0%})" for seconds, share in values))
    show(shown)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
