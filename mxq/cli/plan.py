"""``mxq plan``: what a conversion would do, from headers alone."""

import json
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mxq.cli.options import conversion_options, jobs_option, shard_size_option
from mxq.cli.placement import Sizes, as_dict, show_placed
from mxq.cli.tables import numbers_hidden, show, table
from mxq.files import size

if TYPE_CHECKING:
    from mxq.convert.plan import Plan

_EPILOG = """\b
Examples:
  mxq plan testbed:dense --recipe mxfp4
  mxq plan testbed:dense --tensors
  mxq plan ./Qwen3.5-27B --recipe ./mine.yaml
  mxq plan Qwen/Qwen3.5-27B@main    (a branch, tag or commit)
  mxq plan ./Qwen3.5-35B-A3B --experts fused --json | jq '.tensors[].rule'
  mxq plan Qwen/Qwen3.5-27B --format compressed-tensors
  mxq plan Qwen/Qwen3.5-35B-A3B --tp 1,2,4,8 --ep 1,8    (paths on MI355X)
"""


@click.command(epilog=_EPILOG)
@click.argument("model")
@conversion_options
@shard_size_option
@jobs_option
@click.option(
    "--tp",
    "tps",
    type=Sizes(),
    metavar="N,N",
    help="Show what vLLM with AITER would do on MI355X with each of these tensor parallel sizes.",
)
@click.option(
    "--ep",
    "eps",
    type=Sizes(),
    metavar="N,N",
    help="The same with experts shared whole by so many GPUs, all else by --tp in DP copies: EP = TP x DP as in vLLM. "
    "1 is no EP: then every expert is shared by TP.",
)
@click.option("--tensors", is_flag=True, help="Show tensors, not only rules; layers and experts are counted together.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every single tensor, instead of a table.")
def command(
    model: str,
    recipe: str,
    form: str,
    experts: str,
    max_shard_size: int,
    jobs: int,
    tps: tuple[int, ...] | None,
    eps: tuple[int, ...] | None,
    tensors: bool,
    as_json: bool,
) -> None:
    """Show what converting MODEL would do, by which rule, and write nothing.

    MODEL is a directory, a model's id on the Hugging Face hub, or a testbed model. Everything that would
    make the conversion fail or the result not load is an error here.
    """
    from mxq.checkpoint import open_headers
    from mxq.checkpoint.resolve import hub_id
    from mxq.convert import recipe as recipes
    from mxq.convert.estimate import calibration, estimate
    from mxq.convert.plan import plan
    from mxq.convert.stream import most_at_once

    planned = plan(open_headers(model), recipes.load(recipe), form=form, experts=experts, max_shard_size=max_shard_size)
    at_most = None
    if planned.recipe.budget is not None:
        from mxq.convert.mixed import most_bytes

        at_most = most_bytes(planned)
    placed = []
    if tps or eps:
        from mxq.convert.placement import place

        placed = place(planned, tps or (1,), eps)
    expected, calibrating, asked = estimate(planned, jobs), calibration(planned), planned.recipe.calibration
    files, at_once = most_at_once(planned, planned.source.sizes)
    if as_json:
        stream = {"source_files_at_once": files, "disk_bytes": planned.bytes_after + at_once}
        facts = {"model": model, **planned.as_dict(), "expected": asdict(expected), "stream": stream}
        if calibrating is not None and asked is not None:
            facts["calibration"] = {"algorithm": planned.recipe.algorithm, **asdict(asked), **asdict(calibrating)}
        if at_most is not None and asked is not None:
            facts["mixed"] = {"budget": planned.recipe.budget, "bytes_at_most": at_most, **asdict(asked)}
        if placed:
            facts["placement"] = as_dict(placed)
        click.echo(json.dumps(facts, indent=2))
        return
    _show(planned, model, tensors)
    own = "the testbed's text" if model.startswith("testbed:") else "text from --calib"
    text = "" if asked is None else f"{asked.samples} samples of {asked.length} tokens ({asked.set or own})"
    if at_most is not None:
        click.echo(
            f"of this, `mxq quantize` keeps what is most sensitive, measured on {text}\nwith the model in memory, "
            f"as far as the budget of {planned.recipe.budget:g} goes: {size(at_most)} at most"
        )
    if calibrating is not None:
        click.echo(
            f"calibration by {planned.recipe.algorithm} on {text} comes first:\n"
            f"{calibrating.blocks} decoder layers one after the other, about {size(calibrating.peak_bytes)} of memory "
            "for one with its text"
        )
    click.echo(
        f"expected with {jobs} thread(s): {size(expected.peak_bytes)} of memory at most, "
        f"{_duration(expected.seconds)} or\nas long as it takes to read and write the files"
    )
    if hub_id(model) is not None:
        disk = size(planned.bytes_after + at_once)
        click.echo(f"with --stream: {disk} of disk, the output and {files} source file(s) at a time")
    if placed:
        show_placed(placed)


def _show(planned: "Plan", model: str, tensors: bool) -> None:
    rows: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
    for decision in planned.decisions:
        tensor = decision.tensor
        name = (numbers_hidden(tensor.name), f"{tensor.dtype} {list(tensor.shape)}") if tensors else ()
        row = rows[decision.action, decision.rule, *name]
        for i, amount in enumerate((1, decision.bytes_before, decision.bytes_after)):
            row[i] += amount
    shown = table("action", "rule", *(("tensor", "as stored") if tensors else ()), ">count", ">before", ">after")
    for key, (count, before, after) in sorted(rows.items(), key=lambda row: row[0][0] != "quantize"):
        shown.add_row(*key, str(count), size(before), size(after))
    show(shown)
    for lint in planned.lints:
        click.echo(f"note: {lint}")
    click.echo(
        f"{model}, {planned.family}, recipe {planned.recipe.name}, format {planned.form}:\n"
        f"{size(planned.bytes_before)} -> {size(planned.bytes_after)} in {len(planned.shards)} file(s), "
        f"{len(planned.exclude)} entries of what is not quantized"
    )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
