"""What changed between two arms, with intervals and verdicts: one row for each quantity, configuration and workload.

* Acceptance length: pooled, relative change. Survival: difference at each position, with a simultaneous band. Both are
  of the first repeat, at the fewest requests in flight that both sides were measured with: greedy answers do not
  change, and the same answers again are no more evidence.
* Tokens per second: relative change; with one request in flight over prompts, with several over repeats, since requests
  that run side by side are not evidence each by itself. Of servers that measured each arm once nothing is decided: what
  changed from one arm's time to the other's is no noise of prompts.
* Of each configuration with several workloads also their mean, workloads weighing alike, prompts drawn within each.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mxq.analysis import alike, changes, evidence, lengths
from mxq.analysis.alike import Unlike
from mxq.analysis.changes import ACCEPTANCE, MEASURED_ONCE, NO_PARTNER, SPEED, TAKE_TURNS, Change, Missing
from mxq.analysis.pairs import Pair, Side, aligned, cells_of, pairs, side
from mxq.analysis.rows import Row, by, judged, together, undecided
from mxq.analysis.summary import Summary, summarise
from mxq.errors import MxqError, UsageError
from mxq.evaluate import Run
from mxq.evaluate.matrix import VLLM
from mxq.evaluate.records import conversations
from mxq.stats import ENOUGH, Margins, Resampling, Verdict

DEFAULT_MARGINS = Margins()
DEFAULT_RESAMPLING = Resampling()


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison says.

    ``verdict`` is None where it is ``withheld`` (which says why) or no row could be judged. ``missing`` are cells
    without a row. ``unlike`` is what was allowed to differ, ``warnings`` what must be known before any number,
    ``notes`` what is to be known of these. ``prompts`` is (compared, in the workload) by workload. ``finished``
    says whether the runs are: a verdict on less is one so far.
    """

    base_label: str
    new_label: str
    runs: tuple[str, ...]
    rows: tuple[Row, ...]
    verdict: Verdict | None
    by_configuration: dict[str, Verdict]
    by_quantity: dict[str, Verdict]
    margins: Margins
    resampling: Resampling
    prompts: dict[str, tuple[int, int]]
    finished: bool
    missing: tuple[Missing, ...]
    unlike: tuple[Unlike, ...]
    withheld: str | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def failing(self, verdicts: Collection[str]) -> list[str]:
        """Return in words the rows with one of these verdicts; cells without any count as undecided."""
        found = [f"{row.where} ({row.words})" for row in self.rows if row.adjusted in verdicts]
        if Verdict.UNDECIDED in verdicts:
            found += [f"{one.where} ({one.why})" for one in self.missing]
            found += [] if self.finished else ["cells that are not finished yet"]
        return found

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values; numbers are not rounded."""
        named = {name: {key: str(v) for key, v in getattr(self, name).items()} for name in _GROUPS}
        return {
            "base": self.base_label,
            "new": self.new_label,
            "runs": list(self.runs),
            "verdict": None if self.verdict is None else str(self.verdict),
            "withheld": self.withheld,
            "finished": self.finished,
            **named,
            "margins": vars(self.margins),
            "resampling": vars(self.resampling),
            "prompts": {name: {"used": used, "of": total} for name, (used, total) in self.prompts.items()},
            "rows": [row.as_json(withheld=self.withheld is not None) for row in self.rows],
            "missing": [one.as_json() for one in self.missing],
            "allowed_to_differ": [one.as_json() for one in self.unlike],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


_GROUPS = ("by_configuration", "by_quantity")


def compare(
    base: Run,
    new: Run | None = None,
    *,
    base_target: str = "bf16",
    new_target: str = "mxfp4",
    workloads: Collection[str] = (),
    margins: Margins = DEFAULT_MARGINS,
    resampling: Resampling = DEFAULT_RESAMPLING,
    allowed: Collection[str] = (),
) -> Comparison:
    """Compare the arms of ``new_target`` (of ``new``, by default of the same run) with those of ``base_target``.

    Args:
        base, new: runs, complete or not.
        base_target, new_target: "bf16" or "mxfp4"; the same in both only of two runs.
        workloads: only these; all that both sides have where none is given.
        margins: changes that do not matter.
        resampling: how intervals are made.
        allowed: what may differ besides the target, of :data:`mxq.analysis.alike.ALLOWABLE`.

    Raises:
        UsageError: a side is missing, nothing has a partner, or the sides are not alike: said with both values.
        MxqError: there are no results yet, or a run is damaged.
    """
    new = base if new is None or new.path.resolve() == base.path.resolve() else new
    if new is base and base_target == new_target:
        raise UsageError(
            f"{base_target} of {base.name} is on both sides",
            "choose two targets with --base and --new, or give two runs",
        )
    runs = (base,) if new is base else (base, new)
    summaries = [summarise(run) for run in runs]
    sides = side(base, base_target, workloads), side(new, new_target, workloads)
    found = pairs(*sides)
    try:
        unlike = alike.differences(base, new, cells_of(found, base=True), cells_of(found, base=False))
    except (KeyError, TypeError, AttributeError) as error:
        raise MxqError(f"a run.json does not describe its run ({error!r})", "start a new run") from None
    alike.refuse(unlike, allowed)
    kept = [pair for one in found if (pair := aligned(one)) is not None]
    apart = " and ".join(one.name for one in unlike if one.name in _OTHER_SPEED) or None
    made, notes = changes.of_pairs(kept, resampling, apart=apart)
    withheld = _withheld(summaries)
    rows = judged([one for one in made if isinstance(one, Change)], margins, resampling)
    if _served(base):
        rows = tuple(undecided(row) if _measured_once(row) else row for row in rows)
    missing = [one for one in made if isinstance(one, Missing)]
    decided = rows if withheld is None else ()
    unknown = [one for one in missing if one.quantity == ACCEPTANCE] if decided else []
    by_quantity = by(decided, unknown, "quantity")
    labels = _label(*sides), _label(*sides[::-1])
    return Comparison(
        base_label=labels[0],
        new_label=labels[1],
        runs=tuple(run.name for run in runs),
        rows=rows,
        verdict=together(list(by_quantity.values())),
        by_configuration=by(decided, unknown, "configuration"),
        by_quantity=by_quantity,
        margins=margins,
        resampling=resampling,
        prompts=_prompts(kept, base),
        finished=all(run.finished for run in runs),
        missing=(*_partnerless(sides), *missing),
        unlike=tuple(unlike),
        withheld=withheld,
        warnings=tuple(dict.fromkeys(said for summary in summaries for said in summary.warnings)),
        notes=(*notes, *lengths.differing(kept, *labels), *_notes(rows, kept, summaries)),
    )


_OTHER_SPEED = ("arithmetic", "engine", "hardware")
"""What makes another speed whatever the target is."""


def _withheld(summaries: Sequence[Summary]) -> str | None:
    """Return why there is no verdict: numbers that contradict each other carry none."""
    wrong = {summary.run.name: len(summary.contradictions) for summary in summaries if summary.contradictions}
    if not wrong:
        return None
    told = " and ".join(f"{count} checks of {name} failed" for name, count in wrong.items())
    return f"{told}: its numbers contradict each other, and no verdict is given on them"


def _label(mine: Side, other: Side) -> str:
    return mine.target if mine.run is other.run else f"{mine.target} of {mine.run.name}"


def _prompts(kept: Sequence[Pair], base: Run) -> dict[str, tuple[int, int]]:
    return {pair.workload: (len(pair.first[0].records), base.prompts[pair.workload]) for pair in kept}


def _partnerless(sides: tuple[Side, Side]) -> Iterator[Missing]:
    for mine, other in (sides, sides[::-1]):
        for key in mine.cells:
            if key not in other.cells:
                yield Missing(None, *key, why=f"{NO_PARTNER}: in the {'base' if mine is sides[0] else 'new'} only")


def _twins(kept: Sequence[Pair]) -> dict[str, tuple[int, int]]:
    """Return by workload how many prompts there are, and how many different ones, where these are fewer."""
    cells = {pair.workload: pair.first[0] for pair in kept}
    counted = {
        workload: (len(set(conversations(cell.records))), len(set(evidence.names(cell))))
        for workload, cell in cells.items()
    }
    return {workload: (asked, different) for workload, (asked, different) in counted.items() if different < asked}


def _same_workloads(run: Run, compared: Collection[str | None]) -> list[list[str]]:
    """Return the names of workloads that models see as the same token ids."""
    names: dict[str, list[str]] = {}
    for facts in run.info["definition"]["workloads"]:
        if facts["name"] in compared:
            names.setdefault(str(facts.get("tokens_sha256")), []).append(facts["name"])
    return [several for several in names.values() if len(several) > 1]


def _served(run: Run) -> bool:
    return bool(run.info["definition"]["engine"] == VLLM)


def _measured_once(row: Row) -> bool:
    """Whether a row is of speeds that were measured once, one request at a time: several have no interval then."""
    return row.quantity == SPEED and row.concurrency == 1 and row.repeats == 1


def _notes(rows: Sequence[Row], kept: Sequence[Pair], summaries: Sequence[Summary]) -> Iterator[str]:
    for summary in summaries:
        cells = summary.run.cells
        if not summary.run.finished:
            yield f"Not complete: {summary.run.name} has {sum(c.finished for c in cells)} of {len(cells)} cells so far."
    for workload, count in summaries[0].conversations.items():
        if any(row.workload == workload for row in rows):
            yield (
                f"{workload} has conversations ({count}), each drawn with all of its turns. Later turns are sent "
                "behind the arm's own answers: where these differ, the two sides were not asked the same."
            )
    for workload, (asked, different) in _twins(kept).items():
        yield (
            f"{workload} says the same thing more than once: {asked} prompts, of which {different} differ. Those that "
            "say the same are drawn together, as one."
        )
    for names in _same_workloads(summaries[0].run, {row.workload for row in rows}):
        yield (
            f"{' and '.join(names)} are the same prompts under several names: the mean over workloads takes them for "
            "different ones, and its interval is too narrow."
        )
    if constant := [row.where for row in rows if row.change.constant]:
        more = f", and {len(constant) - 1} more of {len(rows)} rows" if len(constant) > 1 else ""
        yield (
            f"Without any spread: {constant[0]}{more}. All of these prompts (or repeats) agree, and the interval has "
            "no width; that is no promise for others."
        )
    if any(row.prompts < ENOUGH and (row.quantity != SPEED or row.concurrency == 1) for row in rows):
        yield f"With fewer than {ENOUGH} prompts nothing is decided: so few are no sample of what people ask."
    if len(summaries) == 2 and any(row.quantity == SPEED and row.concurrency == 1 for row in rows):
        yield "Two runs were measured at two times: what changed in between is in no interval of tokens per second."
    if _served(summaries[0].run) and any(map(_measured_once, rows)):
        yield f"{MEASURED_ONCE} of tokens per second, and nothing is decided by them. {TAKE_TURNS}"
