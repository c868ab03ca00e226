"""Verdicts by equivalence, Holm's procedure, and how many prompts would decide."""

import math

import numpy as np
import pytest

from mxq.stats import (
    Band,
    Interval,
    Margins,
    Resampling,
    Verdict,
    holm,
    judge,
    judge_all,
    p_outside,
    prompts_to_decide,
    repeats_change,
)
from mxq.stats.bootstrap import LINEAR, Replicates
from mxq.stats.intervals import band


def over(lower: float, upper: float, estimate: float | None = None, prompts: int = 128) -> Interval:
    return Interval((lower + upper) / 2 if estimate is None else estimate, lower, upper, prompts)


@pytest.mark.parametrize(
    ("lower", "upper", "verdict"),
    [
        (-0.02, 0.02, "preserved"),
        (-0.03, 0.03, "preserved"),
        (-0.02, -0.01, "preserved"),
        (-0.08, -0.04, "degraded"),
        (0.04, 0.08, "improved"),
        (-0.04, 0.0, "undecided"),
        (-0.04, 0.04, "undecided"),
        (0.0, 0.04, "undecided"),
        (-math.inf, math.inf, "undecided"),
    ],
)
def test_verdicts(lower: float, upper: float, verdict: str) -> None:
    assert judge(over(lower, upper, 0.0), 0.03) == verdict


def test_holm_by_hand() -> None:
    """Holm (1979): 0.01 * 4, 0.013 * 3 raised to 0.04, 0.03 * 2, and 0.04 raised to what came before it."""
    assert holm([0.03, 0.01, 0.04, 0.013]) == pytest.approx((0.06, 0.04, 0.06, 0.04))
    assert holm([]) == ()
    assert holm([0.7, 0.9]) == (1.0, 1.0)


def test_a_claim_among_many_needs_more() -> None:
    """Repeats, as their p-values can be had from a table of Student's t."""
    ratios = [0.90, 0.905, 0.895, 0.91]
    down = repeats_change([1.0] * 4, ratios)
    near = repeats_change([1.0] * 4, [0.95, 0.961, 0.939, 0.965])
    flat = repeats_change([1.0] * 4, [1.0, 1.001, 0.999, 1.0])
    alone = judge_all([near], 0.02)[0]
    assert (alone.verdict, alone.adjusted) == (Verdict.DEGRADED, Verdict.DEGRADED)
    judged = judge_all([down, near, *[flat] * 10], 0.02)
    assert [row.verdict for row in judged[:3]] == ["degraded", "degraded", "preserved"]
    assert [row.adjusted for row in judged[:3]] == ["degraded", "undecided", "preserved"]
    assert judged[1].adjusted_p == pytest.approx(11 * judged[1].p)


def test_prompts_that_would_decide() -> None:
    # Half the width: four times the prompts.
    assert prompts_to_decide(over(-0.06, 0.06, 0.0, 100), 0.03) == 400
    assert prompts_to_decide(over(-0.07, -0.03, -0.05, 100), 0.03) == 100
    assert prompts_to_decide(over(-0.07, -0.01, -0.04, 100), 0.03) == 900
    assert prompts_to_decide(over(0.01, 0.07, 0.04, 100), 0.03) == 900
    assert prompts_to_decide(over(-0.06, 0.0, -0.03, 100), 0.03) is None
    assert prompts_to_decide(over(-math.inf, math.inf, 0.0, 1), 0.03) is None


@pytest.mark.parametrize("margin", [0.0, 1.0, -0.1])
def test_a_margin_that_is_none_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match="margin of survival"):
        Margins(survival=margin)


def curve(values: list[float], error: float, prompts: int = 100) -> Band:
    """Return a band around ``values`` from draws that are normal with this error at each position."""
    drawn = np.array(values) + error * np.random.default_rng(1).standard_normal((2000, len(values)))
    errors = np.full(len(values), error)
    made = Replicates(prompts, LINEAR, np.array(values), errors, drawn, np.tile(errors, (2000, 1)))
    return band(made, Resampling(), (-1.0, 1.0))


@pytest.mark.parametrize(
    ("values", "error", "verdict"),
    [
        ([0.0, 0.0, 0.0], 0.001, "preserved"),
        ([0.0, -0.04, 0.0], 0.001, "degraded"),
        ([0.04, -0.04, 0.0], 0.001, "degraded"),
        ([0.0, -0.04, 0.0], 0.02, "undecided"),
        ([0.04, 0.0, 0.0], 0.001, "improved"),
        ([0.08, 0.0, 0.0], 0.015, "undecided"),
    ],
)
def test_one_position_degrades_a_curve(values: list[float], error: float, verdict: str) -> None:
    made = curve(values, error)
    assert judge(made, 0.02) == verdict
    assert (p_outside(made, 0.02) <= 0.05) == (verdict in ("degraded", "improved") or max(values) == 0.08)
    decides = prompts_to_decide(made, 0.02)
    assert decides
    assert (decides > 100) == (verdict == "undecided")


def test_a_band_is_wider_than_its_positions_intervals() -> None:
    """Of eight independent normal positions c is 2.73 (Sidak), of one 1.96."""
    widths = [(made.upper[0] - made.lower[0]) / 2 for made in (curve([0.0] * 8, 0.01), curve([0.0], 0.01))]
    assert widths == pytest.approx([0.0273, 0.0196], rel=0.05)


def test_few_prompts_decide_nothing() -> None:
    assert judge(curve([-0.2], 0.001, prompts=11), 0.02) is Verdict.UNDECIDED
    assert p_outside(curve([-0.2], 0.001, prompts=11), 0.02) == 1.0
    assert judge(curve([-0.2], 0.001, prompts=12), 0.02) is Verdict.DEGRADED
    assert judge(repeats_change([1.0] * 3, [0.9, 0.901, 0.899]), 0.02) is Verdict.DEGRADED


def test_what_does_not_vary_is_certain_only_of_these_prompts() -> None:
    same = repeats_change([1.0] * 3, [1.0] * 3)
    assert same.constant
    assert judge(same, 0.02) is Verdict.PRESERVED
    assert (p_outside(same, 0.02), same.p_above(-0.02), same.p_below(-0.02)) == (1.0, 0.0, 1.0)
