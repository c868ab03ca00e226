"""The bootstrap itself: against all possible draws, against scipy's, and what must leave it as it is."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from mxq.stats import (
    Counts,
    Passes,
    Resampling,
    acceptance,
    acceptance_change,
    acceptance_intervals,
    count,
    throughput_change,
    throughput_interval,
    timed,
)
from mxq.stats.bootstrap import LINEAR, RELATIVE, SHARE, Array, Scale, replicates
from mxq.stats.intervals import interval

K = 7
FEW = Resampling(resamples=400)
TOPS, BOTTOMS = np.array([[5.0, 2.0, 9.0], [4.0, 3.0, 6.0]]), np.array([[2.0, 1.0, 3.0], [2.0, 2.0, 4.0]])


def by_hand(tops: Array, bottoms: Array, scale: Scale) -> tuple[float, float]:
    """Return estimate and linearised error of one draw, conversation by conversation."""
    n, terms, value = tops.shape[1], np.zeros(tops.shape[1]), 0.0
    for sign, top, bottom in zip((-1, 1)[-len(tops) :], tops, bottoms, strict=True):
        r = top.sum() / bottom.sum()
        value += sign * float(scale.of(r))
        terms += sign * scale.slope(r) * (top - r * bottom) / bottom.sum()
    return value, float(np.sqrt(n / (n - 1) * (terms**2).sum()))


@pytest.mark.parametrize("arms", [1, 2])
@pytest.mark.parametrize("scale", [LINEAR, RELATIVE, SHARE], ids=["linear", "relative", "share"])
def test_three_prompts_and_all_of_their_27_draws(scale: Scale, arms: int) -> None:
    """The quantile of |t| over the 27 draws that there are, each as likely, is that of many random ones."""
    tops, bottoms = TOPS[:arms], BOTTOMS[:arms] * (10 if scale is SHARE else 1)
    estimate, error = by_hand(tops, bottoms, scale)
    drawn = replicates(tops[..., None], bottoms[..., None], Resampling(resamples=20_000), scale)
    assert (drawn.estimates[0], drawn.errors[0]) == (pytest.approx(estimate), pytest.approx(error))
    exact = []
    for draw in itertools.product(range(3), repeat=3):
        value, own = by_hand(tops[:, draw], bottoms[:, draw], scale)
        exact.append(abs(value - estimate) / max(own, error / 4))
    found = drawn.deviations()
    for value in set(np.round(exact, 9)):
        share = np.mean(np.array(exact) <= value + 1e-6)
        assert np.mean(found <= value + 1e-6) == pytest.approx(share, abs=0.015)


def sums(seed: int, prompts: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    bottoms = rng.integers(10, 100, (2, prompts)).astype(np.float64)
    return bottoms * rng.gamma(9, 0.5, prompts) * rng.normal(1, 0.05, (2, prompts)), bottoms


@pytest.mark.parametrize("scale", [LINEAR, RELATIVE], ids=["linear", "relative"])
def test_draws_are_those_of_scipy(scale: Scale) -> None:
    """scipy.stats.bootstrap of the same statistic has the same spread and percentiles, and so has the error."""
    tops, bottoms = sums(1, 60)

    def statistic(a: Array, b: Array, c: Array, d: Array, axis: int) -> Array:
        base, new = a.sum(axis) / b.sum(axis), c.sum(axis) / d.sum(axis)
        return scale.of(new) - scale.of(base)

    data = (tops[0], bottoms[0], tops[1], bottoms[1])
    oracle = scipy.stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=8000,
        method="percentile",
        rng=np.random.default_rng(5),
    )
    drawn = replicates(tops[..., None], bottoms[..., None], Resampling(resamples=8000), scale)
    spread = float(oracle.standard_error)
    assert drawn.drawn_estimates[:, 0].std(ddof=1) == pytest.approx(spread, rel=0.04)
    assert drawn.errors[0] == pytest.approx(spread, rel=0.06)
    ends = oracle.confidence_interval
    assert np.quantile(drawn.drawn_estimates[:, 0], [0.025, 0.975]) == pytest.approx(
        [ends.low, ends.high], abs=spread / 8
    )


def test_an_interval_of_a_plain_mean_is_close_to_students() -> None:
    """Of as many values that are normal, where Student's interval is exact."""
    values = np.random.default_rng(2).normal(10, 1, 40)
    found = interval(replicates(values[None, :, None], np.ones((1, 40, 1)), Resampling()), Resampling())
    exact = scipy.stats.t.interval(0.95, 39, values.mean(), scipy.stats.sem(values))
    assert [found.lower, found.upper] == pytest.approx(list(exact), abs=0.04)


@st.composite
def arms(draw: st.DrawFn) -> tuple[list[Passes], list[Passes]]:
    prompts = draw(st.integers(2, 8))

    def passes() -> Passes:
        accepted = draw(st.lists(st.integers(0, K), min_size=1, max_size=5))
        return Passes(accepted, [draw(st.integers(a, K)) for a in accepted])

    return [passes() for _ in range(prompts)], [passes() for _ in range(prompts)]


