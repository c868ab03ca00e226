"""``mxq predict --run``: a measured run projected onto other hardware."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxq.cli.tables import show as show_table
from mxq.cli.tables import table
from mxq.errors import MxqError, UsageError

if TYPE_CHECKING:
    from mxq.analysis.projection import Projected
    from mxq.analysis.summary import Summary
    from mxq.hardware.cost import Setup
    from mxq.hardware.machine import Machine
    from mxq.hardware.predict import Load


def show(
    run: str,
    on: "Machine",
    model: str | None,
    architecture: Path | None,
    drafter: str | None,
    concurrency: Sequence[int] | None,
    load: "Load | None",
    as_json: bool,
) -> None:
    """Print the projection of a run; raises UsageError and MxqError as the command line shows them."""
    from mxq.analysis import summarise
    from mxq.analysis.projection import project
    from mxq.evaluate.recorded import read

    if model is not None and architecture is not None:
        raise UsageError("MODEL and --architecture are both given", "leave one out")
    summary = summarise(read(run))
    setups = {target: _setup(summary, target, on, architecture or model, drafter) for target in summary.targets}
    projected = project(summary, setups, concurrency, load)
    accepting = summary.run.info["definition"]["targets"]
    names = ", ".join(dict.fromkeys(str(facts["spec"]) for facts in accepting.values()))
    of = str(architecture or model or names)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "kind": "projection",
                    "run": run,
                    "acceptance_of": names,
                    "model": of,
                    "hardware": on.name,
                    "gpu": on.gpu,
                    "sources": on.sources,
                    "projections": [one.as_json() for one in projected],
                },
                indent=2,
            )
        )
        return
    click.echo(f"Projection, nothing was run there: speed of {of} on one {on.gpu},")
    click.echo(f"with the acceptance of {names} as measured in {run}\n")
    _show(projected)
    click.echo("\nProjected numbers are predictions: benchmarks/PREDICT.md says how far such were from measured ones.")


def _setup(summary: "Summary", target: str, on: "Machine", model: Path | str | None, drafter: str | None) -> "Setup":
    from mxq.hardware.opening import setup

    definition = summary.run.info["definition"]
    if any(arm.method == "dflash" for arm in summary.run.arms):
        if drafter is None and model is not None:
            raise UsageError("the run has DFlash arms, and a model of its own was given", "give --drafter, too")
        drafter = definition["drafter"]["spec"] if drafter is None else drafter
    if model is not None:
        return setup(on, model, target, drafter)
    try:
        return setup(on, definition["targets"][target]["spec"], target, drafter)
    except MxqError as error:
        raise type(error)(
            f"the run's {target} target cannot be looked at: {error.message}", "give MODEL, or --architecture FILE"
        ) from error


def _show(projected: Sequence["Projected"]) -> None:
    shown = table(
        *("workload", "arm (projected)", ">in flight", ">acceptance length", ">tok/s", ">over plain"),
        *(">over plain bf16", ">break-even length"),
    )
    for one in projected:
        made = one.prediction
        ratios = [made.speedup_same if made.k else None, made.speedup_bf16, made.break_even]
        texts = ["-" if ratio is None else f"{ratio:.2f}{'' if ratio is made.break_even else 'x'}" for ratio in ratios]
        length = f"{made.acceptance_length:.3f}"
        rate = f"{made.tokens_per_s:.1f}"
        shown.add_row(one.workload, one.arm.label, str(made.load.concurrency), length, rate, *texts)
    show_table(shown)
