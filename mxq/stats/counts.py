"""What bootstraps need of an arm: sums by conversation, of passes and acceptance or of tokens and seconds.

A conversation is a prompt with all of its turns. Its turns, and repeats of it, belong together: they are no evidence
about other prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mxq.stats.acceptance import Passes, check_passes
from mxq.stats.bootstrap import Array


@dataclass(frozen=True, eq=False)
class Counts:
    """Of n conversations in the order of their names, with a budget of K drafts.

    ``passes``, ``accepted``: [n]. ``survived``, ``at_risk``: [n, K], defined in :mod:`mxq.stats.acceptance`.
    ``requests``: [n], those with a verify pass; ``lengths``: [n], the sum of their acceptance lengths.
    """

    conversations: tuple[str, ...]
    passes: Array
    accepted: Array
    survived: Array
    at_risk: Array
    requests: Array
    lengths: Array

    @property
    def num_speculative_tokens(self) -> int:
        """Return the budget K."""
        return self.survived.shape[1]


def count(requests: Sequence[Passes], conversations: Sequence[str], num_speculative_tokens: int) -> Counts:
    """Sum the verify passes of ``requests`` by the conversation that each belongs to, named in the same order.

    Raises ValueError for lists of different length and counts that cannot be.
    """
    names, place = _places(conversations, len(requests))
    for request in requests:
        check_passes(request, num_speculative_tokens)
    n, K = len(names), num_speculative_tokens
    of_pass = np.repeat(_integers(place), _integers([len(request.accepted) for request in requests]))
    accepted = _integers([a for request in requests for a in request.accepted])
    drafted = _integers([d for request in requests for d in request.drafted])
    # Passes by conversation, accepted and drafted; a cell at risk at position i has a >= i and d > i.
    table = np.zeros((n, K + 1, K + 1))
    np.add.at(table, (of_pass, accepted, drafted), 1)
    survived = table.sum(axis=2)[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    at_risk = np.stack([table[:, i:, i + 1 :].sum(axis=(1, 2)) for i in range(K)], axis=1)
    answered = [(at, request) for at, request in zip(place, requests, strict=True) if len(request.accepted)]
    return Counts(
        conversations=names,
        passes=table.sum(axis=(1, 2)),
        accepted=survived.sum(axis=1),
        survived=survived,
        at_risk=at_risk,
        requests=_summed([at for at, _ in answered], [1.0 for _ in answered], n),
        lengths=_summed([at for at, _ in answered], [1 + float(np.mean(r.accepted)) for _, r in answered], n),
    )


@dataclass(frozen=True, eq=False)
class Timed:
    """Output tokens and seconds of n conversations in the order of their names, [n] each."""

    conversations: tuple[str, ...]
    tokens: Array
    seconds: Array


def timed(output_tokens: Sequence[int], durations_s: Sequence[float], conversations: Sequence[str]) -> Timed:
    """Sum the requests of an arm, of all of its repeats, that ran one after another, by conversation.

    Raises ValueError for lists of different length, and for a time that is not positive.
    """
    names, place = _places(conversations, len(output_tokens))
    if len(durations_s) != len(output_tokens) or not all(seconds > 0 for seconds in durations_s):
        raise ValueError("throughput needs one positive duration per request")
    return Timed(names, _summed(place, output_tokens, len(names)), _summed(place, durations_s, len(names)))


class _Named(Protocol):
    @property
    def conversations(self) -> tuple[str, ...]: ...


def check_same(base: _Named, new: _Named) -> None:
    """Raise ValueError unless both are of the same conversations."""
    if base.conversations != new.conversations:
        only = set(base.conversations) ^ set(new.conversations)
        raise ValueError(f"{len(only)} prompts are in one arm only, such as {min(only)}: they cannot be paired")


def _places(conversations: Sequence[str], requests: int) -> tuple[tuple[str, ...], Sequence[int]]:
    if len(conversations) != requests:
        raise ValueError(f"{requests} requests, but the conversations of {len(conversations)}")
    names = tuple(sorted(set(conversations)))
    order = {name: place for place, name in enumerate(names)}
    return names, [order[name] for name in conversations]


def _summed(place: Sequence[int], values: Sequence[float], n: int) -> Array:
    sums = np.zeros(n)
    np.add.at(sums, _integers(place), values)
    return sums


def _integers(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
