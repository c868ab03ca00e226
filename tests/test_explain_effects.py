"""Effects and their intervals from counts that are known, and the tables that show them."""

import io
import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from explained import Counts, explanation, losing
from rich.console import Console

from mxq.explain import Explanation, Why, why
from mxq.report.explain_tables import show_why


def only(counts: Counts, **options: int) -> Why:
    return why([explanation(counts, **options)])  # type: ignore[arg-type]


def test_effects_are_differences_of_corners_and_add_up() -> None:
    (part,) = only(losing(2, 1)).parts
    bb, bm, mb, mm = (length.estimate for length in part.lengths)
    effects = part.effects
    assert effects.features.estimate == pytest.approx(((mb - bb) + (mm - bm)) / 2)
    assert effects.logits.estimate == pytest.approx(((bm - bb) + (mm - mb)) / 2)
    assert effects.interaction.estimate == pytest.approx((mm - mb) - (bm - bb))
    assert effects.total.estimate == pytest.approx(mm - bb)
    assert effects.features.estimate + effects.logits.estimate == pytest.approx(effects.total.estimate)
    assert sum(part.features.estimate) == pytest.approx(effects.features.estimate)
    assert sum(part.logits.estimate) == pytest.approx(effects.logits.estimate)
    for length, survival in zip(part.lengths, part.survival, strict=True):
        assert length.estimate == pytest.approx(1 + sum(survival))
    assert -1.2 < effects.features.estimate < -0.8
    assert -0.7 < effects.logits.estimate < -0.3
    assert effects.features.lower < effects.features.estimate < effects.features.upper
    assert (part.prompts, part.conversations, part.places, part.tokens) == (24, 24, 240, 960)


@pytest.mark.parametrize(
    ("counts", "route"),
    [
        (losing(2, 0), "features"),
        (losing(0, 2), "logits"),
        (losing(2, 2), "both"),
        (losing(0, 0), "none shown"),
        (lambda rng, number: (2, 2, 3, 3), "higher"),
        (lambda rng, number: (4, 4 - number % 2, 3 + number % 2, 3), "both"),
        # One draft less everywhere, which either route costs by turns.
        (lambda rng, number: (5, 5 * (number % 2), 5 - 5 * (number % 2), 4), "not told apart"),
    ],
)
def test_the_route_is_what_excludes_0(counts: Counts, route: str) -> None:
    found = only(counts, prompts=12)
    assert found.parts[0].effects.route == route
    assert found.overall["dflash-7"].route == route


def test_equal_corners_have_no_effect_at_all() -> None:
    def counts(rng: random.Random, number: int) -> tuple[int, int, int, int]:
        own = rng.randint(0, 7)
        return own, own, own, own

    (part,) = only(counts).parts
    for effect in (part.effects.features, part.effects.logits, part.effects.interaction, part.effects.total):
        assert (effect.lower, effect.estimate, effect.upper) == (0, 0, 0)
    assert set(part.features.lower + part.features.upper + part.logits.lower + part.logits.upper) == {0}
    assert part.effects.route == "none shown"


def test_corners_are_drawn_together() -> None:
    """Prompts differ by far more than corners: unpaired intervals would be ten times as wide."""

    def counts(rng: random.Random, number: int) -> tuple[int, int, int, int]:
        own = 1 if number % 2 else 6
        lost = rng.random() < 0.3
        return own, own, own - lost, own - lost

    (part,) = only(counts).parts
    effect, length = part.effects.total, part.lengths[0]
    assert effect.upper < 0
    assert 10 * (effect.upper - effect.lower) < length.upper - length.lower
    # Were the corners not the same prompts', nothing would be shown.
    one = explanation(counts)
    shifted = [
        replace(prompt, corners=(prompt.corners[0], prompt.corners[1], *other.corners[2:]))
        for prompt, other in zip(one.prompts, one.prompts[1:] + one.prompts[:1], strict=True)
    ]
    (unpaired,) = why([replace(one, prompts=tuple(shifted))]).parts
    assert unpaired.effects.route == "none shown"


