"""Acceptance length, survival and conditional acceptance.

With a_p the drafts accepted in verify pass p of n passes, and d_p the drafts that pass could have accepted. d_p is
below K in two cases: the model's longest sequence left no room for K drafts, or an accepted draft was the end of the
text, behind which nothing counts (then d_p = a_p). A pass whose tokens are cut by a limit on the answer's length counts
in full.

* pooled acceptance length = 1 + sum(a_p) / n: tokens committed per verify pass, bonus token included. vLLM's
  definition; the published tables use it.
* per-request mean = mean over requests of the same quantity within the request. Short requests weigh as much as long
  ones, so it is a different number: the two are never to be compared with each other.
* survival_i = share of all passes with a_p > i (position i from 0). As every a_p is the number of positions it
  survives, pooled acceptance length = 1 + sum of survival, exactly.
* conditional_i = passes with a_p > i among those at risk: a_p >= i and d_p > i. A pass that was not allowed to accept
  position i is censored there; it did not fail. Without censoring this is survival_i / survival_(i-1).

A server's own counters know only sums: of passes, of accepted drafts, and of passes that accepted each position. They
give the pooled length and survival, and nothing by request or at risk. They also count drafts behind an end of text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np


class Passes(NamedTuple):
    """The verify passes of one request: drafts accepted, and drafts that could have been, in order."""

    accepted: Sequence[int]
    drafted: Sequence[int]


@dataclass(frozen=True)
class Acceptance:
    """What :func:`acceptance` returns; the module's docstring defines the quantities.

    ``per_request_sd`` is the standard deviation over requests (None with fewer than two). ``survival``,
    ``conditional`` (None where nothing was at risk) and ``at_risk`` have one entry per draft position. ``source`` is
    "passes", or "counters": then what needs more than sums is None.
    """

    requests: int
    passes: int
    pooled: float
    per_request_mean: float | None
    per_request_sd: float | None
    survival: tuple[float, ...]
    conditional: tuple[float | None, ...] | None
    at_risk: tuple[int, ...] | None
    source: Literal["passes", "counters"] = "passes"

    @property
    def nothing_accepted(self) -> bool:
        """Whether not one draft was accepted: an acceptance length of exactly 1."""
        return self.survival[0] == 0


def acceptance(requests: Sequence[Passes], num_speculative_tokens: int) -> Acceptance | None:
    """Summarise the verify passes of ``requests`` made with a budget of ``num_speculative_tokens`` drafts.

    A request that ended before its first verify pass says nothing about acceptance and is left out; None when that
    leaves no request. Raises ValueError for counts that cannot be (accepted above drafted, drafted above the budget,
    lists of different length), and if the identity of pooled length and survival does not hold.
    """
    counted = [request for request in requests if len(request.accepted)]
    for request in requests:
        check_passes(request, num_speculative_tokens)
    if not counted:
        return None
    accepted = np.concatenate([np.asarray(request.accepted, dtype=np.int64) for request in counted])
    drafted = np.concatenate([np.asarray(request.drafted, dtype=np.int64) for request in counted])
    positions = np.arange(num_speculative_tokens)
    survived = (accepted[:, None] > positions).sum(axis=0)
    at_risk = ((accepted[:, None] >= positions) & (drafted[:, None] > positions)).sum(axis=0)
    passes = len(accepted)
    pooled = 1 + int(accepted.sum()) / passes
    survival = survived / passes
    if not np.isclose(pooled, 1 + survival.sum(), rtol=0, atol=1e-9):
        raise ValueError(f"pooled acceptance length {pooled} is not 1 + sum of survival {1 + survival.sum()}")
    lengths = np.array([1 + np.mean(request.accepted) for request in counted])
    return Acceptance(
        requests=len(counted),
        passes=passes,
        pooled=pooled,
        per_request_mean=float(lengths.mean()),
        per_request_sd=float(lengths.std(ddof=1)) if len(lengths) > 1 else None,
        survival=tuple(float(share) for share in survival),
        conditional=tuple(int(s) / int(r) if r else None for s, r in zip(survived, at_risk, strict=True)),
        at_risk=tuple(int(count) for count in at_risk),
    )


def counted_acceptance(requests: int, passes: int, accepted: int, per_position: Sequence[int]) -> Acceptance | None:
    """Summarise what a server counted: verify passes, drafts accepted in them, and passes that accepted each position.

    None without a pass. Raises ValueError for counts that cannot be, also if pooled length and survival disagree.
    """
    if not passes:
        return None
    falling = all(a >= b for a, b in zip((passes, *per_position), per_position, strict=False))
    if accepted != sum(per_position) or not falling:
        raise ValueError(f"{accepted} drafts accepted in {passes} passes, by position {list(per_position)}")
    return Acceptance(
        requests=requests,
        passes=passes,
        pooled=1 + accepted / passes,
        per_request_mean=None,
        per_request_sd=None,
        survival=tuple(count / passes for count in per_position),
        conditional=None,
        at_risk=None,
        source="counters",
    )


def check_passes(request: Passes, num_speculative_tokens: int) -> None:
    """Raise ValueError unless 0 <= accepted <= drafted <= ``num_speculative_tokens`` in every pass."""
    if len(request.accepted) != len(request.drafted):
        raise ValueError(f"{len(request.accepted)} accepted counts but {len(request.drafted)} drafted counts")
    for index, (accepted, drafted) in enumerate(zip(request.accepted, request.drafted, strict=True)):
        if not 0 <= accepted <= drafted <= num_speculative_tokens:
            raise ValueError(
                f"verify pass {index} accepted {accepted} of {drafted} drafts with a budget of {num_speculative_tokens}"
            )
