"""Tokens per second, and token-by-token equality."""

import pytest

from mxq.stats import identity, throughput


def test_tokens_per_second_pools_tokens_and_time() -> None:
    result = throughput([10, 30], [1.0, 1.0])
    assert (result.output_tokens, result.wall_s, result.tokens_per_s) == (40, 2.0, 20.0)
    assert (result.lower_quartile, result.upper_quartile) == (15.0, 25.0)
    assert throughput([10, 30], [1.0, 7.0]).tokens_per_s == 5.0  # not the mean of 10 and 4.3


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
