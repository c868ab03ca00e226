"""``mxq layout``: the byte orders that AITER's kernels read, written, undone and told apart."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxq.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from mxq.convert.layout_parts import Rank

_KERNELS = ("moe-a4w4", "moe-interleaved", "moe-triton", "dense-asm", "dense-triton")

_EPILOG = """\b
Examples:
  mxq layout export ./moe-mxfp4 ./rank1 --kernel moe-a4w4 --tp 2 --rank 1
  mxq layout undo ./rank1 ./plain
  mxq layout check ./rank1 --against ./moe-mxfp4
"""
_EXPORT = """\b
Kernels:
  moe-a4w4         fused_moe, gate mode separated: W4A4 in vLLM, SGLang
  moe-interleaved  fused_moe, gate mode interleave (gpt-oss, a16w4)
  moe-triton       moe_gemm_a16w4, moe_gemm_a4w4: transposes of what they take
  dense-asm        gemm_a4w4, assembly and CK
  dense-triton     gemm_afp4wfp4_preshuffle, gemm_a16wfp4_preshuffle

\b
Examples:
  mxq layout export ./moe-mxfp4 ./rank1 --kernel moe-a4w4 --tp 2 --rank 1
  mxq layout export ./moe-mxfp4 ./out --kernel moe-a4w4 --ep 8 --rank 3
  mxq layout export ./dense-mxfp4 ./out --kernel dense-asm --only '*.o_proj'
"""
_UNDO = """\b
Example:
  mxq layout undo ./rank1 ./plain
"""
_CHECK = """\b
Exit code 3: a tensor is in an order that mxq does not know, or not in the
one that is expected, or its padding is wrong.

\b
Examples:
  mxq layout check ./rank1 --against ./moe-mxfp4
  mxq layout check dumped.safetensors --against ./moe-mxfp4 --tp 4 --rank 2
"""


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Write weights and scales as AITER's kernels for MI355X read them; and the way back.

    None of it has run on that hardware: it is held to the bytes that AITER's own functions give.
    """


@command.command(epilog=_EXPORT)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--kernel", "name", type=click.Choice(_KERNELS), required=True, help="What is to read it; see below.")
@click.option("--tp", type=int, default=1, show_default=True, help="GPUs that share every matrix.")
@click.option(
    "--ep",
    type=int,
    default=1,
    show_default=True,
    help="GPUs, or groups of --tp of them, that share experts (in vLLM --tp is 1 for experts then).",
)
@click.option("--rank", type=int, default=0, show_default=True, help="Which GPU: EP rank * TP + TP rank, from 0.")
@click.option("--only", metavar="GLOB", default="*", help="Only blocks of experts or modules of these names.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
def export(model: str, out: Path, name: str, tp: int, ep: int, rank: int, only: str, as_json: bool) -> None:
    """Write packed layers of the MXFP4 checkpoint MODEL for one GPU into the new directory OUT.

    Experts become X.w13, X.w13_scale, X.w2 and X.w2_scale, padded as vLLM pads them; dense modules X.weight and
    X.weight_scale. mxq_layout.json beside them says what they are.
    """
    from mxq.checkpoint import resolve
    from mxq.checkpoint.staging import check as check_out
    from mxq.convert.layout_export import plan, run
    from mxq.convert.layout_parts import Rank
    from mxq.files import size
    from mxq.layouts.kernels import KERNELS

    of = Rank(tp, ep, rank)
    check_out(out, 0)  # before anything is downloaded
    planned = plan(resolve(model), KERNELS[name], of, only)
    run(planned, out, model)
    if as_json:
        summary = {
            "out": str(out),
            "kernel": name,
            "tp": tp,
            "ep": ep,
            "rank": rank,
            "operands": [one.name for one in planned.operands],
            "bytes": planned.bytes_after,
        }
        click.echo(json.dumps(summary, indent=2))
        return
    click.echo(
        f"{out}: {len(planned.operands)} layers for {name}, rank {rank} of {tp * ep}, {size(planned.bytes_after)}"
    )


@command.command(epilog=_UNDO)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON.")
def undo(directory: Path, out: Path, as_json: bool) -> None:
    """Write what `mxq layout export` wrote to DIRECTORY as plain matrices into the new directory OUT.

    They are the bytes of the source, without padding, for the part that the GPU has: X.weight and X.weight_scale,
    every expert's on its own. Files are compared with their checksums first.
    """
    from mxq.convert.layout_undo import open_export
    from mxq.convert.layout_undo import undo as undone

    found = open_export(directory)
    count = undone(found, out)
    if as_json:
        click.echo(json.dumps({"out": str(out), "operands": list(found.sizes), "matrices": count}, indent=2))
        return
    click.echo(f"{out}: {count} plain matrices of {len(found.sizes)} layers")


@command.command(epilog=_CHECK)
@click.argument("path", metavar="FILE|DIRECTORY", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", required=True, help="The MXFP4 checkpoint that it was made from.")
@click.option("--kernel", "name", type=click.Choice(_KERNELS), help="The layout that is expected, of a FILE.")
@click.option("--tp", type=int, help="GPUs that share every matrix, of a FILE.  [default: 1]")
@click.option("--ep", type=int, help="The same for experts.  [default: 1]")
@click.option("--rank", type=int, help="Which GPU.  [default: 0]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def check(
    path: Path, against: str, name: str | None, tp: int | None, ep: int | None, rank: int | None, as_json: bool
) -> None:
    """Tell in which order the bytes of every tensor are, by comparing them with the source.

    A DIRECTORY is what `mxq layout export` wrote, and must be as its description says. A FILE is any safetensors
    file of operands with the names of `mxq layout export` or of vLLM's parameters, which may be merged of several
    modules; save codes as bytes: parameter.data.view(torch.uint8).

    What padding holds is said: 0 in codes (anything else is wrong), 1 in scales as vLLM leaves them, and whatever
    memory held in columns behind those that a kernel reads. Which columns those are, and so a NaN among scales that are
    read, is known with --kernel.
    """
    from mxq.checkpoint import resolve
    from mxq.convert.layout_check import check as compare
    from mxq.layouts.kernels import KERNELS

    if path.is_dir() and (name, tp, ep, rank) != (None,) * 4:
        raise UsageError(
            "--kernel, --tp, --ep and --rank are for a file; a directory has a description", "leave them out"
        )
    of = None if path.is_dir() else _rank(tp, ep, rank)
    findings = compare(path, resolve(against), None if name is None else KERNELS[name], of)
    wrong = [finding for finding in findings if finding.is_wrong]
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "tensor": one.tensor,
                "orders": list(one.orders),
                "expected": one.expected,
                "padding": {"read": sorted(one.padding.read), "behind": sorted(one.padding.behind)},
                "wrong": one.is_wrong,
            }
            for one in findings
        ]
        click.echo(json.dumps(rows, indent=2))
    else:
        for one in findings:
            click.echo(f"{'wrong' if one.is_wrong else 'ok':5}  {one.tensor}: {one.text}")
    if wrong:
        raise MismatchError(
            f"{path}: {len(wrong)} of {len(findings)} tensors are wrong, the first {wrong[0].tensor}: {wrong[0].text}",
            "a kernel would read them without an error, and compute nonsense",
        )


def _rank(tp: int | None, ep: int | None, rank: int | None) -> "Rank":
    from mxq.convert.layout_parts import Rank

    return Rank(1 if tp is None else tp, 1 if ep is None else ep, 0 if rank is None else rank)
