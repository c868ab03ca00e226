"""What a calibration made, read from the files of its blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Calibrated:
    """The weights of the quantized modules, and what else the algorithm changed.

    Attributes:
        directory: the files of the blocks, ``block-00000.safetensors`` and so on.
        modules: every quantized module -> the file that holds it.
        kept: tensors that are not quantized but have new values, in the source's dtype, by their names there: norms
            before scaled linears.
        column_scales: module -> float32 [K]: what its columns were multiplied by before it was quantized.
        row_scales: module -> float32 [N]: what its rows were divided by.
        fallback: modules rounded to nearest (rule ``even``) because no token of the text reached them.
        tokens_seen: routed expert (``...mlp.experts.3``) -> tokens of the text that were sent to it.
        facts: algorithm, options, text, versions, seconds: what a manifest keeps.
    """

    directory: Path
    modules: Mapping[str, Path]
    kept: Mapping[str, Tensor]
    column_scales: Mapping[str, Tensor]
    row_scales: Mapping[str, Tensor]
    fallback: tuple[str, ...]
    tokens_seen: Mapping[str, int]
    facts: dict[str, Any]

    def codes(self, module: str) -> tuple[Tensor, Tensor]:
        """Return a module's packed codes uint8 [N, K/2] and scales uint8 [N, K/32], as Quark writes them.

        Raises:
            KeyError: the module was not calibrated.
        """
        raise NotImplementedError
