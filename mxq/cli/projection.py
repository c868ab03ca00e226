"""``mxq predict --run``: a measured run projected onto other hardware."""

import contextlib
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
    targets, notes = list(summary.targets), []
    if on.mxfp4 is None and len(targets) == 2:
        targets.remove("mxfp4")
        notes.append(f"{on.gpu} has no kernel for MXFP4, whose arms are left out.")
    setups = {target: _setup(summary, target, on, architecture or model, drafter, notes) for target in targets}
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
                    "notes": notes,
                    "projections": [one.as_json() for one in projected],
                },
                indent=2,
            )
        )
        return
    click.echo(f"Projection, nothing was run there: speed of {of} on one {on.gpu},")
    click.echo(f"with the acceptance of {names} as measured in {run}")
    for note in notes:
        click.echo(note)
    click.echo()
    _show(projected)
    click.echo("\nProjected numbers are predictions: benchmarks/PREDICT.md says how far such were from measured ones.")


def _setup(
    summary: "Summary", target: str, on: "Machine", model: Path | str | None, drafter: str | None, notes: list[str]
) -> "Setup":
    """Return a target's setup; adds to ``notes`` what has to be said of it."""
    from mxq.hardware.opening import setup

    definition = summary.run.info["definition"]
    if any(arm.method == "dflash" for arm in summary.run.arms):
        if drafter is None and model is not None:
            raise UsageError("the run has DFlash arms, and a model of its own was given", "give --drafter, too")
        drafter = definition["drafter"]["spec"] if drafter is None else drafter
    if model is not None:
        return setup(on, model, target, drafter)
    specs = {name: facts["spec"] for name, facts in definition["targets"].items()}
    try:
        return setup(on, specs[target], target, drafter)
    except MxqError as error:
        if target == "mxfp4" and "bf16" in specs:  # a run whose conversion is gone, or which came from elsewhere
            with contextlib.suppress(MxqError):
                found = setup(on, specs["bf16"], target, drafter)
                notes.append(
                    f"{specs[target]} is not there: mxfp4 is predicted as {specs['bf16']} by the recipe mxfp4."
                )
                return found
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
