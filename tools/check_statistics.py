#!/usr/bin/env python3
"""Show by simulation that intervals and verdicts keep what they promise, into benchmarks/STATISTICS.md.

    python tools/check_statistics.py

Thousands of studies are made up (tools/synthetic_acceptance.py), of which the truth is known: the mean over all of
their prompts. Each goes through mxq.stats as a recorded run does. It takes about half an hour on one core.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bench_statistics
import numpy as np
from scipy import special
from synthetic_acceptance import SETTINGS, Setting, arms, part, pooled, with_losses

from mxq import files
from mxq.progress import progress
from mxq.stats import (
    AcceptanceChange,
    AcceptanceIntervals,
    Counts,
    Margins,
    Resampling,
    Verdict,
    acceptance_change,
    acceptance_intervals,
    holm,
    judge,
    length_difference,
    p_outside,
)
from mxq.stats.bootstrap import Array, Replicates

PROMPTS = (12, 32, 64, 128)
POWER_PROMPTS = (32, 64, 128, 256, 512, 1024)
LOSSES = (0.0, 0.01, 0.03, 0.05, 0.08)
FAMILY = 60
SEED = 1
Ends = tuple[float, float]


@dataclass(frozen=True)
class Truth:
    """What many studies of a setting estimate: their means over all prompts together."""

    pooled: float
    per_request_mean: float
    survival: tuple[float, ...]
    conditional: tuple[float, ...]
    difference: float
    change: float
    change_per_request: float
    change_survival: tuple[float, ...]

    @classmethod
    def of(cls, base: Counts, new: Counts) -> "Truth":
        """Return it by plain sums, nothing of which is the package's."""
        survival, other = (counts.survived.sum(axis=0) / counts.passes.sum() for counts in (base, new))
        means = [float(counts.lengths.mean()) for counts in (base, new)]
        return cls(
            pooled=pooled(base),
            per_request_mean=means[0],
            survival=tuple(survival.tolist()),
            conditional=tuple((base.survived.sum(axis=0) / base.at_risk.sum(axis=0)).tolist()),
            difference=pooled(new) - pooled(base),
            change=pooled(new) / pooled(base) - 1,
            change_per_request=means[1] / means[0] - 1,
            change_survival=tuple((other - survival).tolist()),
        )


@dataclass(frozen=True)
class Study:
    """Two arms of one study, and what the package says of them."""

    base: Counts
    new: Counts
    alone: AcceptanceIntervals
    change: AcceptanceChange


def studies(setting: Setting, prompts: int, count: int, *, seed: int = SEED) -> tuple[Truth, Iterator[Study]]:
    """Return the truth and ``count`` independent studies of ``prompts`` prompts each."""
    base, new = arms(setting, prompts * count, seed)

    def each() -> Iterator[Study]:
        for number in range(count):
            one, other = (part(counts, number * prompts, prompts) for counts in (base, new))
            alone, change = acceptance_intervals(one), acceptance_change(one, other)
            assert alone
            assert change
            yield Study(one, other, alone, change)

    return Truth.of(base, new), each()


QUANTITIES: dict[str, Callable[[Study, Truth], bool]] = {
    "acceptance length, pooled": lambda s, t: s.alone.pooled.holds(t.pooled),
    "acceptance length, per-request mean": lambda s, t: s.alone.per_request_mean.holds(t.per_request_mean),
    "survival, whole band": lambda s, t: s.alone.survival.holds(t.survival),
    "conditional acceptance, middle position": lambda s, t: _middle(s, t),
    "change of pooled length, relative": lambda s, t: s.change.pooled.holds(t.change),
    "change of pooled length, difference": lambda s, t: s.change.difference.holds(t.difference),
    "change of per-request mean, relative": lambda s, t: s.change.per_request_mean.holds(t.change_per_request),
    "change of survival, whole band": lambda s, t: s.change.survival.holds(t.change_survival),
}


def _middle(study: Study, truth: Truth) -> bool:
    position = len(truth.conditional) // 2
    made = study.alone.conditional[position]
    return made is None or made.holds(truth.conditional[position])


