"""Checks of a run: each cell's own, again from its directory, and what must hold between cells.

Between cells: every arm got the same prompts; a repeat gives the same greedy answers; speculation changes no greedy
answer but at near-ties; and the acceptance length is that of one request at a time, however many are in flight. Known
defects of engines break each of them without an error.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxq.analysis import evidence
from mxq.engines import Sampling
from mxq.evaluate import Arm, Record, RecordedCell, Run
from mxq.evaluate.checks import Check, check_cell
from mxq.stats import ENOUGH, Resampling, length_difference

NEAR_TIE = 1.0
"""Two tokens are a near-tie if neither is more than e times as likely: the largest gap that bfloat16 explains."""

_RESAMPLING = Resampling(confidence=0.999)
"""There is such a check for every arm and workload: at 95 % one in twenty would be an alarm for nothing."""


@dataclass(frozen=True)
class RunCheck:
    """A check and where it was made; ``arm`` is a label, and None where it is about all arms."""

    arm: str | None
    workload: str
    concurrency: int
    repeat: int
    check: Check

    @property
    def where(self) -> str:
        """Return it in words."""
        at = f"concurrency {self.concurrency}" + (f", repeat {self.repeat}" if self.repeat else "")
        return f"{self.arm or 'all arms'} on {self.workload}, {at}"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        place = {"arm": self.arm, "workload": self.workload, "concurrency": self.concurrency, "repeat": self.repeat}
        return place | {"name": self.check.name, "ok": self.check.ok, "detail": self.check.detail}


def check_run(run: Run, cells: Sequence[RecordedCell]) -> list[RunCheck]:
    """Make every check that ``cells`` allow: those of a run that have records, cut to common prompts."""
    definition = run.info["definition"]
    greedy = Sampling(**definition["sampling"]).greedy
    found = [_at(cell, check) for cell in cells for check in _of_cell(cell)]
    by_place = {(cell.arm, cell.workload, cell.concurrency, cell.repeat): cell for cell in cells}
    found += _same_prompts(cells)
    for cell in cells:
        plain = next(filter(None, (by_place.get((*place, cell.repeat)) for place in plain_places(cell))), None)
        if greedy and cell.repeat and (first := by_place.get((cell.arm, cell.workload, cell.concurrency, 0))):
            found.append(_at(cell, _repeats(first, cell)))
        if greedy and cell.arm.method != "ar" and plain:
            found.append(_at(cell, _identity(cell, plain, definition["dtype"])))
    found += [_at(*pair) for pair in _concurrencies(cells)]
    return found


def plain_places(cell: RecordedCell) -> list[tuple[Arm, str, int]]:
    """Return where the plain answers of a cell's target are: one at a time, else with as many others in flight."""
    return [(Arm(cell.arm.target, "ar"), cell.workload, concurrency) for concurrency in (1, cell.concurrency)]


def _at(cell: RecordedCell, check: Check) -> RunCheck:
    return RunCheck(cell.arm.label, cell.workload, cell.concurrency, cell.repeat, check)


def _of_cell(cell: RecordedCell) -> Iterable[Check]:
    """Check a cell again; what was found when it was measured stays found."""
    facts = cell.facts if cell.finished else {}
    made = {
        check.name: check
        for check in check_cell(cell.records, cell.arm.num_speculative_tokens, cell.concurrency, facts)
    }
    for kept in facts.get("checks") or ():
        if not isinstance(kept["ok"], bool | None) or not all(isinstance(kept[key], str) for key in ("name", "detail")):
            raise TypeError("a check without a result")
        if kept["name"] not in made or kept["ok"] is False:
            made[kept["name"]] = Check(kept["name"], kept["ok"], kept["detail"])
    return made.values()


def _same_prompts(cells: Sequence[RecordedCell]) -> Iterator[RunCheck]:
    """Check that cells of one workload were asked the same; later turns of conversations depend on answers."""
    by_workload: dict[str, list[RecordedCell]] = {}
    for cell in cells:
        by_workload.setdefault(cell.workload, []).append(cell)
    for workload, several in by_workload.items():
        asked = {_asked(cell.records) for cell in several}
        detail = f"{len(several[0].records)} prompts in {len(several)} cells"
        first = several[0]
        ok = len(asked) == 1
        check = Check("same prompts", ok, detail if ok else f"{len(asked)} different lists in {len(several)} cells")
        yield RunCheck(None, workload, first.concurrency, first.repeat, check)


def _asked(records: Sequence[Record]) -> tuple[tuple[str, int | None], ...]:
    return tuple((r.prompt_id, r.prompt_tokens if r.turn == 1 else None) for r in records)


