"""The sections of a report that help to choose: what to deploy, and how the run stands beside published numbers."""

from mxq.analysis.published import Beside, PublishedRow
from mxq.analysis.sweep import Choice, Sweep
from mxq.report import gallery
from mxq.report.choice_tables import ONCE, recommendation, withheld_words
from mxq.report.page.content import NONE, Cell, Grid, Section, cells
from mxq.report.page.verdict import ALL
from mxq.stats import Interval


def deploy_section(found: Sweep, confidence: float) -> Section:
    """Return the recommended method and K for every target and number of requests in flight, and what it rests on."""
    lines, grids = [], []
    for target, at in dict.fromkeys((choice.target, choice.concurrency) for choice in found.choices):
        mine = [choice for choice in found.choices if (choice.target, choice.concurrency) == (target, at)]
        lines += [f"{recommendation(one).plain}." for one in mine if one.workload is None or len(mine) == 1]
        rows = tuple(cells(_row(choice)) for choice in mine)
        columns = ("workload", "fastest", "output tokens/s", "runner-up", "over runner-up", "over plain", "take")
        grids.append(Grid(f"Fastest by output tokens/s: {target}, {gallery.flight(at)}", columns, rows))
    why = [f"{target}: {withheld_words(reason)}" for target, reason in found.withheld.items()]
    explained = (
        f"Advantages are relative, with {100 * confidence:g} % intervals, each for itself: over prompts with one "
        "request in flight, over repeats with several (one repeat gives none). Of configurations that the fastest is "
        f"not shown to beat the smallest budget is recommended. '{ALL}': mean over workloads, each weighing alike."
    )
    return Section(
        "deploy",
        "What to deploy",
        text=(*lines, *why),
        grids=tuple(grids),
        closing=(explained, *((ONCE,) if found.once else ())) if grids else (),
    )


def published_section(found: Beside, confidence: float) -> Section:
    """Return the run's acceptance lengths with the published ones below; empty where none were of this model."""
    if found.model is None:
        return Section("published", "Beside the published numbers")
    workloads = list(dict.fromkeys(row.workload for row in found.rows))
    grids = []
    for target in dict.fromkeys(row.target for row in found.rows):
        mine = {(row.configuration, row.workload): row for row in found.rows if row.target == target}
        rows = []
        for configuration in dict.fromkeys(configuration for configuration, _ in mine):
            entries = [_beside(mine[place]) if (place := (configuration, name)) in mine else NONE for name in workloads]
            rows.append(cells([gallery.titled(configuration), *entries]))
        caption = f"Acceptance length, {target}: the run's with its {100 * confidence:g} % interval, and the published"
        grids.append(Grid(caption, ("method and K", *workloads), tuple(rows)))
    return Section(
        "published",
        "Beside the published numbers",
        text=(f"Published of {found.model}, found {found.matched}. What was not published is not filled in.",),
        grids=tuple(grids),
        closing=(*(f"{one[:1].upper()}{one[1:]}." for one in found.unlike), f"Source: {found.source}."),
    )


def _row(choice: Choice) -> list[str | Cell]:
    speed = choice.tokens_per_s
    tied = "not shown slower" if choice.runner_up in choice.ties else ""
    return [
        choice.workload or ALL,
        gallery.titled(choice.fastest),
        Cell(f"{speed.estimate:.1f}", f"{speed.lower:.1f} to {speed.upper:.1f}" if speed.bounded else ""),
        NONE if choice.runner_up is None else Cell(gallery.titled(choice.runner_up), tied),
        _advantage(choice.over_runner_up),
        _advantage(choice.over_plain),
        gallery.titled(choice.recommended),
    ]


def _advantage(found: Interval | None) -> Cell:
    if found is None:
        return NONE
    ends = f"{100 * found.lower:+.1f} to {100 * found.upper:+.1f} %" if found.bounded else "no interval"
    return Cell(f"{100 * found.estimate:+.1f} %", ends)


def _beside(row: PublishedRow) -> Cell:
    below = [f"{row.run.lower:.3f} to {row.run.upper:.3f}"] if row.run.bounded else []
    if row.published is None:
        below.append("not published")
    else:
        where = "" if row.inside is None else ", inside" if row.inside else ", outside"
        below.append(f"published {row.published:.3f}{where}")
    return Cell(f"{row.run.estimate:.3f}", "\n".join(below))
