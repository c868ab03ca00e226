"""Two targets teacher-forced on one text: what each would have said after every token, and how far apart they are.

Both read the same prompt and the same answer, so that everything is compared behind the same tokens:

* divergence: KL(p || q) = sum of p (log p - log q) in nats, of the distributions p and q that the first and the second
  target give for each token of the answer, at temperature 1 and whatever the answer was sampled with;
* flip: a token of the answer where the two would choose otherwise. Its gap in a target is by how much that target's own
  choice is above the other's, in logits;
* drift of what a drafter reads, at every token of the text: cosine of the two vectors, and |b - a| / |a|.

Everything is compared in float32, whatever the targets compute in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mxq.decode.divergence import kl_divergence
from mxq.decode.target import Pass, Target

_PIECE = 128
"""Tokens read at once: their logits, of two targets in float32, are what takes memory."""


@dataclass(frozen=True)
class Reading:
    """What one target made of a text. ``seen`` has every token's hidden state and features, and no logits.

    ``choices`` [answer + 1]: what the target would have said instead of each token of the answer, and behind the last.
    """

    seen: Pass
    choices: tuple[int, ...]


@dataclass(frozen=True)
class Flip:
    """A token of the answer, from 0, where two targets choose otherwise, and the gap in each, in logits."""

    token: int
    first_gap: float
    second_gap: float


@dataclass(frozen=True)
class Forced:
    """Both targets' readings of one text and how they differ; float32 on the CPU."""

    readings: tuple[Reading, Reading]
    divergence: Tensor
    """[answer]: KL(first || second), nats."""
    margin: Tensor
    """[answer]: by how much the first target's choice is above its second best, in logits."""
    flips: tuple[Flip, ...]
    cosine: Tensor
    """[what is read, prompt + answer]: of the layers tapped, in their order; without taps, of the output of the final
    norm, which the MTP head reads."""
    error: Tensor
    """As ``cosine``: relative error."""


@torch.inference_mode()
def force(targets: tuple[Target, Target], prompt: Sequence[int], answer: Sequence[int], taps: Sequence[int]) -> Forced:
    """Send ``prompt`` and ``answer`` (token ids, neither empty) through both targets.

    ``taps`` are the 0-based layers that the drafter reads, none for the MTP head.
    """
    ids = torch.tensor([*prompt, *answer], device=targets[0].device)
    states = [target.start(len(ids)) for target in targets]
    seen: tuple[list[Pass], list[Pass]] = ([], [])
    choices: tuple[list[int], list[int]] = ([], [])
    compared: list[tuple[Tensor, Tensor]] = []
    drift: list[tuple[Tensor, Tensor]] = []
    flips: list[Flip] = []
    for begin in range(0, len(ids), _PIECE):
        piece = ids[begin : begin + _PIECE]
        passes = [target.prompt(state, piece, taps) for target, state in zip(targets, states, strict=True)]
        for kept, one in zip(seen, passes, strict=True):
            kept.append(one)
        drift.append(_drift(*(_read(one, len(taps)) for one in passes)))
        asked = slice(max(0, len(prompt) - 1 - begin), None)  # from the prompt's last token on
        logits = [target.logits(one.hidden[asked]).float() for target, one in zip(targets, passes, strict=True)]
        told = [row.argmax(-1) for row in logits]
        flips += _flips(logits, told, len(choices[0]))
        for so_far, new in zip(choices, told, strict=True):
            so_far += new.tolist()
        log_p, log_q = (row.log_softmax(-1) for row in logits)
        compared.append((kl_divergence(log_p, log_q), _margin(logits[0])))
    size = len(answer)  # what comes behind the answer was asked of both, and is no part of it
    divergence, margin = (torch.cat(parts)[:size].cpu() for parts in zip(*compared, strict=True))
    cosine, error = (torch.cat(parts, dim=1).cpu() for parts in zip(*drift, strict=True))
    first, second = (Reading(_joined(p), tuple(told)) for p, told in zip(seen, choices, strict=True))
    return Forced(
        (first, second), divergence, margin, tuple(flip for flip in flips if flip.token < size), cosine, error
    )


def _read(seen: Pass, taps: int) -> Tensor:
    """Return what a drafter reads, in float32: [taps, T, hidden], or [1, T, hidden] of the final norm."""
    if not taps:
        return seen.hidden.float()[None]
    assert seen.features is not None
    return torch.stack(seen.features.float().chunk(taps, dim=-1))


def _drift(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return F.cosine_similarity(a, b, dim=-1), (b - a).norm(dim=-1) / a.norm(dim=-1)


def _margin(logits: Tensor) -> Tensor:
    best = logits.topk(2).values
    return best[:, 0] - best[:, 1]


def _flips(logits: Sequence[Tensor], told: Sequence[Tensor], begin: int) -> list[Flip]:
    found = []
    for row in (told[0] != told[1]).nonzero()[:, 0].tolist():
        a, b = int(told[0][row]), int(told[1][row])
        first, second = (of_target[row] for of_target in logits)
        found.append(Flip(begin + row, float(first[a] - first[b]), float(second[b] - second[a])))
    return found


def _joined(passes: Sequence[Pass]) -> Pass:
    features = [one.features for one in passes if one.features is not None]
    return Pass(
        torch.cat([one.hidden for one in passes]), torch.cat(features) if features else None, passes[0].logits[:0]
    )
