"""Rows of a comparison: a change with its interval and its verdict, alone and among all rows of its quantity.

Claims are held to :mod:`mxq.stats.verdict`, each quantity a family of its own. Several rows together are degraded if
one of them is; else undecided if one is; else improved if one is; else preserved. Acceptance that both sides have and
that allows no interval is undecided.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mxq.analysis.changes import ACCEPTANCE, SPEED, SURVIVAL, Change, Missing, Quantity
from mxq.stats import Band, Interval, Margins, Resampling, Verdict, judge_all


@dataclass(frozen=True)
class Row:
    """One change and its verdict.

    ``configuration`` is method and budget, "ar" for plain decoding; ``workload`` is None for all workloads alike.
    ``prompts`` counts conversations. ``base`` and ``new`` are in tokens per verify pass, as a share of passes, or in
    tokens per second; those of all workloads are geometric means without ends. ``change`` is relative, and absolute for
    survival: there all three are those at ``position`` (from 0), which the verdict rests on or else has the largest
    drop, and ``bands`` are base, new and difference at all positions.

    ``verdict`` is the row's own, ``adjusted`` the one to report: among all rows of the quantity. ``p`` and
    ``adjusted_p`` are of the claim that the change is outside the margin. ``decides`` is the number of prompts (of
    repeats, with several requests in flight) that would decide an undecided row if the estimate stays.
    """

    quantity: Quantity
    configuration: str
    workload: str | None
    concurrency: int
    prompts: int
    repeats: int
    base: Interval
    new: Interval
    change: Interval
    margin: float
    verdict: Verdict
    adjusted: Verdict
    p: float
    adjusted_p: float
    decides: int | None
    position: int | None = None
    bands: tuple[Band, Band, Band] | None = None

    @property
    def where(self) -> str:
        """Return which row it is, in words."""
        at = f", {self.concurrency} in flight" if self.concurrency > 1 else ""
        return f"{self.quantity} of {self.configuration} on {self.workload or 'all workloads'}{at}"

    @property
    def words(self) -> str:
        """Return the change with its interval, in words."""
        if self.quantity == SURVIVAL:
            numbers = (f"{value:+.3f}" for value in (self.change.estimate, self.change.lower, self.change.upper))
            return "{}, {} to {}, at draft {}".format(*numbers, (self.position or 0) + 1)
        return f"{self.change.estimate:+.1%}, {self.change.lower:+.1%} to {self.change.upper:+.1%}"

    def as_json(self, *, withheld: bool = False) -> dict[str, Any]:
        """Return it as JSON values, without verdicts where these are withheld."""
        place = {
            name: getattr(self, name)
            for name in ("quantity", "configuration", "workload", "concurrency", "prompts", "repeats", "position")
        }
        numbers: dict[str, Any] = {name: getattr(self, name).as_json() for name in ("base", "new", "change")}
        if self.bands:
            numbers["bands"] = {
                name: band.as_json() for name, band in zip(("base", "new", "difference"), self.bands, strict=True)
            }
        judged = {
            "margin": self.margin,
            "verdict": None if withheld else str(self.verdict),
            "adjusted": None if withheld else str(self.adjusted),
            "p": self.p,
            "adjusted_p": self.adjusted_p,
            "decides": self.decides,
        }
        return place | numbers | judged


def judged(made: Sequence[Change], margins: Margins, resampling: Resampling) -> tuple[Row, ...]:
    """Judge all changes of a comparison, in the order of quantities."""
    rows: list[Row] = []
    margin_of = {ACCEPTANCE: margins.acceptance, SURVIVAL: margins.survival, SPEED: margins.throughput}
    for quantity, margin in margin_of.items():
        family = [one for one in made if one.quantity == quantity]
        verdicts = judge_all([one.change for one in family], margin, resampling.confidence)
        for one, said in zip(family, verdicts, strict=True):
            position = telling(one.change, margin) if isinstance(one.change, Band) else None
            # Over repeats the number that would decide is one of repeats, of which there is a handful.
            over_repeats = quantity == SPEED and one.concurrency > 1
            rows.append(
                Row(
                    quantity=quantity,
                    configuration=one.configuration,
                    workload=one.workload,
                    concurrency=one.concurrency,
                    prompts=one.prompts,
                    repeats=one.repeats,
                    base=_at(one.base, position),
                    new=_at(one.new, position),
                    change=_at(one.change, position),
                    margin=margin,
                    verdict=said.verdict,
                    adjusted=said.adjusted,
                    p=said.p,
                    adjusted_p=said.adjusted_p,
                    decides=None if over_repeats else said.decides,
                    position=position,
                    bands=_bands(one),
                )
            )
    return tuple(rows)


def undecided(row: Row) -> Row:
    """Return a row whose interval leaves out something that no number of prompts would bring in."""
    return replace(row, verdict=Verdict.UNDECIDED, adjusted=Verdict.UNDECIDED, decides=None)


def telling(difference: Band, margin: float) -> int:
    """Return the position, from 0, that a verdict on a band rests on; else that of the largest drop.

    A band can lie beyond the margin where its estimate is not the largest.
    """
    places = range(len(difference.estimate))
    if min(difference.upper) < -margin:
        return min(places, key=difference.upper.__getitem__)
    if max(difference.lower) > margin and min(difference.lower) >= -margin:
        return max(places, key=difference.lower.__getitem__)
    return min(places, key=difference.estimate.__getitem__)


def _at(found: Interval | Band, position: int | None) -> Interval:
    return found if isinstance(found, Interval) else found.at(position or 0)


def _bands(one: Change) -> tuple[Band, Band, Band] | None:
    if isinstance(one.base, Band) and isinstance(one.new, Band) and isinstance(one.change, Band):
        return one.base, one.new, one.change
    return None


def together(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return what verdicts say together, None without any."""
    worst_first = (Verdict.DEGRADED, Verdict.UNDECIDED, Verdict.IMPROVED, Verdict.PRESERVED)
    return next((verdict for verdict in worst_first if verdict in verdicts), None)


def by(rows: Sequence[Row], unknown: Sequence[Missing], name: str) -> dict[str, Verdict]:
    """Return what the rows of each configuration, or each quantity, say together; ``unknown`` ones are undecided."""
    groups: dict[str, list[Verdict]] = {}
    for row in rows:
        groups.setdefault(getattr(row, name), []).append(row.adjusted)
    for one in unknown:
        groups.setdefault(getattr(one, name), []).append(Verdict.UNDECIDED)
    return {value: verdict for value, verdicts in groups.items() if (verdict := together(verdicts)) is not None}
