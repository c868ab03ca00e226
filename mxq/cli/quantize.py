"""``mxq quantize``: convert a checkpoint."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mxq.cli.options import conversion_options, jobs_option, shard_size_option
from mxq.errors import UsageError, quoted
from mxq.files import size

if TYPE_CHECKING:
    from mxq.convert.executors import Executor

_SHOWN_GROUPS = 8

_EPILOG = """\b
Examples:
  mxq quantize testbed:dense ./dense-mxfp4
  mxq quantize ./Qwen3.5-35B-A3B ./out --recipe mxfp4 --max-shard-size 10GB
  mxq quantize Qwen/Qwen3.5-27B ./out --recipe mxfp4-weight-only
  mxq quantize ./Qwen3.5-27B ./out --recipe mxfp4-gptq --calib ./text.jsonl
  mxq quantize ./Qwen3.5-27B ./out --recipe mxfp4-mixed --calib ./text.jsonl
  mxq quantize Qwen/Qwen3.5-27B ./out --format compressed-tensors
  mxq quantize Qwen/Qwen3.5-397B-A17B-FP8 ./out
  mxq quantize Qwen/Qwen3.5-27B@main ./out    (a branch, tag or commit)
  mxq quantize Qwen/Qwen3.5-397B-A17B ./out --stream
  mxq quantize ./Qwen3.5-397B-A17B ./out --device cuda --jobs 16
  mxq quantize /shared/Qwen3.5-397B-A17B /shared/out --executor ray
