"""How far apart two targets are behind the same tokens, by their logits alone: KL divergence, choices, perplexity.

Of T tokens, each with the distributions p and q that the first and the second target give it at temperature 1:

* divergence: KL(p || q) = sum of p (log p - log q), in nats;
* nll: -log p and -log q of the token that the text has there, in nats; the exponential of its mean is the perplexity;
* same: whether both would choose the same token greedily, of equal logits the first, as decoding does.

The logits are those that a target computes, in its own dtype, and everything from there on is float64: in float32 the
sum over a vocabulary leaves about 1e-6 nats of its own, as much as a mild quantization does to one layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mxq.decode.target import Target

_PIECE = 128
"""Tokens that a target reads at once."""

_ELEMENTS = 2**22
"""As many logits of each target are compared at once: 32 MB in float64, of which some five are needed."""


@dataclass(frozen=True)
class Compared:
    """Two targets behind the same T tokens, on the CPU; what is not finite comes from logits that were not."""

    divergence: Tensor
    """[T] float64: KL(first || second), nats; 0 where all logits are equal, and never below."""
    first_nll: Tensor
    """[T] float64, nats."""
    second_nll: Tensor
    """[T] float64, nats."""
    same: Tensor
    """[T] bool."""


@torch.inference_mode()
def compare(first: Tensor, second: Tensor, tokens: Tensor) -> Compared:
    """Compare logits [T, vocabulary] of two targets, of any dtypes, for the tokens [T] that the text has there."""
    rows = max(1, _ELEMENTS // first.shape[-1])
    pieces = zip(first.split(rows), second.split(rows), tokens.split(rows), strict=True)
    return _joined([_compare(*piece) for piece in pieces])


@torch.inference_mode()
def compare_on(targets: tuple[Target, Target], ids: Sequence[int], begin: int) -> Compared:
    """Send a text through both targets and compare what they say of its tokens from ``begin`` (1 or more) on."""
    text = torch.tensor(list(ids), device=targets[0].device)
    states = [target.start(len(ids)) for target in targets]
    compared = []
    for start in range(0, len(ids) - 1, _PIECE):  # nothing is asked behind the last token
        piece = text[start : min(start + _PIECE, len(ids) - 1)]
        asked = slice(max(0, begin - 1 - start), None)
        hidden = [target.prompt(state, piece).hidden[asked] for target, state in zip(targets, states, strict=True)]
        first, second = (target.logits(one) for target, one in zip(targets, hidden, strict=True))
        compared.append(compare(first, second, text[start + 1 : start + 1 + len(piece)][asked]))
    return _joined(compared)


def kl_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second) [T] of log-probabilities [T, vocabulary]."""
    # Rounding can leave a sum of almost nothing below 0.
    return (first.exp() * (first - second)).sum(-1).clamp_(min=0)


def _compare(first: Tensor, second: Tensor, tokens: Tensor) -> Compared:
    log_p, log_q = (logits.double().log_softmax(-1) for logits in (first, second))
    nlls = [-log.gather(-1, tokens[:, None])[:, 0] for log in (log_p, log_q)]
    same = first.argmax(-1) == second.argmax(-1)
    return Compared(*(one.cpu() for one in (kl_divergence(log_p, log_q), *nlls, same)))


def _joined(parts: Sequence[Compared]) -> Compared:
    names = ("divergence", "first_nll", "second_nll", "same")
    return Compared(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
