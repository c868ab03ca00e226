"""What a reader of a run must know about its models before believing any number: kept in run.json, shown each time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.beside import DEQUANTIZED, MANIFEST
from mxq.checkpoint.fp8 import stored
from mxq.checkpoint.headers import parse_json
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.reader import inside
from mxq.errors import MxqError


def of_conversion(checkpoints: Mapping[str, Checkpoint]) -> list[str]:
    """Return a warning where the MXFP4 target's manifest doesn't name the bf16 target as what it was made from.

    No manifest, no warning: other tools write none.
    """
    if checkpoints.keys() != {"bf16", "mxfp4"}:
        return []
    converted = checkpoints["mxfp4"].path
    if not (converted / MANIFEST).is_file() or _simulates(checkpoints):
        return []
    try:
        source = _source(checkpoints["mxfp4"], MANIFEST)
    except MxqError as error:
        return [f"it is not known what {converted} was converted from: {error.message}. Run `mxq verify` on it."]
    if not isinstance(source, dict) or source.get("fingerprint") != fingerprint(checkpoints["bf16"]):
        return [
            f"{converted} was converted from another model, or another copy of it, than {checkpoints['bf16'].path}: "
            f"{MANIFEST} has another source fingerprint. Differences between the targets may not come from MXFP4. "
            "`mxq verify --against` compares the two."
        ]
    return []


def is_simulation(checkpoint: Checkpoint) -> bool:
    """Tell whether `mxq dequantize` made a checkpoint: bf16 that are the numbers of MXFP4 weights."""
    return checkpoint.quantization is None and (checkpoint.path / DEQUANTIZED).is_file()


def of_simulation(checkpoints: Mapping[str, Checkpoint]) -> Iterator[str]:
    """Yield what a target is that was made from MXFP4 weights: no baseline for them, and without quantized inputs."""
    for role, target in checkpoints.items():
        made = f"{target.path} holds MXFP4 weights, written as bf16 by `mxq dequantize`"
        if not is_simulation(target):
            continue
        if role == "mxfp4":
            yield (
                f"{made}: what is called mxfp4 here has their error, with activations unquantized (W4A16) whatever the "
                "checkpoint does that it was made from."
            )
        elif _simulates(checkpoints):
            yield (
                f"{made}, of {checkpoints['mxfp4'].path}: both targets have the same weights, and differ in how "
                "activations are computed. What is called bf16 here is no baseline for the weights."
            )
        else:
            yield f"{made}: what is called bf16 here has their error already."


def _simulates(checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Tell whether the bf16 target was made from the MXFP4 target."""
    if checkpoints.keys() != {"bf16", "mxfp4"} or not is_simulation(checkpoints["bf16"]):
        return False
    try:
        source = _source(checkpoints["bf16"], DEQUANTIZED)
    except MxqError:
        return False
    return isinstance(source, dict) and source.get("fingerprint") == fingerprint(checkpoints["mxfp4"])


def _source(checkpoint: Checkpoint, name: str) -> Any:
    """Return what a file of mxq's beside a checkpoint says it was made from; raise MxqError if it cannot be read."""
    file = inside(checkpoint.path, name)
    return parse_json(file.read_bytes(), str(file)).get("source")


def of_fp8(checkpoints: Mapping[str, Checkpoint]) -> list[str]:
    """Return a warning where the bf16 target is a block-FP8 checkpoint, which engines run otherwise."""
    target = checkpoints.get("bf16")
    if target is None or stored(target) is target:
        return []
    return [
        f"{target.path} is block-FP8: what is called bf16 here is its weights as bf16, with activations unquantized, "
        "which engines that run it as FP8 quantize."
    ]


def of_few(conversations: Mapping[str, int], concurrencies: Sequence[int]) -> list[str]:
    """Return a warning for each workload that is too small for so many requests in flight."""
    found = []
    for name, count in conversations.items():
        if beyond := sorted(concurrency for concurrency in set(concurrencies) if concurrency > count):
            at = " and ".join(map(str, beyond))
            found.append(f"{name} has {count} conversations: no more than {count} are in flight at concurrency {at}")
    return found


def of_budgets(drafter: str, block_size: int, budgets: Sequence[int]) -> list[str]:
    """Return a warning for budgets that a DFlash drafter, trained on blocks of ``block_size``, never saw."""
    beyond = [str(budget) for budget in sorted(set(budgets)) if budget >= block_size]
    if not beyond:
        return []
    return [
        f"-k {' '.join(beyond)} is more than {drafter} was trained to draft, {block_size - 1} "
        f"(block_size {block_size}): expect the last drafts of each pass to be poor."
    ]
