"""The section of a report about how good the MXFP4 target is, where it was measured (`mxq eval --quality`)."""

from collections.abc import Callable, Iterator, Sequence

from mxq.quality import Means, Quality, TextQuality
from mxq.report import gallery
from mxq.report.page.content import NONE, Cell, Grid, Section, cells
from mxq.report.page.verdict import ALL
from mxq.report.pictures import Panel, Picture, Series
from mxq.report.quality_tables import ANSWERS, TEXTS, nats, notes, perplexity
from mxq.stats import Interval

_LONGEST = 24
"""Letters of a name beside a bar; longer ones leave no room for the bars."""


def quality_section(quality: Quality) -> Section:
    """Return perplexity, divergence and agreement of the two targets, by workload and by text."""
    if not quality.parts:
        return Section("quality", "How good it is")
    several = quality.overall if len(quality.answers) > 1 else None
    tables = ((ANSWERS, quality.answers, several), (TEXTS, quality.texts, None))
    return Section(
        "quality",
        "How good it is",
        text=(
            "Both targets read the same text, and what they say of each of its tokens is compared: how likely either "
            "finds it, how far apart the two distributions are, and whether both would choose the same token.",
        ),
        grids=tuple(_grid(title, parts, overall) for title, parts, overall in tables if parts),
        pictures=tuple(_picture(quality)),
        closing=tuple(notes(quality)),
    )


def _grid(title: str, parts: Sequence[TextQuality], overall: Means | None) -> Grid:
    shares = [f"{share:.0%} of tokens" for share, _ in parts[0].quantiles]
    columns = (
        *("", "tokens", "perplexity, bf16", "perplexity, mxfp4", "ratio"),
        *("KL(bf16 to mxfp4), nats", *shares, "largest", "same choice"),
    )
    rows = []
    for part in parts:
        spread = [nats(one) for one in (*(quantile for _, quantile in part.quantiles), part.largest)]
        rows.append(cells([part.name, str(part.tokens), *_means(part.means, spread)]))
    if overall is not None:
        rows.append(cells([ALL, NONE, *_means(overall, [NONE] * (len(shares) + 1))]))
    return Grid(title, columns, tuple(rows))


def _means(means: Means, spread: Sequence[str | Cell]) -> Iterator[str | Cell]:
    yield _entry(means.bf16_perplexity, perplexity)
    yield _entry(means.mxfp4_perplexity, perplexity)
    yield _entry(means.ratio, "{:.4f}".format)
    yield _entry(means.divergence, "{:.4f}".format)
    yield from spread
    yield _entry(means.agreement, "{:.2%}".format)


def _picture(quality: Quality) -> Iterator[Picture]:
    """Yield the divergence on own answers as bars, by workload."""
    found = [(part.name, part.means.divergence) for part in quality.answers]
    if quality.overall is not None and len(found) > 1:
        found.append((ALL, quality.overall.divergence))
    if found:
        points = [gallery.point(place, one.estimate, one) for place, (_, one) in enumerate(found)]
        yield Picture(
            key="quality",
            title="Divergence of MXFP4 from bf16, on bf16's own answers",
            x_label="workload",
            y_label="KL divergence, nats per token",
            panels=(Panel("own answers", (Series("mxfp4 against bf16", "mxfp4", tuple(points)),)),),
            form="{:.4f}",
            categories=tuple(name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name, _ in found),
            intervals=f"{100 * quality.resampling.confidence:g} % intervals over prompts",
        )


def _entry(one: Interval, form: Callable[[float], str]) -> Cell:
    return Cell(form(one.estimate), f"{form(one.lower)} to {form(one.upper)}" if one.bounded else "no interval")
