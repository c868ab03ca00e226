"""Quality with its intervals: the definitions, what is drawn together, and how often an interval holds the truth."""

import io
import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from judged import Token, reading, recorded
from rich.console import Console

from mxq.quality import Means, Quality, TextQuality, judge
from mxq.report.quality_tables import show_quality
from mxq.stats import Interval, Resampling

FEW = Resampling(resamples=200)


def only(quality: Quality) -> TextQuality:
    (part,) = quality.parts
    return part


def test_numbers_are_what_they_are_defined_as() -> None:
    made = recorded()
    part = only(judge([made]))
    nats, bf16, mxfp4 = (
        np.concatenate([getattr(one, name) for one in made.read]) for name in ("divergence", "bf16_nll", "mxfp4_nll")
    )
    assert (part.read, part.tokens) == (24, len(nats))
    assert part.means.bf16_perplexity.estimate == pytest.approx(math.exp(bf16.mean()))
    assert part.means.mxfp4_perplexity.estimate == pytest.approx(math.exp(mxfp4.mean()))
    assert part.means.ratio.estimate == pytest.approx(math.exp(mxfp4.mean()) / math.exp(bf16.mean()))
    assert part.means.divergence.estimate == pytest.approx(nats.mean())
    assert part.means.agreement.estimate == pytest.approx(1 - part.unlike / len(nats))
    assert dict(part.quantiles)[0.99] == pytest.approx(np.quantile(nats, 0.99))
    assert part.largest == nats.max()
    for name in Means.__dataclass_fields__:
        found: Interval = getattr(part.means, name)
        assert found.lower < found.estimate < found.upper
        assert found.prompts == 24


