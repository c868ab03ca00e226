"""``mxq report``: what runs say, as a page, as Markdown, or as one number per line."""

import json
from pathlib import Path
from typing import Literal

import click

from mxq import files, progress
from mxq.errors import MxqError, UsageError

Format = Literal["html", "md", "csv"]

_SUFFIXES: dict[str, Format] = {".html": "html", ".htm": "html", ".md": "md", ".markdown": "md", ".csv": "csv"}

_EPILOG = """\b
A page is one file without scripts. It fetches nothing, is readable offline,
on a phone and on paper, in light and dark, and has the numbers behind every
picture in a table. Markdown is for issues and reviews, CSV has one number
per line with its interval.

\b
RUN is a directory made by `mxq eval --out`, or a recorded run that comes
with mxq: example:dense, example:moe.

\b
Examples:
  mxq report --example -o report.html
  mxq report ./run-27b ./run-35b --title "MXFP4 on MI355X" -o report.html
  mxq report ./run --format md | xclip
  mxq report ./run -o numbers.csv
"""


@click.command(epilog=_EPILOG)
@click.argument("specs", metavar="RUN...", nargs=-1)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE", help="File to write.  [default: standard output]"
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "md", "csv"]),
    help="What to write.  [default: by the ending of FILE; html without one]",
)
@click.option("--title", metavar="TEXT", help="The page's title.  [default: by the models]")
@click.option("--margins", metavar="FILE", help="A YAML file of margins, as `mxq compare` takes it.")
@click.option("--example", is_flag=True, help="Of the recorded runs that come with mxq.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict of every run as JSON; needs -o.")
def command(
    specs: tuple[str, ...],
    out: Path | None,
    kind: Format | None,
    title: str | None,
    margins: str | None,
    example: bool,
    as_json: bool,
) -> None:
    """Write what runs say into one file: verdict, tables, pictures with intervals, and where the numbers come from.

    The verdict compares the MXFP4 target with the bf16 target of each run; with one run of each, those of the two. `mxq
    compare` does the same in a terminal, and between any runs.
    """
    kind = _kind(out, kind)
    if as_json and out is None:
        raise UsageError("--json without -o", "say where the report goes: standard output can hold one of the two")
    from mxq.analysis.margins import read_margins
    from mxq.evaluate.recorded import EXAMPLES, read
    from mxq.report.page.analysed import analyse_all
    from mxq.report.page.build import build
    from mxq.stats import Margins, Resampling

    wanted = [*specs, *(EXAMPLES if example else ())]
    if not wanted:
        raise UsageError("no run", "give a directory made by `mxq eval --out`, or --example")
    chosen = Margins(**read_margins(Path(margins))) if margins else Margins()
    analysed = analyse_all([read(spec) for spec in dict.fromkeys(wanted)], Resampling(), chosen)
    page = build(analysed, title)
    if kind == "html":
        from mxq.report.page.html import write_html

        text = write_html(page)
    elif kind == "md":
        from mxq.report.page.markdown import write_markdown

        text = write_markdown(page)
    else:
        from mxq.report.page.tidy import write_csv

        text = write_csv(analysed)
    if out is None:
        click.echo(text, nl=False)
    else:
        try:
            with files.atomic_write(out) as stream:
                stream.write(text)
        except OSError as error:
            raise MxqError(f"cannot write {out}: {error.strerror}", "make room, or give another file with -o") from None
    verdicts = [
        {"run": one.run.name, "verdict": part.verdict.word, "text": part.verdict.text}
        for one, part in zip(analysed, page.parts, strict=True)
    ]
    if as_json:
        click.echo(json.dumps({"report": str(out), "verdicts": verdicts}, indent=2, ensure_ascii=False))
        return
    for said in verdicts:
        progress.note(f"{said['run']}: {said['verdict']}. {said['text']}")
    if out is not None:
        progress.note(f"wrote {out}")


def _kind(out: Path | None, kind: Format | None) -> Format:
    """Return what to write; raises UsageError where neither option nor ending tell, and for no place of a file."""
    if out is not None and out.is_dir():
        raise UsageError(f"{out} is a directory", "give a file, as in -o report.html")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"there is no directory {out.parent}", "make it first, or give another file with -o")
    if kind is not None:
        return kind
    if out is None:
        return "html"
    found = _SUFFIXES.get(out.suffix.lower())
    if found is None:
        raise UsageError(
            f"{out}: its ending tells no format", f"use one of {', '.join(_SUFFIXES)}, or say --format html, md or csv"
        )
    return found