def other_intervals(tops: Array, bottoms: Array, drawn: Replicates) -> dict[str, Ends]:
    """Return 95 % intervals of one quantity by other methods, from the same draws, on the scale that is shown.

    ``tops`` and ``bottoms``: [arms, prompts], the sums that ``drawn`` has the ratios of.
    """
    e, s = float(drawn.estimates[0]), float(drawn.errors[0])
    values = drawn.drawn_estimates[:, 0]
    pivots = (values - e) / drawn.drawn_errors[:, 0]
    low, high = np.quantile(pivots, [0.025, 0.975])
    # BCa (Efron 1987): the acceleration is the skewness of the influence of single prompts.
    ratio = tops.sum(axis=1, keepdims=True) / bottoms.sum(axis=1, keepdims=True)
    influence = drawn.scale.slope(ratio) * (tops - ratio * bottoms) / bottoms.sum(axis=1, keepdims=True)
    single = influence[-1] - (influence[0] if len(influence) > 1 else 0)
    acceleration = float((single**3).sum() / (6 * (single**2).sum() ** 1.5))
    bias = special.ndtri(np.clip(np.mean(values < e), 1e-4, 1 - 1e-4))
    z = bias + special.ndtri(np.array([0.025, 0.975]))
    levels = special.ndtr(bias + z / (1 - acceleration * z))
    ends = {
        "normal, linearised error": (e - 1.96 * s, e + 1.96 * s),
        "percentile": tuple(np.quantile(values, [0.025, 0.975])),
        "BCa": tuple(np.quantile(values, levels)),
        "bootstrap-t, equal tails": (e - high * s, e - low * s),
    }
    return {name: (_shown(drawn, a), _shown(drawn, b)) for name, (a, b) in ends.items()}


def _shown(drawn: Replicates, value: float) -> float:
    return float(drawn.scale.shown(np.float64(value)))  # type: ignore[arg-type]


def passes_alone(counts: Counts) -> Ends:
    """Return an interval of the pooled length as if each pass were drawn alone: that ignores whose passes they are."""
    n, K = counts.passes.sum(), counts.num_speculative_tokens
    mean = counts.accepted.sum() / n
    square = (counts.survived.sum(axis=0) * (2 * np.arange(K) + 1)).sum() / n
    half = 1.96 * ((square - mean**2) / n) ** 0.5
    return float(1 + mean - half), float(1 + mean + half)


def unpaired(base: AcceptanceIntervals, new: AcceptanceIntervals) -> Ends:
    """Return an interval of the difference of pooled lengths as if the arms had been given different prompts."""
    assert base.pooled.replicates
    assert new.pooled.replicates
    errors = [float(arm.replicates.errors[0]) for arm in (base.pooled, new.pooled) if arm.replicates]
    half = 1.96 * float(np.hypot(errors[0], errors[1]))
    middle = new.pooled.estimate - base.pooled.estimate
    return middle - half, middle + half


class Share:
    """How often something happened."""

    def __init__(self, digits: int = 1) -> None:
        self.hits, self.count, self.digits = 0, 0, digits

    def add(self, hit: bool) -> None:
        """Count one more."""
        self.hits, self.count = self.hits + bool(hit), self.count + 1

    def __str__(self) -> str:
        return f"{100 * self.hits / self.count:.{self.digits}f}" if self.count else "-"


def family_errors(p_values: Sequence[float], rng: np.random.Generator, families: int) -> tuple[Share, Share]:
    """Return how often a family of rows drawn from these has a claim at 5 %, row by row and by Holm."""
    alone, together = Share(), Share()
    for _ in range(families):
        rows = rng.choice(np.asarray(p_values), FAMILY, replace=False).tolist()
        alone.add(min(rows) <= 0.05)
        together.add(min(holm(rows)) <= 0.05)
    return alone, together


