"""Tokens per second with and without prefill, latencies, repeats, and token-by-token equality."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxq.stats import Repeated, Span, decode_tokens_per_s, identity, latencies, repeated, throughput


def test_tokens_per_second_pools_tokens_and_time() -> None:
    result = throughput([10, 30], [1.0, 1.0])
    assert (result.output_tokens, result.wall_s, result.tokens_per_s) == (40, 2.0, 20.0)
    assert (result.lower_quartile, result.upper_quartile) == (15.0, 25.0)
    assert throughput([10, 30], [1.0, 7.0]).tokens_per_s == 5.0  # not the mean of 10 and 4.3


def test_side_by_side_the_wall_clock_is_given() -> None:
    assert throughput([10, 30], [1.0, 1.0], wall_s=1.25).tokens_per_s == 32.0
    with pytest.raises(ValueError, match="positive duration"):
        throughput([10], [1.0], wall_s=0.0)


def test_decoding_one_request_at_a_time_is_the_time_after_first_tokens() -> None:
    # 10 and 4 tokens after the first ones, in 2 s and 1 s; half a second each until these came.
    spans = [Span(0.0, 0.5, 2.5, 11), Span(3.0, 3.5, 4.5, 5)]
    assert decode_tokens_per_s(spans) == pytest.approx(14 / 3)
    assert decode_tokens_per_s([Span(0.0, 0.5, 0.5, 1)]) is None
    assert decode_tokens_per_s([]) is None


def test_side_by_side_every_moment_is_shared_and_shares_of_prefill_are_left_out() -> None:
    # Two in flight for 4 s; the second one's share of its first 2 s is not decoding.
    spans = [Span(0.0, 0.0, 4.0, 41), Span(0.0, 2.0, 4.0, 21)]
    assert decode_tokens_per_s(spans) == pytest.approx(60 / 3)
    # Alone for the last 2 s: these are all its own.
    assert decode_tokens_per_s([Span(0.0, 0.0, 4.0, 41), Span(0.0, 0.0, 2.0, 21)]) == pytest.approx(60 / 4)


@given(st.integers(1, 8), st.floats(0.1, 2.0), st.integers(2, 50))
def test_full_lanes_decode_at_so_many_times_the_rate_of_one(lanes: int, decode_s: float, tokens: int) -> None:
    one = Span(0.0, 0.25, 0.25 + decode_s, tokens)
    assert decode_tokens_per_s([one] * lanes) == pytest.approx(lanes * (tokens - 1) / decode_s)


def test_a_first_token_before_its_request_is_refused() -> None:
    with pytest.raises(ValueError, match="before it was sent"):
        decode_tokens_per_s([Span(1.0, 0.5, 2.0, 3)])


def test_latencies_are_those_of_vllm_bench_serve() -> None:
    """The oracle is its arithmetic, written out for these answers: calculate_metrics of vllm/benchmarks/serve.py."""
    pieces, tokens = [[0.1, 0.2, 0.4], [0.3, 0.5], [0.2]], [9, 3, 1]
    result = latencies(pieces, tokens)
    tpot, itl = [0.3 / 8, 0.2 / 2], [0.1, 0.2, 0.2]
    for found, values in ((result.ttft, [0.1, 0.3, 0.2]), (result.tpot, tpot), (result.itl, itl)):
        assert found
        assert found.count == len(values)
        mean, median, p99 = np.mean(values), np.median(values), np.percentile(values, 99)
        assert [found.mean_s, found.median_s, found.p99_s] == pytest.approx([float(mean), float(median), float(p99)])
    alone = latencies([[0.2]], [1])
    assert (alone.tpot, alone.itl) == (None, None)


@pytest.mark.parametrize(("pieces", "tokens"), [([], []), ([[]], [1]), ([[0.1]], [1, 2])])
def test_latencies_need_pieces(pieces: list[list[float]], tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="pieces"):
        latencies(pieces, tokens)


def test_repeats_are_a_median_and_a_range() -> None:
    assert repeated([3.0, 1.0, 2.5]) == Repeated(3, 2.5, 1.0, 3.0)
    assert repeated([2.0]) == Repeated(1, 2.0, 2.0, 2.0)
    assert repeated([]) is None


@pytest.mark.parametrize(("tokens", "seconds"), [([], []), ([1], [0.0]), ([1], [-1.0]), ([1, 2], [1.0])])
def test_impossible_times_are_refused(tokens: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="positive duration"):
        throughput(tokens, seconds)


def test_first_differences() -> None:
    result = identity(
        [[1, 2, 3], [1, 9, 3], [1, 2], [1, 2, 3, 4], []], [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], []]
    )
    assert (result.requests, result.identical) == (5, 2)
    assert result.first_differences == (1, 2, 3)