def test_turns_of_a_conversation_are_one() -> None:
    made = explanation(losing(2, 1))
    turns = tuple(replace(prompt, conversation=f"talk-{i // 4}") for i, prompt in enumerate(made.prompts))
    (apart,), (together,) = why([made]).parts, why([replace(made, prompts=turns)]).parts
    assert (together.prompts, together.conversations) == (24, 6)
    assert together.effects.total.estimate == pytest.approx(apart.effects.total.estimate)
    assert together.divergence.mean.prompts == together.effects.total.prompts == 6


def test_order_of_prompts_does_not_matter() -> None:
    made = explanation(losing(2, 1))
    turned = replace(made, prompts=made.prompts[::-1])
    (one,), (other,) = why([made]).parts, why([turned]).parts
    for a, b in ((one.effects.features, other.effects.features), (one.effects.total, other.effects.total)):
        assert (a.lower, a.estimate, a.upper) == pytest.approx((b.lower, b.estimate, b.upper))
    assert one.divergence.mean.upper == pytest.approx(other.divergence.mean.upper)


def test_few_prompts_tell_little_of_others() -> None:
    few = only(losing(2, 1), prompts=11).parts[0].effects
    assert few.total.upper < 0
    assert few.route == "few prompts"


def test_one_prompt_tells_nothing_of_others() -> None:
    found = only(losing(2, 1), prompts=1)
    assert found.parts[0].effects.route == "few prompts"
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["parts"][0]["effects"]["total"]["lower"] is None
    assert "no interval" in printed(found, 80)


def test_workloads_weigh_alike() -> None:
    parts = [
        explanation(losing(2, 0), workload="sums", prompts=30),
        explanation(losing(0, 0), workload="talk", prompts=6),
    ]
    found = why(parts)
    first, second = (part.effects.total.estimate for part in found.parts)
    overall = found.overall["dflash-7"].total
    assert overall.estimate == pytest.approx((first + second) / 2)
    assert overall.upper < 0


def test_verifier_and_drift() -> None:
    made = explanation(losing(1, 1))
    (part,) = why([made]).parts
    tokens = np.concatenate([prompt.divergence for prompt in made.prompts])
    assert part.divergence.mean.estimate == pytest.approx(tokens.mean())
    assert dict(part.divergence.quantiles)[0.9] == pytest.approx(np.quantile(tokens, 0.9))
    assert part.divergence.largest == tokens.max()
    assert part.flips.count == 48
    assert part.flips.share.estimate == pytest.approx(48 / 960)
    assert (part.flips.bf16_gap, part.flips.bf16_gap_largest, part.flips.mxfp4_gap) == (0.5, 0.75, 0.3125)
    elsewhere = [m for prompt in made.prompts for token, m in enumerate(prompt.margin) if token not in (3, 9)]
    assert part.flips.elsewhere == pytest.approx(np.median(elsewhere))
    read = part.drift[0]
    assert (read.name, read.answers.tokens) == ("layer 1", 960)
    assert read.answers.error == pytest.approx((16 * 0.2 + 24 * 0.3) / 40)
    prompt, first, later = read.ranges[:3]
    assert prompt is not None
    assert first is not None
    assert later is not None
    assert (prompt.cosine, first.cosine, later.cosine) == pytest.approx((0.99, 0.98, 0.96))
    assert read.ranges[3] is None


def printed(found: Why, width: int) -> str:
    stream = io.StringIO()
    show_why(found, Console(file=stream, width=width))
    return stream.getvalue()


def several() -> list[Explanation]:
    return [
        explanation(losing(f, v), workload=workload, method=method, k=15)
        for method, f, v in (("dflash", 3, 1), ("mtp", 0, 1))
        for workload in ("arithmetic", "functions", "a workload with a name of its own")
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_say_it(width: int) -> None:
    text = printed(why(several()), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text
    assert re.search(r"functions +dflash-15 .* both", text)
    assert re.search(r"all alike +mtp-15 .* logits", text)
    assert ("interaction" in text) == (width == 120)
    assert ("mxfp4 x bf16" in text) == (width == 120)
    assert re.search(r"logits +-\.\d\d\* ", text)  # a change of survival whose band excludes 0
    for words in ("KL, nats", "layer 3", "final norm", "95% intervals", "1-16"):
        assert words in text


def test_nothing_is_shown_of_nothing() -> None:
    assert printed(why([]), 80) == ""
    answers_of_one_token = explanation(losing(1, 1), places=0)
    assert why([answers_of_one_token]).parts == ()
