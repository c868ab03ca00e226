"""What a reader of a run must know about its models before believing any number: kept in run.json, shown each time."""

from collections.abc import Mapping, Sequence

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.fp8 import stored
from mxq.checkpoint.headers import parse_json
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.reader import inside
from mxq.errors import MxqError

_MANIFEST = "mxq_manifest.json"
_DEQUANTIZED = "mxq_dequantized.json"


def of_conversion(checkpoints: Mapping[str, Checkpoint]) -> list[str]:
    """Return a warning where the MXFP4 target's manifest doesn't name the bf16 target as what it was made from.

    No manifest, no warning: other tools write none.
    """
    if checkpoints.keys() != {"bf16", "mxfp4"}:
        return []
    converted = checkpoints["mxfp4"].path
    if not (converted / _MANIFEST).is_file():
        return []
    try:
        manifest = inside(converted, _MANIFEST)
        source = parse_json(manifest.read_bytes(), str(manifest)).get("source")
    except MxqError as error:
        return [f"it is not known what {converted} was converted from: {error.message}. Run `mxq verify` on it."]
    if not isinstance(source, dict) or source.get("fingerprint") != fingerprint(checkpoints["bf16"]):
        return [
            f"{converted} was converted from another model, or another copy of it, than {checkpoints['bf16'].path}: "
            f"{_MANIFEST} has another source fingerprint. Differences between the targets may not come from MXFP4. "
            "`mxq verify --against` compares the two."
        ]
    return []


def of_simulation(checkpoints: Mapping[str, Checkpoint]) -> list[str]:
    """Return a warning where the bf16 target was made from MXFP4 weights and so is no baseline for them."""
    target = checkpoints.get("bf16")
    if target is None or not (target.path / _DEQUANTIZED).is_file():
        return []
    return [
        f"{target.path} holds MXFP4 weights, written as bf16 by `mxq dequantize`: what is called bf16 here has their "
        "error already."
    ]


def of_fp8(checkpoints: Mapping[str, Checkpoint]) -> list[str]:
    """Return a warning where the bf16 target is a block-FP8 checkpoint, which engines run otherwise."""
    target = checkpoints.get("bf16")
    if target is None or stored(target) is target:
        return []
    return [
        f"{target.path} is block-FP8: what is called bf16 here is its weights as bf16, with activations unquantized, "
        "which engines that run it as FP8 quantize."
    ]


def of_budgets(drafter: str, block_size: int, budgets: Sequence[int]) -> list[str]:
    """Return a warning for budgets that a DFlash drafter, trained on blocks of ``block_size``, never saw."""
    beyond = [str(budget) for budget in sorted(set(budgets)) if budget >= block_size]
    if not beyond:
        return []
    return [
        f"-k {' '.join(beyond)} is more than {drafter} was trained to draft, {block_size - 1} "
        f"(block_size {block_size}): expect the last drafts of each pass to be poor."
    ]
