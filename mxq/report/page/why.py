"""The section of a report about why acceptance changed, where a run was explained (`mxq eval --explain`)."""

from collections.abc import Iterator
from typing import Literal

from mxq.explain import Effects, Why
from mxq.explain.effects import mean_drift
from mxq.explain.record import EDGES
from mxq.report import gallery
from mxq.report.explain_tables import notes
from mxq.report.page.content import NONE, Cell, Grid, Section, cells
from mxq.report.page.verdict import ALL
from mxq.report.pictures import Panel, Picture, Series
from mxq.stats import Band, Interval

_ROUTES = ("by features", "by logits")


def why_section(why: Why) -> Section:
    """Return the change of acceptance length by route, which draft positions pay, and what drifted."""
    if not why.parts:
        return Section("why", "Why it changed")
    return Section(
        "why",
        "Why it changed",
        text=(
            "A drafter reads features of the target and is judged by its logits. Both were taken from either target on "
            "one text, so that the change of acceptance length has two parts that add up.",
        ),
        grids=(_routes(why), _verifier(why)),
        pictures=(*_effects(why), *_positions(why)),
        after=tuple(_drifts(why)),
        closing=tuple(notes(why)),
    )


def _routes(why: Why) -> Grid:
    rows = [_route(f"{part.workload} · {gallery.titled(part.configuration)}", part.effects) for part in why.parts]
    if len({part.workload for part in why.parts}) > 1:
        rows += [_route(f"{ALL} · {gallery.titled(name)}", effects) for name, effects in why.overall.items()]
    columns = ("", "change", *_ROUTES, "interaction", "route of the loss")
    return Grid("Change of acceptance length, in tokens per pass", columns, tuple(rows))


def _route(name: str, effects: Effects) -> tuple[Cell, ...]:
    parts = (effects.total, effects.features, effects.logits, effects.interaction)
    return cells([name, *(_entry(one, "{:+.2f}") for one in parts), effects.route])


def _verifier(why: Why) -> Grid:
    rows = []
    for part in {part.workload: part for part in why.parts}.values():
        flips = part.flips
        gaps = (flips.bf16_gap, flips.mxfp4_gap, flips.elsewhere)
        quantiles = [f"{nats:.4f}" for _, nats in part.divergence.quantiles]
        shares: list[str | Cell] = [_entry(part.divergence.mean, "{:.4f}"), *quantiles, _entry(flips.share, "{:.2%}")]
        rows.append(cells([part.workload, str(part.tokens), *shares, *(_number(gap, "{:.2f}") for gap in gaps)]))
    names = [f"{share:.0%} of tokens" for share, _ in why.parts[0].divergence.quantiles]
    gaps_of = ("gap at flips, bf16", "gap at flips, mxfp4", "gap elsewhere, bf16")
    columns = ("", "tokens", "KL(bf16 to mxfp4), nats", *names, "flips", *gaps_of)
    return Grid("The verifier: MXFP4 against bf16 behind the same tokens", columns, tuple(rows))


def _effects(why: Why) -> Iterator[Picture]:
    """Yield the change and its parts as bars, by workload."""
    several = len({part.workload for part in why.parts}) > 1
    for configuration, overall in why.overall.items():
        mine = [(part.workload, part.effects) for part in why.parts if part.configuration == configuration]
        panels = []
        for name, effects in [*mine, *([(ALL, overall)] if several else [])]:
            parts = (effects.total, effects.features, effects.logits)
            points = [gallery.point(place, one.estimate, one) for place, one in enumerate(parts)]
            panels.append(Panel(name, (Series("mxfp4 for bf16", "mxfp4", tuple(points)),)))
        yield Picture(
            key=f"why-{configuration}",
            title=f"Change of acceptance length by route, {gallery.titled(configuration)}",
            x_label="part",
            y_label="tokens per verify pass",
            panels=tuple(panels),
            form="{:+.2f}",
            categories=("change", *_ROUTES),
            bottom=None,
            references=(0.0,),
            intervals=f"{100 * why.resampling.confidence:g} % intervals over prompts",
        )


def _positions(why: Why) -> Iterator[Picture]:
    """Yield what either route does to survival, by draft position."""
    for configuration in why.overall:
        mine = [part for part in why.parts if part.configuration == configuration]
        panels = [
            Panel(
                part.workload,
                (
                    _curve("features", part.features, "-", "o"),
                    _curve("logits", part.logits, "--", "s"),
                ),
            )
            for part in mine
        ]
        yield Picture(
            key=f"why-positions-{configuration}",
            title=f"Which drafts pay, {gallery.titled(configuration)}",
            x_label=f"drafts accepted, at least ({configuration})",
            y_label="change of survival",
            panels=tuple(panels),
            form="{:+.3f}",
            x_ticks=gallery.positions(panels),
            bottom=None,
            references=(0.0,),
            intervals=f"{100 * why.resampling.confidence:g} % bands, each around a whole curve at once",
        )


def _curve(route: Literal["features", "logits"], effect: Band, line: str, marker: str) -> Series:
    points = [gallery.point(i + 1, value, effect.at(i)) for i, value in enumerate(effect.estimate)]
    return Series(f"by {route}", route, tuple(points), line, marker, band=True)


def _drifts(why: Why) -> Iterator[Grid]:
    """Yield how far what a drafter reads has drifted, over all workloads' tokens."""
    ends = zip(EDGES, (*EDGES[1:], None), strict=True)
    names = [f"tokens {begin + 1} to {end}" if end else f"from token {begin + 1}" for begin, end in ends]
    for configuration in why.overall:
        parts = [part for part in why.parts if part.configuration == configuration]
        rows = []
        for index, read in enumerate(parts[0].drift):
            answers = mean_drift([part.drift[index].answers for part in parts])
            ranges = [mean_drift([part.drift[index].ranges[r] for part in parts]) for r in range(len(read.ranges))]
            cosine = _number(answers.cosine if answers else None, "{:.4f}")
            errors = [_number(one.error if one else None, "{:.3f}") for one in (answers, *ranges)]
            rows.append(cells([read.name, cosine, *errors]))
        columns = ("", "cosine", "relative error", "prompt", *names)
        caption = f"What the drafter reads, {gallery.titled(configuration)}: drift from bf16 to MXFP4"
        yield Grid(caption, columns, tuple(rows), folded=True)


def _entry(one: Interval, form: str) -> Cell:
    ends = f"{form.format(one.lower)} to {form.format(one.upper)}" if one.bounded else "no interval"
    return Cell(form.format(one.estimate), ends)


def _number(value: float | None, form: str) -> Cell:
    return NONE if value is None else Cell(form.format(value))
