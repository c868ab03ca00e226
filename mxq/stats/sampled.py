"""Intervals of one arm: acceptance lengths, survival, conditional acceptance, tokens per second; and over repeats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mxq.stats.bootstrap import LINEAR, RELATIVE, SHARE, Array, Replicates, Resampling, mean_of_strata, replicates
from mxq.stats.counts import Counts, Timed
from mxq.stats.intervals import Band, Interval, band, interval

DEFAULT = Resampling()


@dataclass(frozen=True)
class AcceptanceIntervals:
    """Acceptance of an arm over prompts like these; :mod:`mxq.stats.acceptance` defines the quantities.

    ``per_request_mean``: every request weighs alike; a turn of a conversation is a request, so that other tools call it
    the per-turn mean. ``per_conversation_mean``: every conversation weighs alike, its turns pooled; the same number
    where each has one turn. ``survival`` is a simultaneous band; ``conditional`` has an interval for each position by
    itself, None where nothing was at risk.
    """

    pooled: Interval
    per_request_mean: Interval
    per_conversation_mean: Interval
    survival: Band
    conditional: tuple[Interval | None, ...]


def acceptance_intervals(counts: Counts, resampling: Resampling = DEFAULT) -> AcceptanceIntervals | None:
    """Return the intervals of an arm's acceptance; None if it has no verify pass."""
    if not counts.passes.any():
        return None
    lengths = 1.0, 1.0 + counts.num_speculative_tokens
    passes = counts.passes[:, None]

    def length(top: Array, bottom: Array) -> Interval:
        return interval(replicates(top[None], bottom[None], resampling), resampling, lengths)

    at_risk = (counts.at_risk > 0).sum(axis=0)
    conditional = replicates(counts.survived[None], counts.at_risk[None], resampling, SHARE) if at_risk.any() else None
    return AcceptanceIntervals(
        pooled=length(tokens(counts), passes),
        per_request_mean=length(counts.lengths[:, None], counts.requests[:, None]),
        per_conversation_mean=length(*conversation_lengths(counts)),
        survival=band(replicates(counts.survived[None], passes[None], resampling, SHARE), resampling, (0.0, 1.0)),
        conditional=tuple(
            interval(conditional.only(i, int(n)), resampling, (0.0, 1.0)) if conditional and n else None
            for i, n in enumerate(at_risk)
        ),
    )


def survival_all_alike(workloads: Sequence[Counts], resampling: Resampling = DEFAULT) -> Band:
    """Return the mean survival of an arm over workloads of one budget, each workload weighing alike.

    It is the arithmetic mean, so that the difference of two arms is that of :func:`mxq.stats.band_all_alike`. Raises
    ValueError without a workload.
    """
    if not workloads:
        raise ValueError("no workload to average over")
    drawn = [replicates(one.survived[None], one.passes[None, :, None], resampling) for one in workloads]
    return band(mean_of_strata(drawn), resampling, (0.0, 1.0))


def throughput_interval(sums: Timed, resampling: Resampling = DEFAULT) -> Interval:
    """Return tokens per second of requests that ran one after another, with the interval over prompts.

    Raises ValueError without a request.
    """
    if not sums.conversations:
        raise ValueError("throughput needs at least one request")
    drawn = replicates(sums.tokens[None, :, None], sums.seconds[None, :, None], resampling)
    return interval(drawn, resampling, (0.0, math.inf))


def over_repeats(values: Sequence[float], resampling: Resampling = DEFAULT) -> Interval:
    """Return the mean of a measurement's repeats with Student's t interval; unbounded for a single one.

    Raises ValueError without any.
    """
    return interval(student(values), resampling, (0.0, math.inf))


def student(values: Sequence[float], *, relative: bool = False) -> Replicates:
    """Return repeated measurements as what Student's t interval is made of: a mean, its error, and no draws."""
    if not values:
        raise ValueError("an interval over repeats needs at least one")
    measured = np.asarray(values, dtype=np.float64)
    error = measured.std(ddof=1) / math.sqrt(len(measured)) if len(measured) > 1 else 0.0
    scale, nothing = RELATIVE if relative else LINEAR, np.empty((0, 1))
    return Replicates(len(measured), scale, np.array([measured.mean()]), np.array([error]), nothing, nothing)


def tokens(counts: Counts) -> Array:
    """Return the tokens that each conversation's verify passes gave, bonus tokens included, [n, 1]."""
    return (counts.accepted + counts.passes)[:, None]


def conversation_lengths(counts: Counts) -> tuple[Array, Array]:
    """Return each conversation's own pooled length, and 1 for each that has one, [n, 1] both."""
    there = counts.passes[:, None] > 0
    lengths = np.divide(tokens(counts), counts.passes[:, None], out=np.zeros_like(tokens(counts)), where=there)
    return lengths, there.astype(np.float64)
