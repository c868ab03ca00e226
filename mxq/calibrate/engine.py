"""Run an algorithm of AMD Quark over a model, one decoder block after the other.

A block is built and loaded alone, calibrated on the hidden states that the block before it returned, written, run and
let go: memory is that of one block and of the hidden states of all samples. What the next block is given is what Quark
gives it: behind GPTQ the output of the block with its quantized weights, so that later blocks make up for the errors of
earlier ones; behind AWQ and SmoothQuant that of the block as it came. Activations are not quantized on the way.

Everything is computed in float32, whatever the checkpoint's type: 1 + w of the zero-centred norms and scaled weights
are rounded in bfloat16, Hessians are float32 in any case, and processors are no slower at it. The bytes are those of
Quark's own run over the whole model in float32; another number of threads may change last bits of sums, and with them
single codes.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxq import files
from mxq.calibrate.results import Block, Calibrated, read_tensor, write_tensors
from mxq.calibrate.text import Samples
from mxq.checkpoint import Checkpoint, fp8
from mxq.errors import MxqError, UsageError
from mxq.models import qwen35
from mxq.models.qwen35 import Piece
from mxq.progress import progress

if TYPE_CHECKING:
    from torch import Tensor

    from mxq.calibrate.blocks import Blocks
    from mxq.calibrate.quark import Outcome

_TOKENS_AT_ONCE = 2048
_RUN = "calibration.json"


def calibrate(
    source: Checkpoint,
    pieces: Sequence[Piece],
    algorithm: str,
    options: Mapping[str, Any],
    samples: Samples,
    directory: Path,
    *,
    device: str = "cpu",
) -> Calibrated:
    """Quantize ``pieces`` with Quark's ``algorithm`` and return what came out.

    Every finished block is a file in ``directory``; with the same arguments the next call goes on behind the last one.

    Args:
        source: the checkpoint, bf16, fp16, fp32 or block-FP8.
        pieces: the modules that the recipe quantizes, all of them in decoder layers (not of the MTP head).
        algorithm: one of :data:`mxq.calibrate.ALGORITHMS`.
        options: of the algorithm, as :func:`mxq.calibrate.check_options` returns them.
        samples: the text.
        directory: where blocks are kept; it need not be there.
        device: what computes, as torch calls it.

    Raises:
        UsageError: Quark, or what it needs, is not installed; it does not have the algorithm for this architecture; a
            piece is no linear of a decoder layer; ``directory`` holds another calibration.
        MxqError: a weight, an activation or a result is not finite; the checkpoint is incomplete.
    """
    import torch

    from mxq.calibrate import quark
    from mxq.calibrate.blocks import Blocks

    source = fp8.numbers(source)
    family = qwen35.family(source.config, str(source.path))
    version = quark.load()
    quark.check_algorithm(family, algorithm)
    blocks = Blocks(source, torch.device(device))
    wanted = _by_block(pieces, blocks)
    facts = {
        "algorithm": algorithm,
        "options": dict(options),
        "text": samples.facts,
        "quark": version,
        "torch": torch.__version__,
        "device": device,
        "dtype": "float32",
        "clips": algorithm == "awq",  # Quark's AWQ also searches a limit for the weights of every row and group
    }
    _begin(directory, _identity(source, pieces) | facts)
    last = max(wanted)
    done = next(index for index in range(last + 2) if not _block_file(directory, index).exists())
    Calibrated.open(directory, facts)  # what is damaged of it is told before hours of work
    with progress(f"calibrating by {algorithm}", last + 1, "blocks") as advance:
        advance(done)
        hidden = _hidden(directory, done, blocks, samples, last)
        for index in range(done, last + 1):
            started = time.monotonic()
            outcome = _block(blocks, index, wanted.get(index, ()), family, algorithm, options, _batches(hidden, device))
            hidden = torch.cat([output.cpu() for output in outcome.outputs])
            _check_finite(outcome, hidden, blocks.name(index))
            if index < last:
                write_tensors(_hidden_file(directory, index + 1), {"hidden": hidden})
            _named(outcome, blocks, index, time.monotonic() - started).write(_block_file(directory, index))
            _hidden_file(directory, index).unlink(missing_ok=True)
            advance(1)
    return Calibrated.open(directory, facts)


def _block(
    blocks: "Blocks",
    index: int,
    pieces: Sequence[Piece],
    family: str,
    algorithm: str,
    options: Mapping[str, Any],
    batches: "Sequence[Tensor]",
) -> "Outcome":
    from mxq.calibrate import quark

    model, name = blocks.load(index), blocks.name(index)
    if not pieces:
        return quark.Outcome(outputs=blocks.run(model, batches))
    quark.unfuse(model)
    names = [piece.module.removeprefix(name) for piece in pieces]
    stored = blocks.type_of(f"{name}post_attention_layernorm.weight")
    return quark.run(model, family, names, algorithm, options, batches, stored)


def _by_block(pieces: Sequence[Piece], blocks: "Blocks") -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        index = blocks.index_of(piece.module)
        if index is None:
            raise UsageError(
                f"{piece.module} is in no decoder layer, and only those are calibrated",
                "keep it in the recipe, or take a recipe without an algorithm",
            )
        found.setdefault(index, []).append(piece)
    if not found:
        raise UsageError("the recipe quantizes nothing that could be calibrated", "take a recipe without an algorithm")
    return found


def _identity(source: Checkpoint, pieces: Sequence[Piece]) -> dict[str, str]:
    held = [[name, tensor.dtype, list(tensor.shape), tensor.file.name] for name, tensor in source.tensors.items()]
    said = json.dumps([source.config, sorted(held), sorted(piece.module for piece in pieces)], sort_keys=True)
    return {"source_and_modules": hashlib.sha256(said.encode()).hexdigest()}


def _begin(directory: Path, run: dict[str, Any]) -> None:
    """Make the directory, or see that it holds this very calibration."""
    file = directory / _RUN
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            files.write_json(file, run)
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise MxqError(f"{file} cannot be used: {error}", f"delete {directory}: calibration starts again") from None
    differs = sorted(key for key in run if not isinstance(found, dict) or found.get(key) != run[key])
    if differs:
        raise UsageError(
            f"{directory} holds a calibration that differs in {', '.join(differs)}", "delete it, or give another place"
        )
    for left in directory.glob(".*.tmp"):
        left.unlink(missing_ok=True)


def _hidden(directory: Path, done: int, blocks: "Blocks", samples: Samples, last: int) -> "Tensor":
    """Return the inputs of block ``done`` [samples, length, hidden]."""
    import torch

    if done == 0:
        return blocks.embed(samples.ids)
    return torch.empty(0) if done > last else read_tensor(_hidden_file(directory, done), "hidden")


def _batches(hidden: "Tensor", device: str) -> "list[Tensor]":
    """Return batches of one size: Quark replays the first one's arguments with all of them."""
    samples, length = hidden.shape[:2]
    most = max(1, _TOKENS_AT_ONCE // length)
    size = max(size for size in range(1, most + 1) if samples % size == 0)
    return [batch.to(device) for batch in hidden.split(size)]


def _check_finite(outcome: "Outcome", hidden: "Tensor", where: str) -> None:
    scales = {f"a scale of {name}": value for name, value in (outcome.columns | outcome.rows).items()}
    for name, tensor in ({"its output": hidden} | outcome.norms | scales).items():
        if not tensor.isfinite().all():
            raise MxqError(
                f"calibrating {where.rstrip('.')}: {name} became NaN or infinite",
                "the weights up to this block are damaged, or float32 is too small for them: try the bf16 model itself",
            )


def _named(outcome: "Outcome", blocks: "Blocks", index: int, seconds: float) -> Block:
    name = blocks.name(index)
    routed = {f"{name}mlp.experts.{expert}": tokens for expert, tokens in outcome.routed.items()}
    return Block(
        codes={name + module: value for module, value in outcome.codes.items()},
        kept={
            f"{name}{norm}.weight": value.to("cpu", blocks.type_of(f"{name}{norm}.weight"))
            for norm, value in outcome.norms.items()
        },
        column_scales={name + module: value.cpu() for module, value in outcome.columns.items()},
        row_scales={name + module: value.cpu() for module, value in outcome.rows.items()},
        fallback=[name + module for module in outcome.codes if routed.get((name + module).rpartition(".")[0]) == 0],
        tokens_seen=routed,
        facts={
            "seconds": seconds,
            "unseen_columns": {name + module: count for module, count in outcome.unseen_columns.items()},
        },
    )


def _block_file(directory: Path, index: int) -> Path:
    return directory / f"block-{index:05d}.safetensors"


def _hidden_file(directory: Path, index: int) -> Path:
    return directory / f"hidden-{index:05d}.safetensors"
