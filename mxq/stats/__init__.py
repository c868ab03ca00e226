"""Statistics of speculative decoding from per-pass counts: no engine, no files, plain numbers in and out."""

from mxq.stats.acceptance import Acceptance, Passes, acceptance, counted_acceptance
from mxq.stats.bootstrap import Resampling
from mxq.stats.counts import Counts, Timed, count, timed
from mxq.stats.identity import Identity, identity
from mxq.stats.intervals import Band, Interval
from mxq.stats.latency import Latencies, Percentiles, latencies
from mxq.stats.paired import (
    AcceptanceChange,
    acceptance_change,
    all_alike,
    band_all_alike,
    length_difference,
    mean_change,
    repeats_change,
    throughput_change,
)
from mxq.stats.repeats import Repeated, repeated
from mxq.stats.sampled import (
    AcceptanceIntervals,
    acceptance_intervals,
    over_repeats,
    survival_all_alike,
    throughput_interval,
)
from mxq.stats.throughput import Span, Throughput, decode_tokens_per_s, throughput
from mxq.stats.verdict import ENOUGH, Judged, Margins, Verdict, holm, judge, judge_all, p_outside, prompts_to_decide

__all__ = [
    "ENOUGH",
    "Acceptance",
    "AcceptanceChange",
    "AcceptanceIntervals",
    "Band",
    "Counts",
    "Identity",
    "Interval",
    "Judged",
    "Latencies",
    "Margins",
    "Passes",
    "Percentiles",
    "Repeated",
    "Resampling",
    "Span",
    "Throughput",
    "Timed",
    "Verdict",
    "acceptance",
    "acceptance_change",
    "acceptance_intervals",
    "all_alike",
    "band_all_alike",
    "count",
    "counted_acceptance",
    "decode_tokens_per_s",
    "holm",
    "identity",
    "judge",
    "judge_all",
    "latencies",
    "length_difference",
    "mean_change",
    "over_repeats",
    "p_outside",
    "prompts_to_decide",
    "repeated",
    "repeats_change",
    "survival_all_alike",
    "throughput",
    "throughput_change",
    "throughput_interval",
    "timed",
]
