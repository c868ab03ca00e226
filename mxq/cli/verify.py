"""``mxq verify``: is a quantized checkpoint right?"""

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from mxq.cli.tables import table
from mxq.errors import MismatchError, UsageError, quoted
from mxq.progress import printable

if TYPE_CHECKING:
    from mxq.verify.findings import Report

_EPILOG = """\b
Checked, whoever made it: headers and index against the files; codes against
scales, and scales and numbers for what they cannot be; config.json against
the tensors, quantization_config both ways and by the rules by which vLLM
matches names; what mxq made also by the sha256 of every file. With --against
also that every tensor of the source is there, that what is not quantized is
the same bytes, and that sampled rows quantize to the same codes and scales;
of another tool's checkpoint, by which scale rule, and how far off.

\b
Exit code 0: all is well; 3: something is wrong, and each problem is listed
with what to do.

\b
Examples:
  mxq verify ./dense-mxfp4 --against testbed:dense
  mxq verify ./out --against ./Qwen3.5-27B --rows 0
  mxq verify ./out --against Qwen/Qwen3.5-397B-A17B --stream
  mxq verify ./downloaded --fix ./right
"""


@click.command(epilog=_EPILOG)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", help="The source: a directory, a hub id, or a testbed model.")
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=16,
    show_default=True,
    help="Rows of every matrix that are quantized again; 0 is all of them.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which rows.")
@click.option(
    "--stream",
    is_flag=True,
    help="Read of a source on the hub only what is compared, by a request or two for every matrix; keep none of it.",
)
@click.option(
    "--fix",
    "out",
    metavar="OUT",
    type=click.Path(path_type=Path),
    help="Write a copy to OUT in which config, index and headers are right. Problems of weights it refuses.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    directory: Path, against: str | None, rows: int, seed: int, stream: bool, out: Path | None, as_json: bool
) -> None:
    """Check the quantized checkpoint in DIRECTORY, against its source if given."""
    from mxq.checkpoint import open_headers, resolve
    from mxq.checkpoint.resolve import hub_id
    from mxq.verify.run import verify

    source_of = click.get_current_context().get_parameter_source
    given = [f"--{name}" for name in ("rows", "seed") if source_of(name) != ParameterSource.DEFAULT]
    if given and against is None:
        raise UsageError(f"{given[0]} is for comparing with a source", "name one with --against, or leave it out")
    if stream and (against is None or hub_id(against) is None):
        raise UsageError("--stream is for a source on the hub", "give its id with --against, or leave --stream out")
    source = None
    if against is not None:
        source = open_headers(against, beside=True) if stream else resolve(against)
    report = verify(directory, source, rows=rows, seed=seed)
    if not as_json:
        _show(report)
    done = None
    try:
        if out is not None:
            from mxq.verify.fix import fix

            done = fix(directory, out, report, source, rows=rows, seed=seed)
    finally:
        if as_json:
            click.echo(json.dumps(report.as_dict() | ({} if out is None else {"fixed": done}), indent=2))
    if done is not None and not as_json:
        click.echo(f"{out} is verified and has none of these problems: {done}")
    if report.problems and done is None:
        count = len(report.problems)
        what = f"{directory} has {count} problem{'s' if count > 1 else ''}"
        if all(problem.rewritable for problem in report.problems):
            raise MismatchError(what, f"{quoted('mxq', 'verify', directory)} --fix OUT writes a copy without")
        raise MismatchError(what, next(problem.fix for problem in report.problems if not problem.rewritable))


def _show(report: "Report") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(markup=False, highlight=False)
    shown = table("check", "result", "covered")
    for check in report.checks:
        outcome = Text("ok", "green") if check.done else Text("not done", "yellow")
        result = Text(f"{len(check.problems)} wrong", "bold red") if check.problems else outcome
        shown.add_row(check.name, result, printable(check.covered))
    console.print(shown)
    for problem in report.problems:
        for mark, text in (("* ", printable(problem.what)), ("  -> ", printable(problem.fix))):
            if console.is_terminal:
                indent = " " * len(mark)
                text = textwrap.fill(text, console.width, initial_indent=mark, subsequent_indent=indent)
                click.echo(text)
            else:  # whole, so that what it says is found
                click.echo(mark + text)
