"""The table of lm-eval's tasks, for a terminal of 80 columns."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxq.analysis.tasks import TaskScore
from mxq.report.speed_tables import empty_table, quoted
from mxq.report.whole import print_whole
from mxq.stats import ENOUGH

_BETTER = {True: "higher", False: "lower", None: "-"}


def show_tasks(scores: Sequence[TaskScore], console: Console) -> None:
    """Print the table and its notes; nothing where no task was asked."""
    if not scores:
        return
    console.print(Text("lm-eval's tasks, asked of plain decoding (below: lm-eval's standard error)", style="bold"))
    print_whole(console, task_table(scores))
    console.print()
    for note in _notes(scores):
        console.print(quoted(note))


def task_table(scores: Sequence[TaskScore]) -> Table:
    """Return scores by task and target, and what changed; the tasks of a group are in JSON only."""
    table = empty_table()
    table.add_column("task", overflow="fold")
    table.add_column("score", overflow="fold")
    table.add_column("better")
    roles = list(dict.fromkeys(role for score in scores for role in score.scores))
    for role in (*roles, "mxfp4 - bf16"):
        table.add_column(role, justify="right", no_wrap=True)
    table.add_column("samples", justify="right")
    for score in scores:
        if score.part_of is None:
            cells = [_score(score, role) for role in roles]
            samples = max((one.samples for one in score.scores.values()), default=0)
            better = _BETTER[score.higher_is_better]
            table.add_row(score.task, score.metric, better, *cells, _change(score), f"{samples}")
    return table


def _score(score: TaskScore, role: str) -> str:
    if (found := score.scores.get(role)) is None:
        return "-"
    return f"{found.value:.4f}\n{'-' if found.stderr is None else f'{found.stderr:.4f}'}"


def _change(score: TaskScore) -> str:
    if (change := score.change) is None:
        return score.why_not
    ends = f"{change.lower:+.4f} to {change.upper:+.4f}" if change.bounded else "no interval"
    return f"{change.estimate:+.4f}\n{ends}"


def _notes(scores: Sequence[TaskScore]) -> list[str]:
    changes = [score.change for score in scores if score.change is not None and score.part_of is None]
    if not changes:
        return []
    notes = ["95% intervals of changes: bootstrap over samples, both targets' answers to a sample drawn together."]
    if any(change.constant for change in changes):
        notes.append("An interval of no width says that no sample scored otherwise, not that none would.")
    if any(change.prompts < ENOUGH for change in changes):
        notes.append(f"Fewer than {ENOUGH} samples say little of others.")
    return notes
