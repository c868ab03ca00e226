"""Intervals hold the truth and verdicts are right, on made-up studies: a small part of benchmarks/STATISTICS.md.

Bounds are what so many studies give by chance about once in a thousand; seeds are fixed. That the checks can fail is
shown by intervals that are wrong: of passes drawn one by one, of arms that are not paired.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
from check_statistics import QUANTITIES, Study, Truth, family_errors, passes_alone, studies, unpaired
from synthetic_acceptance import SETTINGS, arms, part, pooled, with_losses

from mxq.stats import (
    Counts,
    Margins,
    Timed,
    Verdict,
    acceptance_change,
    acceptance_intervals,
    all_alike,
    judge,
    judge_all,
    p_outside,
    throughput_change,
)

CODE, CHAT, MATHS = SETTINGS
STUDIES, PROMPTS = 200, 64


@pytest.fixture(scope="module")
def code() -> tuple[Truth, list[Study]]:
    """Return studies without a loss."""
    truth, made = studies(CODE, PROMPTS, STUDIES)
    return truth, list(made)


def covers(hits: Sequence[bool]) -> bool:
    """Whether that is compatible with a coverage of 93.5 % or more, and below 100 %."""
    return bool(scipy.stats.binom.cdf(sum(hits), len(hits), 0.935) > 0.001 and sum(hits) < len(hits))


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_intervals_hold_the_truth(code: tuple[Truth, list[Study]], quantity: str) -> None:
    truth, made = code
    assert covers([QUANTITIES[quantity](study, truth) for study in made])


def test_passes_drawn_one_by_one_are_caught(code: tuple[Truth, list[Study]]) -> None:
    """They are far from independent: such intervals hold the truth half of the time."""
    truth, made = code
    ends = [passes_alone(study.base) for study in made]
    hits = [lower <= truth.pooled <= upper for lower, upper in ends]
    assert not covers(hits)
    assert np.mean(hits) < 0.7


def test_arms_that_are_not_paired_are_caught(code: tuple[Truth, list[Study]]) -> None:
    """They cover, by intervals twice as wide: every difference would be undecided."""
    truth, made = code
    widths, hits = [], []
    for study in made:
        other = acceptance_intervals(study.new)
        assert other
        lower, upper = unpaired(study.alone, other)
        hits.append(lower <= truth.difference <= upper)
        widths.append((upper - lower) / (study.change.difference.upper - study.change.difference.lower))
    assert not covers(hits)
    assert np.median(widths) > 2


def test_throughput_over_prompts_holds_the_truth(code: tuple[Truth, list[Study]]) -> None:
    """Seconds are a prefill, and passes that take 30 ms, and 10 % longer in the second arm."""
    rng = np.random.default_rng(3)

    def clocked(counts: Counts, pass_s: float) -> Timed:
        prefill = rng.gamma(4, 0.05, len(counts.passes))
        return Timed(counts.conversations, counts.accepted + counts.passes, prefill + pass_s * counts.passes)

    made = [(clocked(study.base, 0.03), clocked(study.new, 0.033)) for study in code[1]]
    rates = [
        sum(arm.tokens.sum() for arm in side) / sum(arm.seconds.sum() for arm in side)
        for side in zip(*made, strict=True)
    ]
    hits = [throughput_change(base, new).holds(rates[1] / rates[0] - 1) for base, new in made]
    assert rates[1] / rates[0] < 0.95
    assert covers(hits)


def test_workloads_together_hold_the_truth() -> None:
    """Of workloads with as many prompts, which have the same draws but for their order."""
    pools = [arms(setting, 40 * STUDIES, 2) for setting in SETTINGS]
    truth = np.exp(np.mean([np.log(pooled(new) / pooled(base)) for base, new in pools])) - 1
    hits, alone, ratios = [], [], []
    for number in range(STUDIES):
        parts = [[part(arm, 40 * number, 40) for arm in pool] for pool in pools]
        changes = [made.pooled for base, new in parts if (made := acceptance_change(base, new))]
        together = all_alike(changes)
        hits.append(together.holds(float(truth)))
        alone.append(together.estimate)
        ratios.append(together.upper - together.lower)
    assert covers(hits)
    # The width is that of independent workloads: about four standard deviations of what is estimated.
    assert np.median(ratios) == pytest.approx(4 * np.std(alone), rel=0.15)


def test_without_a_loss_nothing_is_called_degraded(code: tuple[Truth, list[Study]]) -> None:
    _, made = code
    margins = Margins()
    lengths = [judge(study.change.pooled, margins.acceptance) for study in made]
    curves = [judge(study.change.survival, margins.survival) for study in made]
    claims = (Verdict.DEGRADED, Verdict.IMPROVED)
    assert not [verdict for verdict in (*lengths, *curves) if verdict in claims]


def test_a_family_errs_as_seldom_as_a_row(code: tuple[Truth, list[Study]]) -> None:
    """The claim "changed at all" of 60 rows without a change; row by row it is nearly always made somewhere."""
    p_values = [p_outside(study.change.pooled, 0.0) for study in code[1]]
    alone, together = family_errors(p_values, np.random.default_rng(1), 200)
    assert alone.hits / alone.count > 0.7
    assert together.hits / together.count < 0.15


def test_a_loss_at_the_margin_is_seldom_called_degraded() -> None:
    (losing,) = with_losses(MATHS, [0.03], prompts=40_000)
    truth, made = studies(losing, PROMPTS, STUDIES)
    assert truth.change == pytest.approx(-0.03, abs=0.004)
    called = sum(judge(study.change.pooled, -truth.change) is Verdict.DEGRADED for study in made)
    assert scipy.stats.binom.sf(called - 1, STUDIES, 0.03) > 0.001


def test_a_large_loss_is_found_and_none_is_preserved() -> None:
    none, large = with_losses(MATHS, [0.0, 0.08], prompts=40_000)
    found = {}
    for name, setting in (("none", none), ("large", large)):
        _, made = studies(setting, 256, 40)
        changes = [study.change for study in made]
        found[name] = (
            [row.adjusted for row in judge_all([change.pooled for change in changes], 0.03)],
            [row.adjusted for row in judge_all([change.survival for change in changes], 0.02)],
        )
    for verdicts in found["large"]:
        assert verdicts.count(Verdict.DEGRADED) >= 38
    assert found["none"][0].count(Verdict.PRESERVED) >= 38
    assert Verdict.DEGRADED not in found["none"][1]