def test_a_target_beside_itself_differs_by_nothing() -> None:
    def same(rng: random.Random) -> Token:
        nll = rng.expovariate(2)
        return 0.0, nll, nll, False

    quality = judge([recorded(same), recorded(same, name="talk")])
    for means in (*(part.means for part in quality.parts), quality.overall):
        assert means is not None
        assert (means.ratio.lower, means.ratio.estimate, means.ratio.upper) == (1, 1, 1)
        assert (means.divergence.lower, means.divergence.estimate, means.divergence.upper) == (0, 0, 0)
        assert (means.agreement.lower, means.agreement.estimate, means.agreement.upper) == (1, 1, 1)
        assert means.bf16_perplexity.as_json() == means.mxfp4_perplexity.as_json()
        assert means.bf16_perplexity.lower < means.bf16_perplexity.upper


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Prompts differ from each other in how far apart the targets are on them."""

    def study(seed: int) -> Means:
        rng = random.Random(seed)
        read = []
        for number in range(24):
            mine, apart = rng.uniform(0.2, 0.8), rng.uniform(0, 0.04)
            tokens = [
                (rng.expovariate(1 / apart), mine, mine + rng.gauss(apart, 0.05), rng.random() < 2.5 * apart)
                for _ in range(60)
            ]
            read.append(reading(str(number), str(number), tokens))
        return only(judge([replace(recorded(), read=tuple(read))], FEW)).means

    truth = {"ratio": math.exp(0.02), "divergence": 0.02, "agreement": 0.95, "bf16_perplexity": math.exp(0.5)}
    studies = [study(seed) for seed in range(200)]
    for name, value in truth.items():
        held = np.mean([getattr(means, name).holds(value) for means in studies])
        assert 0.9 < held < 0.99, name


def test_both_targets_of_a_prompt_are_drawn_together() -> None:
    made = recorded()
    shifted = [
        replace(
            one,
            bf16_nll=tuple(5 * number + n for n in one.bf16_nll),
            mxfp4_nll=tuple(5 * number + n for n in one.mxfp4_nll),
        )
        for number, one in enumerate(made.read)
    ]
    plain, uneven_prompts = only(judge([made])).means, only(judge([replace(made, read=tuple(shifted))])).means
    assert uneven_prompts.ratio.as_json() == pytest.approx(plain.ratio.as_json())
    assert uneven_prompts.bf16_perplexity.upper > 1000 * plain.bf16_perplexity.upper


def test_what_belongs_together_is_drawn_together() -> None:
    made = recorded()
    turns = tuple(replace(one, cluster=f"talk-{i // 4}") for i, one in enumerate(made.read))
    apart, together = only(judge([made])).means, only(judge([replace(made, read=turns)])).means
    assert together.divergence.estimate == pytest.approx(apart.divergence.estimate)
    assert (together.divergence.prompts, apart.divergence.prompts) == (6, 24)
    # The same answer four times is no more evidence than once.
    copies = tuple(replace(one, id=f"{one.id}/{i}") for one in made.read for i in range(4))
    once, often = apart, only(judge([replace(made, read=copies)])).means
    for name in Means.__dataclass_fields__:
        assert getattr(often, name).as_json() == pytest.approx(getattr(once, name).as_json())


def test_order_of_prompts_does_not_matter() -> None:
    made = recorded()
    one, other = (only(judge([each])).means for each in (made, replace(made, read=made.read[::-1])))
    for name in Means.__dataclass_fields__:
        assert getattr(one, name).as_json() == pytest.approx(getattr(other, name).as_json())


def test_workloads_weigh_alike_and_texts_are_no_part_of_them() -> None:
    def alike(rng: random.Random) -> Token:
        return 0.0, 0.1, 0.1, False

    parts = [recorded(prompts=30), recorded(alike, name="talk", prompts=6)]
    quality = judge([*parts, recorded(name="corpus", window=64)])
    assert [part.name for part in quality.answers] == ["sums", "talk"]
    assert [part.name for part in quality.texts] == ["corpus"]
    first, second = (part.means for part in quality.answers)
    overall = quality.overall
    assert overall is not None
    assert overall.divergence.estimate == pytest.approx(first.divergence.estimate / 2)
    assert overall.ratio.estimate == pytest.approx(math.sqrt(first.ratio.estimate))
    # One workload without any difference does not make all of them agree.
    assert second.agreement.constant
    assert overall.agreement.estimate == pytest.approx((first.agreement.estimate + 1) / 2)
    assert overall.agreement.lower < overall.agreement.estimate < overall.agreement.upper < 1
    assert overall.agreement.prompts == 36
    assert judge([recorded(window=64)]).overall is None


def test_one_prompt_tells_nothing_of_others() -> None:
    quality = judge([recorded(prompts=1), recorded(name="talk")])
    assert not quality.answers[0].means.ratio.bounded
    assert quality.answers[1].means.ratio.bounded
    assert quality.overall is not None
    assert not quality.overall.ratio.bounded
    assert quality.overall.ratio.estimate > 1
    value = json.loads(json.dumps(quality.as_json(), allow_nan=False))
    assert value["parts"][0]["divergence"]["lower"] is None
    assert "no interval" in printed(quality, 80)


def printed(quality: Quality, width: int) -> str:
    stream = io.StringIO()
    show_quality(quality, Console(file=stream, width=width))
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_and_say_of_which_text_they_are(width: int) -> None:
    parts = [recorded(name=name) for name in ("arithmetic", "functions", "a workload with a name of its own")]
    text = printed(judge([*parts, recorded(name="wikitext-2", window=2048)]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text
    said = re.sub(r"\s+", " ", text)
    for words in (
        "Quality on the bf16 target's own greedy answers",
        "Quality on texts that were given",
        "of the text that the bf16 target wrote itself",
        "Perplexity on wikitext-2 is of",
        "in 24 windows of up to 2048 tokens",
        "KL(bf16 || mxfp4)",
        "95% intervals",
        "s for each answer or window",
    ):
        assert words in said
    assert re.search(r"functions +1\.\d{4}", text) or width == 120
    assert re.search(r"all alike +\d", text)


def test_nothing_is_shown_of_nothing() -> None:
    assert printed(judge([]), 80) == ""