class Simulation:
    """All of the page's tables."""

    def __init__(self, count: int, power_count: int, advance: Callable[[int], None]) -> None:
        self.count, self.power_count, self.advance = count, power_count, advance
        self.covered = {(name, s.name, n): Share() for name in QUANTITIES for s in SETTINGS for n in PROMPTS}
        self.others: dict[tuple[str, str, int], Share] = {}
        self.widths: dict[tuple[str, str, int], list[float]] = {}
        self.equal: list[AcceptanceChange] = []
        self.spread: dict[str, tuple[Truth, float]] = {}

    def coverage(self) -> list[str]:
        """Return how often intervals hold the truth, by setting and number of prompts, and by method."""
        for setting in SETTINGS:
            for prompts in PROMPTS:
                truth, made = studies(setting, prompts, self.count)
                for study in made:
                    for name, holds in QUANTITIES.items():
                        self.covered[name, setting.name, prompts].add(holds(study, truth))
                    if prompts in (32, 128):
                        self._methods(study, truth, prompts)
                    if prompts == 128:
                        self.equal.append(study.change)
                    self.advance(1)
        head = [f"{s.name.partition(',')[0]}, {n}" for s in SETTINGS for n in PROMPTS]
        rows = [[name, *(str(self.covered[name, s.name, n]) for s in SETTINGS for n in PROMPTS)] for name in QUANTITIES]
        return _table(["% of studies whose interval holds the truth", *head], rows)

    def outside(self, lowest: float = 93.5, highest: float = 96.5) -> str:
        """Return in words which quantities are not covered as they should be at the largest number of prompts."""
        shares = {
            f"{name} ({setting}): {share} %": 100 * share.hits / share.count
            for (name, setting, prompts), share in self.covered.items()
            if prompts == max(PROMPTS)
        }
        odd = [words for words, value in shares.items() if not lowest <= value <= highest]
        said = (
            f"With {max(PROMPTS)} prompts, {len(shares) - len(odd)} of {len(shares)} are from {lowest} to {highest} %"
        )
        return f"{said}; not {', '.join(odd)}." if odd else f"{said}."

    def _methods(self, study: Study, truth: Truth, prompts: int) -> None:
        base, new = (np.stack([c.accepted + c.passes, c.passes])[:, None] for c in (study.base, study.new))
        both = np.concatenate([base, new], axis=1)
        for quantity, interval, value, (tops, bottoms) in (
            ("pooled length", study.alone.pooled, truth.pooled, base),
            ("relative change", study.change.pooled, truth.change, both),
            ("difference", study.change.difference, truth.difference, both),
        ):
            assert interval.replicates
            ends = other_intervals(tops, bottoms, interval.replicates)
            ends["bootstrap-t, symmetric (used)"] = interval.lower, interval.upper
            if quantity == "pooled length":
                ends["wrong: each pass drawn alone"] = passes_alone(study.base)
            if quantity == "difference":
                other = acceptance_intervals(study.new)
                assert other
                ends["wrong: not paired"] = unpaired(study.alone, other)
            for method, (lower, upper) in ends.items():
                place = method, quantity, prompts
                self.others.setdefault(place, Share()).add(lower <= value <= upper)
                self.widths.setdefault(place, []).append((upper - lower) / (interval.upper - interval.lower))

    def methods(self) -> list[str]:
        """Return coverage and width of other intervals from the same draws."""
        columns = [(quantity, n) for quantity in ("pooled length", "relative change", "difference") for n in (32, 128)]
        methods = dict.fromkeys(method for method, _, _ in self.others)
        rows = [
            [method, *(self._method((method, *column)) for column in columns)]
            for method in sorted(methods, key=lambda name: (name.startswith("wrong"), name))
        ]
        return _table(["coverage in % (width, relative to the one used)", *(f"{q}, {n}" for q, n in columns)], rows)

    def _method(self, place: tuple[str, str, int]) -> str:
        if place not in self.others:
            return ""
        return f"{self.others[place]} ({np.median(self.widths[place]):.2f})"

    def tails(self) -> list[str]:
        """Return how often intervals of 99.9 % miss, whose ends are beyond what the draws resolve."""
        rare = Resampling(confidence=0.999)
        rows = []
        for setting in SETTINGS:
            misses = []
            for prompts in PROMPTS:
                base, new = arms(setting, prompts * self.count, SEED)
                truth, missed = pooled(new) - pooled(base), Share(digits=2)
                for number in range(self.count):
                    one, other = (part(counts, number * prompts, prompts) for counts in (base, new))
                    found = length_difference(one, other, rare)
                    missed.add(not (found and found.holds(truth)))
                    self.advance(1)
                misses.append(str(missed))
            rows.append([setting.name, *misses])
        return _table(["% of differences outside of 99.9 %", *(f"{n} prompts" for n in PROMPTS)], rows)

    def false_claims(self) -> list[str]:
        """Return how often there are claims where there should be none, for one row and for families."""
        rng, rows = np.random.default_rng(SEED), []
        margins = Margins()
        for what, margin, p_values in (
            ("no loss: length changed at all", 0.0, [p_outside(c.pooled, 0.0) for c in self.equal]),
            ("no loss: length", margins.acceptance, [p_outside(c.pooled, margins.acceptance) for c in self.equal]),
            ("no loss: survival changed at all", 0.0, [p_outside(c.survival, 0.0) for c in self.equal]),
            ("no loss: survival", margins.survival, [p_outside(c.survival, margins.survival) for c in self.equal]),
            *self._at_the_margin(),
        ):
            rows.append([what, f"{margin:.3f}", *self._claims(p_values, rng)])
        return _table(["% with a claim", "margin", "one row", f"any of {FAMILY} rows, by itself", "with Holm"], rows)

    def _claims(self, p_values: Sequence[float], rng: np.random.Generator) -> list[str]:
        one = Share()
        for p in p_values:
            one.add(p <= 0.05)
        return [str(one), *map(str, family_errors(p_values, rng, self.count))]

    def _at_the_margin(self) -> Iterator[tuple[str, float, list[float]]]:
        """Yield p-values where the true loss is the margin itself: the hardest case that is no degradation."""
        lengths, curves, changes, drops = [], [], [], []
        for setting in SETTINGS:
            (losing,) = with_losses(setting, [Margins().acceptance])
            truth, made = studies(losing, 128, self.count // 2)
            for study in made:
                lengths.append(p_outside(study.change.pooled, -truth.change))
                curves.append(p_outside(study.change.survival, -min(truth.change_survival)))
                self.advance(1)
            changes.append(-truth.change)
            drops.append(-min(truth.change_survival))
        yield "the loss is the margin: length", float(np.mean(changes)), lengths
        yield "the loss is the margin: survival", float(np.mean(drops)), curves

    def power(self, setting: Setting) -> list[str]:
        """Return how often a loss is called what, by number of prompts."""
        margins = Margins()
        counts = {
            (n, loss, what, verdict): Share()
            for n in POWER_PROMPTS
            for loss in LOSSES
            for what in ("length", "survival")
            for verdict in Verdict
        }
        halves: dict[tuple[int, str], list[float]] = {
            (n, what): [] for n in POWER_PROMPTS for what in ("length", "survival")
        }
        truths = []
        for losing, loss in zip(with_losses(setting, LOSSES), LOSSES, strict=True):
            pool = arms(losing, max(POWER_PROMPTS) * self.power_count, SEED)
            truths.append(Truth.of(*pool))
            for n in POWER_PROMPTS:
                for number in range(self.power_count):
                    change = acceptance_change(part(pool[0], number * n, n), part(pool[1], number * n, n))
                    assert change
                    found = {
                        "length": judge(change.pooled, margins.acceptance),
                        "survival": judge(change.survival, margins.survival),
                    }
                    for what, verdict in found.items():
                        for other in Verdict:
                            counts[n, loss, what, other].add(verdict is other)
                    if not loss:
                        widths = np.subtract(change.survival.upper, change.survival.lower)
                        halves[n, "length"].append((change.pooled.upper - change.pooled.lower) / 2)
                        halves[n, "survival"].append(float(widths.max()) / 2)
                    self.advance(1)
        head = [f"{-100 * t.change:.1f} % (survival {min(t.change_survival):+.3f})" for t in truths]
        lines = []
        for what in ("length", "survival"):
            rows = [
                [
                    f"{n}",
                    f"{np.median(halves[n, what]):.3f}",
                    *(
                        f"{counts[n, loss, what, Verdict.PRESERVED]} / {counts[n, loss, what, Verdict.DEGRADED]}"
                        for loss in LOSSES
                    ),
                ]
                for n in POWER_PROMPTS
            ]
            half = "half the interval" if what == "length" else "half the band, widest"
            lines += _table([f"{what}: prompts", half, *head], rows)
        return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)] + [""]


