"""Calibration text: documents of workloads or of a file, packed into samples of one length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mxq.calibrate.algorithms import Calibration


@dataclass(frozen=True)
class Samples:
    """Text as tokens.

    Attributes:
        ids: int64 [samples, length]; every place is a token of the text, none is padding.
        facts: what a manifest keeps: ``set``, ``samples``, ``length``, ``seed``, how many ``documents`` there were and
            ``tokens`` in them, ``sha256`` of the samples.
    """

    ids: Tensor
    facts: dict[str, Any]


def tokens(
    calibration: Calibration, model: str, tokenizer: Path, vocabulary: int, *, data_dir: Path | None = None
) -> Samples:
    """Return the samples that ``calibration`` asks for, the same ones every time.

    Args:
        calibration: which text and how much of it.
        model: the source as the user named it; ``testbed:...`` has a text of its own.
        tokenizer: the directory with the model's tokenizer and chat template.
        vocabulary: how many token ids the model's embedding has.
        data_dir: where published workloads are read from.

    Raises:
        UsageError: no text is named; it cannot be read, is empty or too short; the tokenizer does not fit.
    """
    raise NotImplementedError
