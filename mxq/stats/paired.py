"""What changed between two arms that were given the same prompts, with intervals.

Prompts differ far more from each other than two measurements of one prompt. So the passes of both arms of a
conversation are drawn together, and the ratio or difference is taken of every draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mxq.stats.bootstrap import RELATIVE, Array, Resampling, mean_of_strata, replicates
from mxq.stats.counts import Counts, Timed, check_same
from mxq.stats.intervals import Band, Interval, band, interval
from mxq.stats.sampled import DEFAULT, conversation_lengths, student, tokens


@dataclass(frozen=True)
class AcceptanceChange:
    """From one arm's acceptance to another's.

    ``pooled``, ``per_request_mean`` and ``per_conversation_mean`` are relative: new length / base length - 1.
    ``difference`` is that of the pooled lengths, in tokens; ``survival`` that of the shares at each position.
    """

    pooled: Interval
    difference: Interval
    per_request_mean: Interval
    per_conversation_mean: Interval
    survival: Band


def acceptance_change(base: Counts, new: Counts, resampling: Resampling = DEFAULT) -> AcceptanceChange | None:
    """Compare the same conversations in two arms; None if either arm has no verify pass.

    Raises ValueError if they are not of the same conversations, or not of one budget.
    """
    difference = length_difference(base, new, resampling)
    if difference is None:
        return None
    passes = _both(base.passes[:, None], new.passes[:, None])
    K = base.num_speculative_tokens
    relative = 1 / (K + 1) - 1, float(K)

    def change(tops: Array, bottoms: Array) -> Interval:
        return interval(replicates(tops, bottoms, resampling, RELATIVE), resampling, relative)

    conversations = zip(conversation_lengths(base), conversation_lengths(new), strict=True)
    return AcceptanceChange(
        pooled=change(_both(tokens(base), tokens(new)), passes),
        difference=difference,
        per_request_mean=change(
            _both(base.lengths[:, None], new.lengths[:, None]), _both(base.requests[:, None], new.requests[:, None])
        ),
        per_conversation_mean=change(*(_both(*arms) for arms in conversations)),
        survival=band(replicates(_both(base.survived, new.survived), passes, resampling), resampling, (-1.0, 1.0)),
    )


def length_difference(base: Counts, new: Counts, resampling: Resampling = DEFAULT) -> Interval | None:
    """Return the difference of the pooled lengths alone, with the conditions of :func:`acceptance_change`."""
    check_same(base, new)
    K = base.num_speculative_tokens
    if new.num_speculative_tokens != K:
        raise ValueError(f"budgets of {K} and {new.num_speculative_tokens} drafts: lengths cannot be compared")
    if not (base.passes.any() and new.passes.any()):
        return None
    passes = _both(base.passes[:, None], new.passes[:, None])
    drawn = replicates(_both(tokens(base), tokens(new)), passes, resampling)
    return interval(drawn, resampling, (-K, K))


def throughput_change(base: Timed, new: Timed, resampling: Resampling = DEFAULT) -> Interval:
    """Return the relative change of tokens per second, of requests that ran one after another, paired by prompt.

    The interval is over prompts. What changes from one start of a server to the next, and with the machine, is in it
    only as far as the repeats of each prompt average it. Raises ValueError if the conversations are not the same, or
    an arm has no tokens.
    """
    check_same(base, new)
    if not (base.tokens.any() and new.tokens.any()):
        raise ValueError("a change of throughput needs tokens in both arms")
    tops, bottoms = _both(base.tokens[:, None], new.tokens[:, None]), _both(base.seconds[:, None], new.seconds[:, None])
    return interval(replicates(tops, bottoms, resampling, RELATIVE), resampling)


def mean_change(base: Sequence[float], new: Sequence[float], resampling: Resampling = DEFAULT) -> Interval:
    """Return new mean - base mean of what the same items score in two arms, drawn together item by item.

    Raises ValueError for lists of different length, and for none.
    """
    if len(base) != len(new) or not base:
        raise ValueError("a change of means needs one value of each arm for every item")
    values = _both(np.asarray(base, dtype=np.float64)[:, None], np.asarray(new, dtype=np.float64)[:, None])
    return interval(replicates(values, np.ones_like(values), resampling), resampling)


def repeats_change(base: Sequence[float], new: Sequence[float], resampling: Resampling = DEFAULT) -> Interval:
    """Return the relative change of a positive rate, paired by repeat: Student's t on the logarithms of the ratios.

    A single repeat gives no interval (``bounded`` is false). Raises ValueError for lists of different length, for none,
    and for a rate that is not positive.
    """
    if len(base) != len(new) or not all(rate > 0 for rate in (*base, *new)):
        raise ValueError("a change over repeats needs one positive rate of each arm in every repeat")
    ratios = [math.log(b / a) for a, b in zip(base, new, strict=True)]
    return interval(student(ratios, relative=True), resampling)


def all_alike(changes: Sequence[Interval], resampling: Resampling = DEFAULT) -> Interval:
    """Return the mean of changes in several workloads, each workload weighing alike.

    Of relative changes it is the geometric mean of new / base, less 1. Prompts were drawn within each workload. Raises
    ValueError without any, and for intervals over repeats: take the mean within each repeat instead.
    """
    drawn = [change.replicates for change in changes if change.replicates and len(change.replicates.drawn_errors)]
    if not changes or len(drawn) != len(changes):
        raise ValueError("workloads are averaged by draws of prompts, which each of them must have")
    return interval(mean_of_strata(drawn), resampling)


def band_all_alike(changes: Sequence[Band], resampling: Resampling = DEFAULT) -> Band:
    """Return the mean of differences of survival in several workloads of one budget, each workload weighing alike."""
    if not changes:
        raise ValueError("no workload to average over")
    return band(mean_of_strata([change.replicates for change in changes]), resampling, (-1.0, 1.0))


def _both(base: Array, new: Array) -> Array:
    return np.stack([base, new])
