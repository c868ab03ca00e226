"""Acceptance length, survival and conditional acceptance: identities, censoring, impossible counts."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxq.stats import Passes, acceptance, counted_acceptance

K = 7


@st.composite
def requests(draw: st.DrawFn) -> list[Passes]:
    one_pass = st.integers(0, K).flatmap(lambda drafted: st.tuples(st.integers(0, drafted), st.just(drafted)))
    passes = st.lists(st.lists(one_pass, max_size=6), min_size=1, max_size=6)
    return [Passes([a for a, _ in request], [d for _, d in request]) for request in draw(passes)]


@given(requests())
def test_pooled_length_is_one_plus_the_sum_of_survival(sample: list[Passes]) -> None:
    result = acceptance(sample, K)
    accepted = [a for request in sample for a in request.accepted]
    if not accepted:
        assert result is None
        return
    assert result is not None
    # The oracle counts in exact fractions, one position at a time.
    survival = [Fraction(sum(a > i for a in accepted), len(accepted)) for i in range(K)]
    assert np.allclose(result.survival, [float(s) for s in survival], rtol=0, atol=1e-12)
    assert result.pooled == pytest.approx(float(1 + sum(survival)), abs=1e-12)
    assert all(later <= earlier for earlier, later in zip(result.survival, result.survival[1:], strict=False))
    means = [1 + Fraction(sum(r.accepted), len(r.accepted)) for r in sample if r.accepted]
    assert result.per_request_mean == pytest.approx(float(sum(means) / len(means)))
    assert (result.requests, result.passes) == (len(means), len(accepted))


@given(requests())
def test_conditional_acceptance_counts_only_passes_at_risk(sample: list[Passes]) -> None:
    result = acceptance(sample, K)
    if result is None:
        return
    pairs = [pair for request in sample for pair in zip(request.accepted, request.drafted, strict=True)]
    for i in range(K):
        at_risk = [(a, d) for a, d in pairs if a >= i and d > i]
        assert result.at_risk
        assert result.conditional
        assert result.at_risk[i] == len(at_risk)
        expected = Fraction(sum(a > i for a, _ in at_risk), len(at_risk)) if at_risk else None
        assert result.conditional[i] == (None if expected is None else pytest.approx(float(expected)))


@given(requests())
def test_without_censoring_conditional_is_the_ratio_of_survivals(sample: list[Passes]) -> None:
    full = [Passes(request.accepted, [K] * len(request.accepted)) for request in sample]
    result = acceptance(full, K)
    if result is None:
        return
    for i, conditional in enumerate(result.conditional or ()):
        before = result.survival[i - 1] if i else 1.0
        assert conditional == (pytest.approx(result.survival[i] / before) if before else None)


def test_pooled_and_per_request_mean_differ_when_lengths_do() -> None:
    result = acceptance([Passes([3], [3]), Passes([0, 0, 0], [3, 3, 3]), Passes([], [])], 3)
    assert result is not None
    assert result.pooled == 1 + 3 / 4
    assert result.per_request_mean == (4 + 1) / 2
    assert result.per_request_sd == pytest.approx(3 / 2**0.5)
    assert result.requests == 2


def test_a_cut_draft_is_censored_and_not_a_failure() -> None:
    result = acceptance([Passes([2, 1], [3, 1])], 3)
    assert result is not None
    assert result.conditional == (1.0, 1.0, 0.0)
    assert result.source == "passes"
    assert result.at_risk == (2, 1, 1)


def test_nothing_accepted() -> None:
    idle, busy = acceptance([Passes([0, 0], [3, 3])], 3), acceptance([Passes([0, 1], [3, 3])], 3)
    assert idle is not None
    assert busy is not None
    assert idle.pooled == 1.0
    assert idle.nothing_accepted
    assert not busy.nothing_accepted


@pytest.mark.parametrize(
    ("accepted", "drafted"), [([4], [4]), ([3], [2]), ([-1], [3]), ([1, 1], [3]), ([0], [-1])], ids=str
)
def test_impossible_counts_are_refused(accepted: list[int], drafted: list[int]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        acceptance([Passes(accepted, drafted)], 3)


@given(requests())
def test_counters_give_the_same_length_and_survival(sample: list[Passes]) -> None:
    accepted = [a for request in sample for a in request.accepted]
    per_position = [sum(a > i for a in accepted) for i in range(K)]
    counted, known = counted_acceptance(len(sample), len(accepted), sum(accepted), per_position), acceptance(sample, K)
    if known is None:
        assert counted is None
        return
    assert counted
    assert counted.survival == known.survival
    assert counted.pooled == known.pooled
    assert counted.source == "counters"
    assert (counted.per_request_mean, counted.conditional, counted.at_risk) == (None, None, None)


@pytest.mark.parametrize(("passes", "accepted", "per_position"), [(4, 3, [2, 2]), (4, 5, [5, 0]), (4, 3, [1, 2])])
def test_impossible_counters_are_refused(passes: int, accepted: int, per_position: list[int]) -> None:
    with pytest.raises(ValueError, match="by position"):
        counted_acceptance(2, passes, accepted, per_position)
