"""Choosing tokens: temperature, top-k and top-p, and rejection sampling of drafts.

Rejection sampling keeps the target's distribution exactly, whatever the drafter proposes: a draft d sampled from q is
accepted with probability min(1, p(d) / q(d)); the first one refused is replaced by a sample from max(0, p - q),
normalized. p and q are both taken after temperature, top-k and top-p.

Source: arXiv 2211.17192, algorithm 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mxq.errors import UsageError

_GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy, as in vLLM."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits; the default is greedy. ``top_k`` 0 and ``top_p`` 1 mean no limit."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(f"temperature is {self.temperature}", "take 0 for greedy, or a positive number")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}", "take a number above 0 and up to 1")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}", "take 0 for no limit, or a positive number")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _GREEDY_BELOW

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the float32 distribution [..., vocabulary] that tokens are drawn from.

        In vLLM's order: temperature, then top-k (ties with the k-th stay), then the smallest set of most likely tokens
        whose probability reaches top_p.
        """
        x = logits.float() / self.temperature
        if 0 < self.top_k < x.shape[-1]:
            x = x.masked_fill(x < x.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            ordered, order = x.softmax(-1).sort(dim=-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p
            x = x.masked_fill(torch.zeros_like(beyond).scatter_(-1, order, beyond), -torch.inf)
        return x.softmax(-1)


GREEDY = Sampling()


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
    """Choose one token for each row of ``logits`` [T, vocabulary], rows independently.

    Returns the tokens [T] and, unless greedy, the distributions [T, vocabulary] that they were drawn from.
    """
    if sampling.greedy:
        return logits.argmax(-1), None
    probabilities = sampling.probabilities(logits)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0], probabilities


def accept_greedy(logits: Tensor, drafts: Tensor) -> tuple[int, list[int]]:
    """Compare ``drafts`` [k] with the target's choices; ``logits`` [k + 1, vocabulary], row 0 about the first draft.

    Returns the number of drafts accepted and the tokens to commit: those drafts and the target's next choice.
    """
    choices, proposed = logits.argmax(-1).tolist(), drafts.tolist()
    n = 0
    while n < len(proposed) and proposed[n] == choices[n]:
        n += 1
    return n, choices[: n + 1]


def accept_sampled(
    logits: Tensor, drafts: Tensor, q: Tensor, sampling: Sampling, generator: torch.Generator | None
) -> tuple[int, list[int]]:
    """Rejection-sample ``drafts`` [k] drawn from ``q`` [k, vocabulary]; arguments and result as for greedy."""
    p = sampling.probabilities(logits)
    k = len(drafts)
    u = torch.rand(k, generator=generator, device=p.device)
    index = drafts[:, None]
    accepted = u * q.gather(1, index)[:, 0] < p[:k].gather(1, index)[:, 0]
    n = int(accepted.int().cumprod(0).sum())
    rest = p[n]
    if n < k:
        surplus = (p[n] - q[n]).clamp_(min=0)
        # Only rounding can leave nothing: p equals q then, and p itself is what is left to draw from.
        rest = torch.where(surplus.sum() > 0, surplus, rest)
    bonus = torch.multinomial(rest, 1, generator=generator)
    return n, torch.cat([drafts[:n], bonus]).tolist()
