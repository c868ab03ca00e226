"""Intervals over conversations: hand-made cases, other implementations, and what must not change them."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxq.stats import (
    Counts,
    Interval,
    Passes,
    Resampling,
    acceptance,
    acceptance_change,
    acceptance_intervals,
    all_alike,
    count,
    length_difference,
    mean_change,
    over_repeats,
    repeats_change,
    throughput_change,
    throughput_interval,
    timed,
)

K = 7
FEW = Resampling(resamples=400)


def named(requests: Sequence[Passes]) -> list[str]:
    return [f"p{i:03}" for i in range(len(requests))]


def counted(requests: Sequence[Passes], budget: int = K) -> Counts:
    return count(requests, named(requests), budget)


def arms(seed: int, prompts: int, shift: float = 0.0, budget: int = K) -> tuple[list[Passes], list[Passes]]:
    """Prompts that differ much from each other, measured twice; the second time accepts ``shift`` fewer drafts."""
    rng = np.random.default_rng(seed)

    def measured(level: float) -> Passes:
        accepted = [int(a) for a in np.clip(np.round(rng.normal(level, 1.0, 40)), 0, budget)]
        return Passes(accepted, [budget] * 40)

    levels = rng.uniform(0.2, 0.8, prompts) * budget
    return [measured(level) for level in levels], [measured(level - shift) for level in levels]


@st.composite
def requests(draw: st.DrawFn) -> list[Passes]:
    one_pass = st.integers(0, K).flatmap(lambda drafted: st.tuples(st.integers(0, drafted), st.just(drafted)))
    passes = st.lists(st.lists(one_pass, max_size=6), min_size=1, max_size=8)
    return [Passes([a for a, _ in request], [d for _, d in request]) for request in draw(passes)]


@given(requests())
@settings(max_examples=50, deadline=None)
def test_estimates_are_those_without_intervals(sample: list[Passes]) -> None:
    alone, found = acceptance(sample, K), acceptance_intervals(counted(sample), FEW)
    if alone is None:
        assert found is None
        return
    assert found
    assert found.pooled.estimate == pytest.approx(alone.pooled)
    assert found.per_request_mean.estimate == pytest.approx(alone.per_request_mean)
    assert found.per_conversation_mean.estimate == pytest.approx(alone.per_request_mean)
    assert found.survival.estimate == pytest.approx(alone.survival)
    assert alone.conditional
    assert [c and c.estimate for c in found.conditional] == [
        c if c is None else pytest.approx(c) for c in alone.conditional
    ]
    for made in (found.pooled, found.per_request_mean, *filter(None, found.conditional)):
        assert made.lower <= made.estimate + 1e-12
        assert made.upper >= made.estimate - 1e-12


def test_turns_of_a_conversation_are_one_draw() -> None:
    """Two turns that say the same are no more evidence than one, but count twice as much in a mean over requests."""
    sample, _ = arms(1, 20)
    once, twice = counted(sample), count([*sample, *sample], named(sample) * 2, K)
    assert twice.conversations == once.conversations
    first, second = acceptance_intervals(once, FEW), acceptance_intervals(twice, FEW)
    assert first
    assert second
    for name in ("pooled", "per_request_mean", "per_conversation_mean"):
        a, b = getattr(first, name), getattr(second, name)
        assert [a.lower, a.upper, a.prompts] == pytest.approx([b.lower, b.upper, b.prompts])


def test_conversations_and_requests_weigh_differently() -> None:
    counts = count([Passes([3], [3]), Passes([0, 0, 0], [3] * 3), Passes([1], [3])], ["a", "a", "b"], 3)
    found = acceptance_intervals(counts, FEW)
    assert found
    assert found.pooled.estimate == 1 + 4 / 5
    assert found.per_request_mean.estimate == (4 + 1 + 2) / 3
    assert found.per_conversation_mean.estimate == (1 + 3 / 4 + 2) / 2
    assert found.pooled.prompts == 2


def test_a_difference_far_smaller_than_that_between_prompts_is_seen() -> None:
    first, second = arms(1, 32, 0.3)
    found = length_difference(counted(first), counted(second), Resampling(confidence=0.999))
    assert found
    assert found.lower < found.estimate < found.upper < 0
    assert found == length_difference(counted(first), counted(second), Resampling(confidence=0.999))


def test_none_is_seen_where_there_is_none() -> None:
    """Of measurements with no difference between them, a 99.9 % interval may give an alarm in a hundred, not in ten."""
    trials = [[counted(arm) for arm in arms(seed, 24)] for seed in range(50)]
    found = [length_difference(first, second, Resampling(confidence=0.999)) for first, second in trials]
    assert sum(not difference.holds(0.0) for difference in found if difference) <= 2


def test_an_arm_against_itself_has_changed_by_exactly_nothing() -> None:
    sample = counted(arms(1, 20)[0])
    change = acceptance_change(sample, sample, FEW)
    assert change
    for made in (change.pooled, change.difference, change.per_request_mean, change.per_conversation_mean):
        assert (made.estimate, made.lower, made.upper) == (0, 0, 0)
        assert made.constant
    assert set(change.survival.lower + change.survival.upper) == {0.0}


def test_no_passes_no_interval() -> None:
    nothing, something = counted([Passes([], [])] * 3), counted([Passes([1], [3])] * 3)
    assert acceptance_intervals(nothing) is None
    assert acceptance_change(nothing, something) is None
    assert acceptance_change(counted([]), counted([])) is None


def test_one_prompt_has_no_interval() -> None:
    """It is not one of width 0, which would call anything certain."""
    first, second = (counted(arm) for arm in arms(1, 1))
    alone, change = acceptance_intervals(first, FEW), acceptance_change(first, second, FEW)
    assert alone
    assert change
    for made in (alone.pooled, change.pooled, change.difference, alone.survival.at(0)):
        assert not made.bounded
        assert (made.lower, made.upper) == (-math.inf, math.inf)
        assert made.as_json()["lower"] is made.as_json()["upper"] is None
    assert not change.survival.bounded
    # A prompt without a pass is no second one.
    assert not acceptance_intervals(counted([*arms(1, 1)[0], Passes([], [])]), FEW).pooled.bounded  # type: ignore[union-attr]


def test_a_conditional_share_that_one_prompt_alone_tells_of_has_no_interval() -> None:
    found = acceptance_intervals(counted([Passes([0] * 5, [3] * 5)] * 5 + [Passes([3, 1], [3, 3])], 3), FEW)
    assert found
    second = found.conditional[1]
    assert second
    assert (second.estimate, second.prompts, second.bounded) == (0.5, 1, False)


def test_where_nothing_was_at_risk_there_is_nothing() -> None:
    found = acceptance_intervals(counted([Passes([1, 0], [1, 1])] * 4, 3), FEW)
    assert found
    assert [c is None for c in found.conditional] == [False, True, True]
    assert found.survival.estimate == (0.5, 0.0, 0.0)


def test_unequal_arms_are_refused() -> None:
    first, second = arms(1, 5)
    with pytest.raises(ValueError, match="1 prompts are in one arm only, such as p004"):
        acceptance_change(counted(first), counted(second[:4]))
    with pytest.raises(ValueError, match="budgets of 7 and 8"):
        acceptance_change(counted(first), counted(second, 8))
    with pytest.raises(ValueError, match="conversations of 2"):
        count(first, ["a", "b"], K)
    with pytest.raises(ValueError, match="accepted"):
        count([Passes([4], [3])], ["a"], K)


def test_throughput_is_tokens_over_seconds_paired_by_prompt() -> None:
    rng = np.random.default_rng(1)
    tokens, rates = rng.integers(50, 500, 32), rng.uniform(50, 200, 32)
    names = [f"p{i}" for i in range(32)]
    slow = timed(tokens.tolist(), (tokens / rates).tolist(), names)
    fast = timed(tokens.tolist(), (tokens / rates / 1.1).tolist(), names)
    change, alone = throughput_change(slow, fast), throughput_interval(slow)
    assert alone.estimate == pytest.approx(tokens.sum() / (tokens / rates).sum())
    assert alone.lower < alone.estimate < alone.upper
    assert [change.estimate, change.lower, change.upper] == pytest.approx([0.1] * 3)
    with pytest.raises(ValueError, match="positive duration"):
        timed([1, 2], [1.0, 0.0], ["a", "b"])
    with pytest.raises(ValueError, match="at least one"):
        throughput_interval(timed([], [], []))


def test_a_change_of_means_is_that_of_each_item() -> None:
    rng = np.random.default_rng(3)
    base = rng.random(400) < 0.6
    new = np.where(rng.random(400) < 0.05, ~base, base)  # the same items are right but for one in twenty
    change = mean_change(base.tolist(), new.tolist())
    differences = new.astype(float) - base
    half = 1.966 * differences.std(ddof=1) / np.sqrt(400)
    assert change.estimate == pytest.approx(differences.mean(), abs=1e-12)
    assert [change.lower, change.upper] == pytest.approx(differences.mean() + np.array([-half, half]), abs=0.1 * half)
    assert mean_change([1, 0], [1, 0]).constant
    for one, other in (([], []), ([1.0], [1.0, 0.0])):
        with pytest.raises(ValueError, match="one value of each arm for every item"):
            mean_change(one, other)


def test_over_repeats_the_interval_is_students() -> None:
    """By hand: logs of 1.1, 1.2 and 1.3 times, mean and standard error, 4.303 for two degrees of freedom."""
    change = repeats_change([100.0, 100.0, 50.0], [110.0, 120.0, 65.0])
    logs = np.log([1.1, 1.2, 1.3])
    half = 4.302653 * logs.std(ddof=1) / 3**0.5
    expected = np.expm1([logs.mean(), logs.mean() - half, logs.mean() + half])
    assert [change.estimate, change.lower, change.upper] == pytest.approx(list(expected), rel=1e-6)
    assert change.p_above(change.lower) == pytest.approx(0.05)
    absolute = over_repeats([1.0, 2.0, 3.0])
    assert [absolute.lower, absolute.upper] == [0.0, pytest.approx(2 + 4.302653 / 3**0.5)]
    assert not repeats_change([1.0], [1.1]).bounded
    for base, new in (([1.0], [1.0, 2.0]), ([], []), ([0.0], [1.0])):
        with pytest.raises(ValueError, match="repeat"):
            repeats_change(base, new)


def test_workloads_weigh_alike_whatever_their_size() -> None:
    changes = []
    for seed, prompts, shift in ((1, 20, 0.0), (2, 60, 0.5)):
        first, second = arms(seed, prompts, shift)
        change = acceptance_change(counted(first), counted(second))
        assert change
        changes.append(change.pooled)
    together = all_alike(changes)
    assert together.estimate == pytest.approx(math.prod(1 + change.estimate for change in changes) ** 0.5 - 1)
    assert together.prompts == 80
    errors = [change.replicates.errors[0] for change in changes if change.replicates]
    assert together.replicates
    assert together.replicates.errors[0] == pytest.approx((errors[0] ** 2 + errors[1] ** 2) ** 0.5 / 2)
    first, second = arms(3, 1, 0.0)
    single = acceptance_change(counted(first), counted(second))
    assert single
    assert not all_alike([*changes, single.pooled]).bounded  # a prompt tells nothing of others of its workload
    alone = all_alike(changes[:1])
    assert [alone.estimate, alone.prompts] == pytest.approx([changes[0].estimate, 20])
    with pytest.raises(ValueError, match="averaged"):
        all_alike([])
    with pytest.raises(ValueError, match="averaged"):
        all_alike([repeats_change([1.0, 1.0], [1.1, 1.2])])


@pytest.mark.parametrize("bad", [{"resamples": 10}, {"confidence": 1.0}, {"confidence": 0.1}], ids=str)
def test_a_resampling_that_gives_no_interval_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="resamples"):
        Resampling(**bad)  # type: ignore[arg-type]


def test_p_values_and_intervals_agree() -> None:
    first, second = (counted(arm) for arm in arms(3, 40, 0.2))
    change = acceptance_change(first, second)
    assert change
    for made in (change.pooled, change.difference):
        assert made.p_below(made.upper) == pytest.approx(0.05, abs=1e-9)
        assert made.p_above(made.lower) == pytest.approx(0.05, abs=1e-9)
        bounds = np.linspace(made.lower - 0.2, made.upper + 0.2, 60)
        p_values = [made.p_below(float(bound)) for bound in bounds]
        assert p_values == sorted(p_values, reverse=True)
        # Small enough for the family of a whole run, and never 0: more than the draws alone can say.
        assert 0 < p_values[-1] < 1e-4
    survival = change.survival
    assert survival.p_below(min(survival.upper)) == pytest.approx(0.05, abs=1e-9)
    assert survival.p_above(max(survival.lower)) == pytest.approx(0.05, abs=1e-9)
    with pytest.raises(ValueError, match="without draws"):
        Interval(0.0, -1.0, 1.0, 5).p_below(0.0)
