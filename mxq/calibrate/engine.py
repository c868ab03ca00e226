"""Run an algorithm of AMD Quark over a model, one decoder block after the other."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxq.calibrate.results import Calibrated
from mxq.calibrate.text import Samples
from mxq.checkpoint import Checkpoint
from mxq.models.qwen35 import Piece


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
    raise NotImplementedError
