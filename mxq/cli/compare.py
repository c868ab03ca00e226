"""``mxq compare``: is it preserved? Two targets with intervals and verdicts; a sweep; the published numbers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxq.cli.eval import refuse_contradictions
from mxq.errors import MismatchError, MxqError, UsageError

if TYPE_CHECKING:
    from mxq.analysis.comparison import Comparison
    from mxq.evaluate import Run
    from mxq.stats import Margins, Resampling

_VERDICTS = ("degraded", "undecided")
_ALLOWABLE = ("arithmetic", "drafter", "engine", "hardware", "options", "versions")
_MARGINS = ("acceptance", "survival", "throughput")

_EPILOG = """\b
preserved: the whole interval of the change is inside the margin; degraded,
improved: all of it is beyond; undecided: neither, more prompts would tell.
Everything together is degraded if one row is, else undecided if one is.

\b
A file of margins holds any of these lines:
  acceptance: 0.03
  survival: 0.02
  throughput: 0.02

\b
Examples:
  mxq compare ./run
  mxq compare ./run --workload gsm8k --margin-acceptance 0.02
  mxq compare ./run-bf16 ./run-mxfp4 --fail-on degraded --json
  mxq compare ./run-vllm ./run-here --base bf16 --new bf16 --allow engine
  mxq compare ./run --sweep
  mxq compare ./run --published
"""


@click.command(epilog=_EPILOG)
@click.argument("runs", metavar="RUN [RUN]", nargs=-1, required=True)
@click.option(
    "--base", type=click.Choice(["bf16", "mxfp4"]), default="bf16", show_default=True, help="The target it was."
)
@click.option(
    "--new", type=click.Choice(["bf16", "mxfp4"]), default="mxfp4", show_default=True, help="The target it became."
)
@click.option("--workload", "workloads", metavar="NAME", multiple=True, help="Only this workload, repeatable.")
@click.option(
    "--margin-acceptance",
    type=float,
    metavar="M",
    help="Relative change of acceptance length that does not matter.  [default: 0.03]",
)
@click.option(
    "--margin-survival",
    type=float,
    metavar="M",
    help="Absolute change of survival that does not matter, at any position.  [default: 0.02]",
)
@click.option(
    "--margin-throughput",
    type=float,
    metavar="M",
    help="Relative change of tokens per second that does not matter.  [default: 0.02]",
)
@click.option("--margins", "margins_file", metavar="FILE", help="A YAML file of margins; options go before it.")
@click.option("--resamples", type=int, metavar="N", default=2000, show_default=True, help="Draws of the bootstrap.")
@click.option("--confidence", type=float, metavar="P", default=0.95, show_default=True, help="Of each interval.")
@click.option(
    "--allow",
    "allowed",
    type=click.Choice(_ALLOWABLE),
    multiple=True,
    help="What may differ between two runs besides the target, repeatable; said above the tables.",
)
@click.option(
    "--fail-on",
    type=click.Choice(_VERDICTS),
    multiple=True,
    help="Exit with 3 if a row has this verdict, repeatable; undecided: also if a cell has none.",
)
@click.option("--sweep", is_flag=True, help="Instead: the fastest method and K by workload and requests in flight.")
@click.option("--published", is_flag=True, help="Instead: acceptance lengths beside the published ones.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; numbers are not rounded.")
def command(
    runs: tuple[str, ...], sweep: bool, published: bool, fail_on: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Compare two targets of a RUN, or of two, and say with intervals whether acceptance and speed are preserved.

    RUN is a directory made by `mxq eval`, or example:dense or example:moe. With two, the base is from the first and the
    new from the second. What was not measured alike is refused, with both values. Margins are the changes that do not
    matter.
    """
    if len(runs) > (1 if sweep or published else 2):
        raise UsageError(f"{len(runs)} runs", "give one, or two to compare")
    if fail_on and (sweep or published):
        raise UsageError("--fail-on needs a comparison", "leave out --sweep and --published")
    resampling = _resampling(options["resamples"], options["confidence"])
    margins = _margins(options)
    from mxq.evaluate.recorded import read

    found = [read(run) for run in runs]
    if sweep or published:
        _show_one(found[0], resampling, options["workloads"], sweep=sweep, published=published, as_json=as_json)
        return
    from mxq.analysis.comparison import compare

    compared = compare(
        found[0],
        found[1] if len(found) > 1 else None,
        base_target=options["base"],
        new_target=options["new"],
        workloads=options["workloads"],
        margins=margins,
        resampling=resampling,
        allowed=options["allowed"],
    )
    if as_json:
        click.echo(json.dumps(compared.as_json(), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        from mxq.report.comparison_tables import show

        show(compared, Console())
    _judge(compared, fail_on)


def _judge(found: "Comparison", fail_on: tuple[str, ...]) -> None:
    """Raise what the exit code says."""
    if found.withheld is not None:
        raise MismatchError(found.withheld, "the warnings say which; look closer: mxq eval --show RUN")
    if not found.rows:
        why = found.missing[0].why if found.missing else "no cell has results on both sides"
        raise MxqError(f"nothing can be judged: {why}", "the table says what is missing of each cell")
    if failing := found.failing(fail_on):
        shown = "; ".join(failing[:_SHOWN]) + (f"; and {len(failing) - _SHOWN} more" if len(failing) > _SHOWN else "")
        raise MismatchError(f"{' or '.join(fail_on)}: {shown}")


_SHOWN = 8
"""As many rows are named in the line of an error."""


def _show_one(
    run: "Run", resampling: "Resampling", workloads: tuple[str, ...], *, sweep: bool, published: bool, as_json: bool
) -> None:
    """Print the fastest configurations of a run, or what was published of its model."""
    from mxq.analysis import summarise
    from mxq.analysis.pairs import check_workloads
    from mxq.analysis.published import beside
    from mxq.analysis.sweep import sweep as swept

    check_workloads(run, workloads)
    summary = summarise(run)
    choices = swept(run, resampling, workloads) if sweep else None
    table = beside(run, resampling, workloads) if published else None
    if as_json:
        parts = {"sweep": choices and choices.as_json(), "published": table and table.as_json()}
        told = {"warnings": list(summary.warnings)} | {name: part for name, part in parts.items() if part}
        click.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        from mxq.report.choice_tables import show_published, show_sweep, show_warnings

        console = Console()
        show_warnings(summary.warnings, console)
        if choices is not None:
            show_sweep(choices, resampling.confidence, console)
        if table is not None:
            show_published(table, resampling.confidence, console)
    refuse_contradictions(summary)


def _resampling(resamples: int, confidence: float) -> "Resampling":
    from mxq.stats import Resampling

    try:
        return Resampling(resamples=resamples, confidence=confidence)
    except ValueError as error:
        raise UsageError(f"--resamples {resamples} --confidence {confidence:g}: {error}") from None


def _margins(options: dict[str, Any]) -> "Margins":
    """Return the margins: options first, then the file, then the defaults."""
    from mxq.analysis.margins import read_margins
    from mxq.stats import Margins

    given = read_margins(Path(options["margins_file"])) if options["margins_file"] else {}
    given |= {name: value for name in _MARGINS if (value := options[f"margin_{name}"]) is not None}
    try:
        return Margins(**given)
    except ValueError as error:
        raise UsageError(str(error), "a margin is a share, such as 0.03 for 3 %") from None
