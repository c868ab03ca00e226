"""``mxq serve``: the vLLM server of the published runs, printed or started."""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from mxq import progress
from mxq.cli.options import variable
from mxq.errors import MxqError, UsageError

if TYPE_CHECKING:
    from mxq.checkpoint import Checkpoint
    from mxq.engines.launch import Launch, Served

_BUDGET = 15
_EPILOG = """\b
On an MI355X, MXFP4 experts need AITER 0.1.16.post2 or later.

\b
Examples:
  mxq serve Qwen/Qwen3.5-27B --hardware mi355x --spec dflash \\
      --draft z-lab/Qwen3.5-27B-DFlash --budget 15 --print
  mxq serve ./Qwen3.5-35B-A3B-MXFP4 --hardware mi355x --spec mtp -k 3
  mxq serve testbed:dense --hardware cpu --spec dflash --port 8001
  mxq serve /models/moe-mxfp4 --hardware mi355x --assume moe-mxfp4 --print
"""


@click.command(epilog=_EPILOG)
@click.argument("model")
@click.option(
    "--hardware", type=click.Choice(["mi355x", "h200", "cpu"]), required=True, help="What the server runs on."
)
@click.option(
    "--spec",
    "method",
    type=click.Choice(["ar", "mtp", "dflash"]),
    default="ar",
    show_default=True,
    help="Plain decoding, the model's own MTP head, or a DFlash drafter.",
)
@click.option("--draft", "--drafter", "drafter", metavar="MODEL", help="DFlash drafter.  [default: the testbed's own]")
@click.option(
    "-k",
    "--budget",
    type=click.IntRange(min=1),
    metavar="K",
    help=f"Draft tokens per verify pass.  [default: {_BUDGET}]",
)
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tensor_parallel_size",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="GPUs that share the model; for MI355X, `mxq plan --tp` says how well.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port to listen on.")
@click.option(
    "--base",
    type=click.Choice(["published", "defaults"]),
    default="published",
    show_default=True,
    help="What is not said here: as in the published runs, or vLLM's own defaults.",
)
@click.option(
    "--engine-arg",
    "engine_args",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Any other option of vllm serve, repeatable; replaces one that mxq sets.",
)
@click.option(
    "--env", "variables", metavar="NAME=VALUE", multiple=True, help="Any other environment variable, repeatable."
)
@click.option(
    "--assume",
    type=click.Choice(["bf16", "dense-mxfp4", "moe-mxfp4"]),
    help="Take MODEL for this and look at no model: for those of another machine.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the line for a shell, and start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON, argv and env, and start nothing.")
def command(model: str, only_print: bool, as_json: bool, **options: Any) -> None:
    """Serve MODEL with vLLM as the published runs did, in the foreground.

    MODEL is a directory, a hub id or a testbed model, bf16 or MXFP4. vLLM is that of the environment that mxq is
    installed in, or else the one on the PATH; mxq becomes it, so that signals and the exit code are vLLM's. Before,
    mxq looks at configs and headers: whether the drafter is one for MODEL, whether MODEL needs AITER's kernels.
    """
    made, hardware = _made(model, **options)
    if as_json:
        click.echo(json.dumps({"argv": list(made.argv), "env": dict(made.env)}, indent=2))
    elif only_print:
        click.echo(made.shell)
    else:
        _become(made, hardware)


def _made(
    model: str,
    hardware: str,
    method: Any,
    drafter: str | None,
    budget: int | None,
    assume: str | None,
    variables: tuple[str, ...],
    **options: Any,
) -> tuple["Launch", str]:
    from mxq.engines import servable
    from mxq.engines.launch import launch

    drafter = _drafter(model, method, drafter)
    if method == "ar" and budget is not None:
        raise UsageError("--budget with plain decoding, which drafts nothing", "add --spec mtp or --spec dflash")
    k = _BUDGET if budget is None else budget
    env = dict(map(variable, variables))
    if assume is None:
        target = _opened(model)
        kind = servable.kind_of(target)
        opened = None if drafter is None else _opened(drafter)
        servable.check(target, kind, hardware, method, k, opened, options["tensor_parallel_size"])
    else:
        kind = servable.ASSUMED[assume]
        servable.check_kernels(kind, hardware, model)
    made = launch(
        hardware,
        _served(model),
        method,
        k,
        None if drafter is None else _served(drafter),
        experts_on_aiter=kind.experts_on_aiter,
        env=env,
        **options,
    )
    for warning in servable.warnings(kind, hardware, method, made.argv):
        progress.note(f"warning: {warning}")
    return made, hardware


def _drafter(model: str, method: str, drafter: str | None) -> str | None:
    if method != "dflash":
        if drafter is not None:
            raise UsageError(f"a drafter with --spec {method}", "only --spec dflash takes one")
        return None
    if drafter is None:
        if not model.startswith("testbed:"):
            raise UsageError("DFlash needs a drafter", "give --draft MODEL: a DFlash drafter made for this target")
        return f"{model}-dflash"
    return drafter


def _opened(spec: str) -> "Checkpoint":
    from mxq.checkpoint import open_headers

    try:
        return open_headers(spec)
    except MxqError as error:
        also = "--assume looks at no model"
        raise type(error)(error.message, also if error.hint is None else f"{error.hint}; {also}") from error


def _served(spec: str) -> "Served":
    from mxq import testbed
    from mxq.checkpoint.resolve import hub_id
    from mxq.engines.launch import Served

    if spec.startswith(testbed.PREFIX):
        return Served(str(testbed.path(spec)))
    on_hub = hub_id(spec)
    return Served(spec) if on_hub is None else Served(on_hub.name, on_hub.revision)


def _become(made: "Launch", hardware: str) -> None:
    from mxq.engines.launch import UNLESS_SET
    from mxq.engines.process import no_vllm, vllm_program

    path = vllm_program(hardware)
    if path is None:
        raise no_vllm(hardware, "--print the command and run it where it is")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(path, [path, *made.argv[1:]], UNLESS_SET | dict(os.environ) | dict(made.env))