"""


@click.command(epilog=_EPILOG)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@conversion_options
@shard_size_option
@click.option(
    "--calib",
    metavar="NAME|FILE",
    multiple=True,
    help="Text on which a calibrated or mixed recipe measures, repeatable.  [default: as the recipe says]",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Read published workloads of --calib from here, as `mxq eval` does.",
)
@click.option(
    "--stream",
    is_flag=True,
    help="Of a model on the hub, fetch a file of weights when its turn comes, and remove it when it is converted.",
)
@click.option(
    "--check-source",
    is_flag=True,
    help="Compare what the hub's cache holds of the model with the hub's sha256 first; what is downloaded always is.",
)
@jobs_option
@click.option(
    "--device",
    metavar="NAME",
    default="cpu",
    show_default=True,
    help="What quantizes: cpu, cuda for all GPUs (of ROCm, too), or cuda:0,1 for some. The bytes are the same, but a "
    "calibration's.",
)
@click.option(
    "--executor",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Who converts: this process, or the nodes of a Ray cluster that share a file system, --jobs CPUs per file.",
)
@click.option(
    "--ray-address", metavar="HOST:PORT", help="Of the cluster.  [default: RAY_ADDRESS, or the one found here]"
)
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
def command(
    model: str,
    out: Path,
    recipe: str,
    form: str,
    experts: str,
    max_shard_size: int,
    calib: tuple[str, ...],
    data_dir: Path | None,
    stream: bool,
    check_source: bool,
    jobs: int,
    device: str,
    executor: str,
    ray_address: str | None,
    as_json: bool,
) -> None:
    """Convert MODEL to MXFP4 into the new directory OUT.

    MODEL is a directory, a model's id on the Hugging Face hub, or a testbed model; in bf16, fp16, fp32 or
    block-FP8 (e4m3 with weight_scale_inv, which becomes bf16 where it is not quantized). Tensors are read and
    written one at a time. OUT appears when all of it is there; until then files are in OUT.partial, and after
    Ctrl-C, SIGTERM or a crash the same command continues with those that are complete.

    Recipes that calibrate (mxfp4-gptq, mxfp4-awq, mxfp4-smoothquant) first run the model, one decoder layer
    after the other, on text that --calib names, on the first --device. They need AMD Quark: mxq[quark].
    mxfp4-mixed loads the whole model there, and measures the error at the output of each part quantized alone.

    A model on the hub is downloaded to the hub's cache, or with --stream file by file: then the disk needs room
    for the output and, as a rule, one file of the source; `mxq plan` says how much.
    """
    from mxq.checkpoint import Checkpoint, open_headers, resolve
    from mxq.checkpoint.resolve import hub_id
    from mxq.convert import mixed
    from mxq.convert import recipe as recipes
    from mxq.convert.calibration import prepare
    from mxq.convert.devices import named
    from mxq.convert.origin import begun
    from mxq.convert.partial import check
    from mxq.convert.plan import plan
    from mxq.convert.run import disk_bytes, run

    if executor == "local" and ray_address is not None:
        raise UsageError("--ray-address is for --executor ray", "add it, or leave the address out")
    if executor == "ray" and stream:
        raise UsageError("--stream is for --executor local", "without it a model on the hub is downloaded first")
    if executor == "ray" and device != "cpu":
        raise UsageError("--device is for --executor local", "nodes of a cluster convert on their CPUs")
    devices = named(device)
    chosen = recipes.load(recipe)
    if chosen.algorithm is not None and executor == "ray":
        raise UsageError(f"--executor ray is for recipes without algorithm, and {chosen.name} has one", "leave it out")
    if chosen.calibration is not None and stream:
        raise UsageError(f"--stream is for recipes that read no text, and {chosen.name} does", "leave it out")
    options: dict[str, Any] = {"form": form, "experts": experts, "max_shard_size": max_shard_size}
    on_hub = hub_id(model)
    for option, given in (("--stream", stream), ("--check-source", check_source)):
        if given and on_hub is None:
            raise UsageError(f"{resolve(model)} is on this disk already", f"{option} is for a model's id on the hub")
    if chosen.algorithm is not None:
        check(out, 0, {})  # as far as that goes before Quark is imported, which takes long
    with _cluster(ray_address) if executor == "ray" else contextlib.nullcontext() as execute:
        if check_source and on_hub is not None:
            from mxq.checkpoint.hub import check_cached

            check_cached(on_hub)
        if on_hub is not None:  # it is downloaded only if it can be converted, to where it shall go
            tokenizer = stream or chosen.calibration is not None
            planned = plan(open_headers(model, beside=tokenizer), chosen, **options)
            stage = prepare(planned, model, calib, devices, data_dir)
            if chosen.budget is not None:
                samples = mixed.prepare(planned, model, out, calib, data_dir)
            else:
                made = begun(planned, model, stage=stage, stream=stream)
                check(out, disk_bytes(planned, stage, stream=stream), made)
        if not stream:
            planned = plan(Checkpoint.open(resolve(model)), chosen, **options)
        if on_hub is None:
            stage = prepare(planned, model, calib, devices, data_dir)
        if chosen.budget is not None:
            if on_hub is None:
                samples = mixed.prepare(planned, model, out, calib, data_dir)
            resolved = mixed.resolve(planned, out, samples, devices[0] if devices else "cpu")
            planned = plan(Checkpoint.open(planned.source.path), resolved, **options)
        run(planned, out, model, jobs=jobs, devices=devices, stream=stream, executor=execute, stage=stage)
    matrices = sum(len(group.pieces) for group in planned.groups.values())
    kept, dequantized = (
        sum(group.action == action for group in planned.groups.values()) for action in ("keep", "dequantize")
    )
    if as_json:
        summary = {
            "out": str(out),
            "recipe": chosen.name,
            "format": form,
            "bytes_before": planned.bytes_before,
            "bytes_after": planned.bytes_after,
            "quantized_matrices": matrices,
            "kept_tensors": kept,
            "dequantized_tensors": dequantized,
            "files": [shard.file for shard in planned.shards],
            **({} if stage is None else {"calibration": stage.facts}),
            **planned.recipe.chosen,
        }
        click.echo(json.dumps(summary, indent=2))
        return
    before, after = size(planned.bytes_before), size(planned.bytes_after)
    unpacked = f", {dequantized} from FP8 to bf16" if dequantized else ""
    click.echo(f"{out}: {before} -> {after}, {matrices} matrices in MXFP4, {kept} tensors copied{unpacked}")
    if planned.recipe.chosen:
        click.echo(_chosen(planned.recipe.chosen["choice"]))
    command_line = quoted("mxq", "verify", out, "--against", model, *(["--stream"] if stream else []))
    click.echo(f"check it against its source: {command_line}")


def _chosen(choice: dict[str, Any]) -> str:
    kept = [group["group"] for group in choice["groups"] if group["kept"]]
    more = len(kept) - _SHOWN_GROUPS
    shown = ", ".join(kept[:_SHOWN_GROUPS]) + (f" and {more} more" if more > 0 else "")
    kl, whole = (choice[name]["kl"]["estimate"] for name in ("chosen", "everything_quantized"))
    return (
        f"kept, of {len(choice['groups'])} groups: {shown or 'none'};\n"
        f"KL to the unquantized model {kl:.6f} on the text of the choice, {whole:.6f} with everything quantized"
    )


def _cluster(address: str | None) -> "contextlib.AbstractContextManager[Executor]":
    from mxq.convert.ray_cluster import connected

    context = click.get_current_context()
    given = context.get_parameter_source("jobs") != ParameterSource.DEFAULT
    return connected(address, context.params["jobs"] if given else None)
