"""``mxq dequantize``: MXFP4 weights as bf16."""

import json
from pathlib import Path

import click

from mxq.cli.options import jobs_option, shard_size_option
from mxq.files import size

_EPILOG = """\b
Examples:
  mxq dequantize ./dense-mxfp4 ./dense-bf16
  mxq dequantize amd/Qwen3.5-35B-A3B-MXFP4 ./out --max-shard-size 10GB
"""


@click.command(epilog=_EPILOG)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--experts",
    type=click.Choice(["published", "fused", "per-expert"]),
    default="published",
    show_default=True,
    help="How routed experts are written: one tensor for all of a layer, one for each, or as the published "
    "checkpoints have them (the language model's fused, the MTP head's as they are).",
)
@shard_size_option
@jobs_option
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
def command(model: str, out: Path, experts: str, max_shard_size: int, jobs: int, as_json: bool) -> None:
    """Write the MXFP4 checkpoint MODEL as bf16 into the new directory OUT.

    For engines without MXFP4: every packed weight becomes exactly the number that it means, everything else
    is copied. Activations are not simulated. MODEL is a directory or a model's id on the Hugging Face hub, of
    mxq, AMD Quark, llm-compressor or AutoRound; what `mxq verify` finds wrong in its headers or config is
    refused. OUT appears when all of it is there; until then files are in OUT.partial, and after Ctrl-C,
    SIGTERM or a crash the same command continues with those that are complete.
    """
    from mxq.checkpoint import resolve
    from mxq.convert.dequantize import plan
    from mxq.convert.dequantize_run import run
    from mxq.convert.partial import check
    from mxq.progress import note

    check(out, 0, {})  # before anything is downloaded
    planned = plan(resolve(model), experts=experts, max_shard_size=max_shard_size)
    if not planned.weight_only:
        note("note: this checkpoint quantizes activations too, as the model runs, and that is not simulated")
    run(planned, out, model, jobs=jobs)
    before = sum(tensor.nbytes for tensor in planned.source.tensors.values())
    if as_json:
        summary = {
            "out": str(out),
            "bytes_before": before,
            "bytes_after": planned.bytes_after,
            "dequantized_matrices": planned.matrices,
            "copied_tensors": planned.copies,
            "experts": experts,
            "activations": "unquantized" if planned.weight_only else "quantized, not simulated",
            "files": [shard.file for shard in planned.shards],
        }
        click.echo(json.dumps(summary, indent=2))
        return
    click.echo(
        f"{out}: {size(before)} -> {size(planned.bytes_after)}, {planned.matrices} matrices in bf16, "
        f"{planned.copies} tensors copied"
    )