def counted(requests: Sequence[Passes], names: Sequence[str] | None = None) -> Counts:
    return count(requests, names or [f"p{i}" for i in range(len(requests))], K)


@given(arms(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_prompts_changes_nothing(pair: tuple[list[Passes], list[Passes]], order: random.Random) -> None:
    places = list(range(len(pair[0])))
    order.shuffle(places)
    names = [f"p{i}" for i in places]
    straight = counted(pair[0]), counted(pair[1])
    mixed = counted([pair[0][i] for i in places], names), counted([pair[1][i] for i in places], names)
    assert acceptance_intervals(straight[0], FEW) == acceptance_intervals(mixed[0], FEW)
    assert acceptance_change(*straight, FEW) == acceptance_change(*mixed, FEW)


@given(arms())
@settings(max_examples=40, deadline=None)
def test_the_other_way_round_is_the_reciprocal(pair: tuple[list[Passes], list[Passes]]) -> None:
    base, new = (counted(arm) for arm in pair)
    there, back = acceptance_change(base, new, FEW), acceptance_change(new, base, FEW)
    assert there
    assert back
    assert 1 + back.pooled.estimate == pytest.approx(1 / (1 + there.pooled.estimate))
    assert back.difference.lower == pytest.approx(-there.difference.upper)
    assert back.survival.upper == pytest.approx(tuple(-value for value in there.survival.lower))
    for made in (there.pooled, there.difference, there.per_request_mean):
        assert made.lower <= made.estimate + 1e-12
        assert made.upper >= made.estimate - 1e-12


@given(arms())
@settings(max_examples=20, deadline=None)
def test_an_arm_against_itself_has_not_changed(pair: tuple[list[Passes], list[Passes]]) -> None:
    made = acceptance_change(counted(pair[0]), counted(pair[0]), FEW)
    assert made
    assert made.pooled.estimate == made.difference.estimate == 0
    assert made.pooled.holds(0)
    assert made.difference.holds(0)
    assert made.survival.holds((0.0,) * K)


@given(st.integers(0, 100), st.floats(0.01, 100))
@settings(max_examples=20, deadline=None)
def test_a_slower_clock_scales_rates_and_not_changes(seed: int, factor: float) -> None:
    tops, bottoms = sums(seed, 20)
    names = [f"p{i}" for i in range(20)]
    tokens = [np.rint(10 * arm).astype(int).tolist() for arm in tops]
    made = [[timed(t, (by * s).tolist(), names) for t, s in zip(tokens, bottoms, strict=True)] for by in (1.0, factor)]
    rates, slower = (throughput_interval(base, FEW) for base, _ in made)
    for name in ("estimate", "lower", "upper"):
        assert getattr(slower, name) == pytest.approx(getattr(rates, name) / factor)
    changes = [throughput_change(base, new, FEW) for base, new in made]
    assert changes[1].lower == pytest.approx(changes[0].lower)
    assert changes[1].upper == pytest.approx(changes[0].upper)


@given(arms(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_failure_that_is_censored_never_lowers_conditional_acceptance(
    pair: tuple[list[Passes], list[Passes]], data: st.DataObject
) -> None:
    sample = pair[0]
    request = data.draw(st.integers(0, len(sample) - 1))
    at = data.draw(st.integers(0, len(sample[request].accepted) - 1))
    drafted = list(sample[request].drafted)
    drafted[at] = sample[request].accepted[at]
    censored = [Passes(r.accepted, drafted if i == request else r.drafted) for i, r in enumerate(sample)]
    before, after = acceptance_intervals(counted(sample), FEW), acceptance_intervals(counted(censored), FEW)
    assert before
    assert after
    for old, new in zip(before.conditional, after.conditional, strict=True):
        assert old is None or new is None or new.estimate >= old.estimate - 1e-12
    assert before.survival == after.survival
    known = acceptance(censored, K)
    assert known
    assert known.conditional == tuple(c and pytest.approx(c.estimate) for c in after.conditional)


def test_what_one_prompt_in_many_has_is_not_known_well() -> None:
    """Only one of 40 ever accepts two drafts: draws without it have an error of 0, and no say."""
    sample = [Passes([1] * 9 + [i % 2], [3] * 10) for i in range(39)] + [Passes([2, 1, 1, 0], [3] * 4)]
    found = acceptance_intervals(count(sample, [f"p{i:02}" for i in range(40)], 3), Resampling())
    assert found
    rare = found.survival.at(1)
    assert 0 < rare.lower < rare.estimate / 3
    assert 3 * rare.estimate < rare.upper < 0.1
    # Nothing at all is a width of 0: these prompts agree, and it is said.
    assert found.survival.at(2).constant
    assert (found.survival.lower[2], found.survival.upper[2]) == (0.0, 0.0)
    everything = acceptance_intervals(count([Passes([3] * 4, [3] * 4)] * 20, [f"p{i}" for i in range(20)], 3), FEW)
    assert everything
    assert (everything.survival.lower, everything.survival.upper) == ((1.0,) * 3, (1.0,) * 3)
    assert (everything.pooled.lower, everything.pooled.upper) == (4.0, 4.0)