def alike(first: RecordedCell, second: RecordedCell) -> list[tuple[Record, Record]]:
    """Return answers to the same: later turns count where earlier answers were the same."""
    pairs = zip(first.records, second.records, strict=False)
    return [(a, b) for a, b in pairs if a.prompt_sha256 == b.prompt_sha256]


def _repeats(first: RecordedCell, later: RecordedCell) -> Check:
    """Compare answers with those of the first repeat; side by side, who shares a batch with whom decides near-ties."""
    pairs = alike(first, later)
    same = sum(a.token_ids == b.token_ids for a, b in pairs)
    ok = True if same == len(pairs) else False if first.concurrency == 1 else None
    return Check("repeats give the same answers", ok, f"{same} of {len(pairs)} are the first repeat's")


def _identity(cell: RecordedCell, plain: RecordedCell, dtype: str) -> Check:
    """Compare with plain decoding; a difference is what the engine says of the two tokens where it begins."""
    pairs = alike(cell, plain)
    differing = [a for a, b in pairs if a.token_ids != b.token_ids]
    name, detail = "greedy answers are those of plain decoding", f"{len(pairs) - len(differing)} of {len(pairs)}"
    if not differing:
        return Check(name, True, detail)
    if dtype == "float32" and cell.arm.target == "bf16":
        return Check(name, False, f"{detail}: in float32 a difference is a defect of the decoding")
    ties = cell.facts.get("near_ties")
    if ties is None:
        return Check(name, None, f"{detail}; nothing tells whether the others part at near-ties")
    near = {tie["prompt_id"] for tie in ties if tie["both_on_top"] and tie["gap"] <= NEAR_TIE}
    far = [record.prompt_id for record in differing if record.prompt_id not in near]
    if not far:
        return Check(name, True, f"{detail}, and {len(differing)} part at near-ties")
    said = f"{detail}; {len(far)} part where it is no near-tie, such as {far[0]}"
    if cell.arm.target != "bf16":
        # Rounding an activation to another code moves logits by far more than bfloat16 does.
        return Check(name, None, f"{said}, which rounding of MXFP4 activations can do")
    return Check(name, False, said)


def _concurrencies(cells: Sequence[RecordedCell]) -> Iterator[tuple[RecordedCell, Check]]:
    """Compare acceptance at the highest concurrency with that at the lowest, by prompt."""
    several: dict[tuple[Arm, str], list[RecordedCell]] = {}
    for cell in cells:
        if cell.arm.method != "ar" and cell.repeat == 0:
            several.setdefault((cell.arm, cell.workload), []).append(cell)
    for found in several.values():
        lowest, highest = min(found, key=lambda c: c.concurrency), max(found, key=lambda c: c.concurrency)
        if lowest is not highest:
            yield highest, _same_length(lowest, highest)


def _same_length(lowest: RecordedCell, highest: RecordedCell) -> Check:
    name = f"acceptance length is that at concurrency {lowest.concurrency}"
    first, second = evidence.counts(lowest), evidence.counts(highest)
    if not first or not second:
        return Check(name, None, "the passes of single answers are not known")
    if first.conversations != second.conversations:
        return Check(name, None, "the prompts are not the same")
    difference = length_difference(first, second, _RESAMPLING)
    if difference is None:
        return Check(name, None, "there are no verify passes")
    lengths = [1 + counts.accepted.sum() / counts.passes.sum() for counts in (second, first)]
    detail = (
        f"{lengths[0]:.3f} and {lengths[1]:.3f}: {difference.estimate:+.3f}, "
        f"{_RESAMPLING.confidence:.1%} interval {difference.lower:+.3f} to {difference.upper:+.3f} over prompts"
    )
    if difference.prompts < ENOUGH:
        return Check(name, None, f"{detail}; {difference.prompts} prompts are too few to tell")
    return Check(name, difference.holds(0.0), detail)


def failed(checks: Iterable[RunCheck]) -> list[RunCheck]:
    """Return those that found something wrong."""
    return [made for made in checks if made.check.failed]


def tally(checks: Iterable[RunCheck]) -> Mapping[str, tuple[int, int, int]]:
    """Return by name how many checks passed, failed, and could not be made."""
    counts: dict[str, list[int]] = {}
    for made in checks:
        row = counts.setdefault(made.check.name, [0, 0, 0])
        row[{True: 0, False: 1, None: 2}[made.check.ok]] += 1
    return {name: (passed, wrong, unknown) for name, (passed, wrong, unknown) in counts.items()}