def page(options: argparse.Namespace, command: str) -> str:
    """Simulate, and return the page."""
    powered = (SETTINGS[0], SETTINGS[2])
    total = 2 * options.studies * len(SETTINGS) * len(PROMPTS) + options.studies // 2 * len(SETTINGS)
    total += options.power_studies * len(POWER_PROMPTS) * len(LOSSES) * len(powered)
    with progress("simulating", total, "studies") as advance:
        simulation = Simulation(options.studies, options.power_studies, advance)
        coverage, methods, tails = simulation.coverage(), simulation.methods(), simulation.tails()
        claims = simulation.false_claims()
        power = {setting: simulation.power(setting) for setting in powered}
    hardware, error = files.hardware(), 196 * (0.05 * 0.95 / options.studies) ** 0.5
    lines = [
        "# Do the intervals hold, and are the verdicts right?",
        "",
        f"`{command}`",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores; numpy {np.__version__}; seed {SEED}. {options.studies:,} "
        f"studies for each setting and number of prompts, each with 2,000 resamples: a coverage of 95 % would come out "
        f"within {error:.1f} points of it 19 times in 20.",
        "",
        "## The studies",
        "",
        *_described(),
        "## Coverage of 95 % intervals",
        "",
        "Without a loss, by setting and number of prompts. Bands count only if they hold the whole curve.",
        "",
        *coverage,
        simulation.outside(),
        "",
        "Other intervals from the same draws, over all three settings:",
        "",
        *methods,
        _TEXTS["methods"].strip(),
        "",
        "Far out, where Student's tail goes on from the draws' (and where Holm looks):",
        "",
        *tails,
        "## False claims",
        "",
        f"128 prompts. Families are {options.studies:,} random choices of {FAMILY} of all rows, a third of which have "
        "K of 3. With Holm is what `degraded` and `improved` mean beside other rows.",
        "",
        *claims,
        _TEXTS["claims"].strip(),
        "",
        "## Power",
        "",
        f"% of {options.power_studies} studies called preserved / degraded, by true loss, with margins of 3 % of the "
        "acceptance length and 0.02 of survival; the rest is undecided. In brackets the largest true drop of survival.",
        "",
    ]
    for setting, tables in power.items():
        lines += [f"### {setting.name}", "", *tables]
    return "\n".join([*lines, _TEXTS["power"].strip(), "", bench_statistics.section()])


