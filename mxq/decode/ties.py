"""How near a tie the choice was where two greedy outputs part.

In bf16 a verify pass over several tokens rounds otherwise than one over a single token, and two nearly equal logits may
then change places. That explains a difference between greedy speculative decoding and plain decoding only if the two
tokens really were nearly equal: closer than what rounding does to logits. Teacher-forced on the common beginning, in
float32 and as served, that can be said of every single difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mxq.decode.target import Target


@dataclass(frozen=True)
class Parting:
    """Where two outputs part: ``position`` of the first token that differs; the rest in logits.

    ``gap`` is by how much the worse of the two tokens is below the best one, in float32. ``rounding`` is the largest
    error of a logit anywhere in that sequence, as served against float32.
    """

    position: int
    gap: float
    rounding: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding can make either token win: each of two logits may be off by ``rounding``."""
        return self.gap <= 2 * self.rounding


@torch.inference_mode()
def parting(
    exact: Target, served: Target, prompt: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> Parting | None:
    """Return where two outputs for ``prompt`` (token ids) part and how near a tie it was there, None if they do not.

    ``exact`` is the target in float32, ``served`` the same as it decoded.

    Raises:
        ValueError: an output is only the beginning of the other, which no rounding explains.
    """
    if list(first) == list(second):
        return None
    position = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if position is None:
        raise ValueError(f"an output of {len(first)} tokens and one of {len(second)}: one is the other's beginning")
    ids = torch.tensor([*prompt, *first[:position]])
    logits, rounded = (_logits(target, ids) for target in (exact, served))
    two = logits[-1][torch.tensor([first[position], second[position]], device=logits.device)]
    gap = float(logits[-1].max() - two.min())
    return Parting(position, gap, float((rounded.to(logits.device) - logits).abs().max()))


def _logits(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """Return float32 logits [T, vocabulary] of a whole sequence."""
    hidden = target.prompt(target.start(len(ids)), ids.to(target.device)).hidden
    return target.logits(hidden).float()