_TEXTS = {
    "methods": """
The symmetric bootstrap-t is used because it is the only one of these near 95 % from 32 prompts on. Its price is a
tenth of the width at 32 prompts, and a thirtieth at 128. Passes drawn alone hold the truth once in three studies:
passes of an answer resemble each other, and answers differ. Without pairing, intervals are three times as wide as they
need to be.
""",
    "claims": """
A single row errs as often as 5 % promise; 60 rows read one by one nearly always have a row that does, and Holm's
procedure keeps that below 5 % for all of them together. With a margin there is hardly anything left to err about where
nothing is lost. A loss of just the margin, the hardest case, is called degraded half as often as 5 %, since the other
half would be called improved. For a curve it is less: the band holds all positions, and one alone is at the margin.
""",
    "power": """
How many prompts? What decides is half the interval, which `mxq compare` prints as the ends of the interval, and which
shrinks with the square root of the prompts. Where nothing is lost, `preserved` needs all of the interval inside the
margin: four studies of five say it once half the interval is 0.6 of the margin. A loss is called degraded as often
once it is beyond the margin by 1.4 times half the interval: with a margin of 3 %, for a loss of 5 % half the interval
must be 1.4 %, for one of 8 % it may be 3.5 %. A loss of just the margin is by construction called degraded in 2.5 %
of studies and preserved in 2.5 %, however many prompts there are: nothing decides it, and the margin must be chosen
so that it is not where it matters. So: measure 32 or 64 prompts, look at half the interval h, and take
n * (h / (0.6 * margin))^2 prompts. Prompts here differ much from each other, in code and chat more than those of the
testbed do (standard deviation of a per-request length 20 to 25 % of it, here 37 and 48 %; 15 % in maths): with more
even prompts, fewer are enough. The number that a comparison gives for an undecided row is for even odds of a verdict,
if the estimate stays.
""",
}
"""What the tables mean; no number here depends on the seed."""


def _described() -> list[str]:
    """Describe the settings in numbers."""
    rows = []
    for setting in SETTINGS:
        base, new = arms(setting, 40_000, SEED)
        lengths, tokens = base.lengths, base.accepted + base.passes
        low, high = np.quantile(tokens, [0.05, 0.95])
        together = float(np.corrcoef(lengths, new.lengths)[0, 1])
        rows.append(
            [
                setting.name,
                f"{pooled(base):.2f}",
                f"{lengths.mean():.2f} ({lengths.std():.2f})",
                f"{low:.0f} to {high:.0f}",
                f"{together:.2f}",
            ]
        )
    head = [
        "setting",
        "pooled length",
        "per-request mean (sd)",
        "tokens, 5th to 95th percentile",
        "correlation of arms",
    ]
    return _table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000, help="for each setting and number of prompts")
    parser.add_argument("--power-studies", type=int, default=250, help="for each loss and number of prompts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/STATISTICS.md"))
    options = parser.parse_args(argv)
    os.nice(10)
    text = page(options, shlex.join(["python", "tools/check_statistics.py", *(sys.argv[1:] if argv is None else argv)]))
    with files.atomic_write(options.out) as file:
        file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
