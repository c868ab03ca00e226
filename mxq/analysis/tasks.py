"""What a run holds of lm-eval's tasks: each target's score with lm-eval's own standard error, and the paired change.

Targets are given the same samples, so a change is that of each sample, and its interval is over samples drawn for both
together. There is one where a score is the mean of what its samples score (accuracy, exact match), which is checked;
none for perplexities, F1 and whatever else is no mean.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mxq import files
from mxq.errors import MxqError
from mxq.evaluate import Run
from mxq.evaluate.derived import read_derived
from mxq.evaluate.tasks import DIRECTORY, FORMAT
from mxq.stats import Interval, mean_change

_REMOVE = "remove its directory, and the same `mxq eval --lm-eval` asks it again"
_SAME = 1e-9

Samples = Mapping[tuple[str, Any], tuple[Any, float]]
"""By task and number: what was asked, and what the answer scored."""


@dataclass(frozen=True)
class Score:
    """What lm-eval gives one target: ``stderr`` is None where it gives none."""

    value: float
    stderr: float | None
    samples: int


@dataclass(frozen=True)
class TaskScore:
    """One score of one task or group.

    Attributes:
        task: its name.
        group: it is one of tasks, which have rows of their own unless the group hides them.
        part_of: the group that it was asked as a part of; None for what was asked by its own name.
        metric: as lm-eval calls it, and its filter unless that is "none".
        higher_is_better: None where lm-eval does not say.
        scores: by target.
        change: mxfp4 - bf16, with an interval over samples; None where ``why_not`` says why.
        why_not: "" where there is a change.
    """

    task: str
    group: bool
    part_of: str | None
    metric: str
    higher_is_better: bool | None
    scores: Mapping[str, Score]
    change: Interval | None
    why_not: str

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"change": None if self.change is None else self.change.as_json()}


@dataclass(frozen=True)
class _Result:
    """A file of results, with its samples."""

    said: Mapping[str, Any]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]


def task_scores(run: Run) -> tuple[TaskScore, ...]:
    """Return the scores that a run directory holds, in the order of names; () where no task was asked.

    Raises MxqError for a file that is damaged or another run's.
    """
    targets = {role: model["fingerprint"] for role, model in run.info["definition"]["targets"].items()}
    found: dict[str, dict[str, _Result]] = {}
    for role in targets:
        for path in sorted((run.path / DIRECTORY / role).glob("*/results.json")):
            task, result = _read(path, targets[role])
            found.setdefault(task, {})[role] = result
    return tuple(score for _, results in sorted(found.items()) for score in _scores(results))


def _read(path: Path, fingerprint: Mapping[str, Any]) -> tuple[str, _Result]:
    value = read_derived(path, FORMAT, _REMOVE)
    try:
        task, said = str(value["definition"]["task"]), value["lm_eval"]
        if value["definition"]["target"] != fingerprint:
            raise MxqError(f"{path} is of another target than its run", _REMOVE)
        samples = {}
        for name, sealed in value["samples"].items():
            lines = path.parent / Path(sealed["file"]).name
            if not lines.is_file() or files.sha256_file(lines) != sealed["sha256"]:
                raise MxqError(f"{lines} is not what lm-eval's results are of", _REMOVE)
            samples[name] = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        if not all(isinstance(metrics, dict) for metrics in said["results"].values()):
            raise TypeError("results that are none")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MxqError(f"{path} is not what lm-eval gives ({error!r})", _REMOVE) from None
    return task, _Result(said, samples)


def _scores(results: Mapping[str, _Result]) -> Iterator[TaskScore]:
    """Yield every score of what was asked by one name."""
    first = next(iter(results.values())).said
    children = {group: names for group, names in first.get("group_subtasks", {}).items() if names}
    parents = {child: group for group, names in children.items() for child in names}
    for task, metrics in first["results"].items():
        for key in metrics:
            name, _, chosen = key.partition(",")
            if not chosen or name.endswith("_stderr"):
                continue
            leaves = tuple(_leaves(task, children))
            better = first.get("higher_is_better", {}).get(task, {})
            scores = {role: score for role, r in results.items() if (score := _score(r, task, key, leaves)) is not None}
            change, why_not = _change(results, scores, key, leaves)
            metric = name if chosen == "none" else f"{name}, {chosen}"
            is_better = better.get(name) if isinstance(better, dict) else None
            yield TaskScore(task, task in children, parents.get(task), metric, is_better, scores, change, why_not)


def _leaves(task: str, children: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for child in children.get(task, ()):
        yield from _leaves(child, children)
    if task not in children:
        yield task


def _score(result: _Result, task: str, key: str, leaves: Sequence[str]) -> Score | None:
    name, _, chosen = key.partition(",")
    metrics = result.said["results"].get(task, {})
    value, error = metrics.get(key), metrics.get(f"{name}_stderr,{chosen}")
    if not _is_number(value):
        return None
    count = len(_asked(result, key, leaves))
    return Score(float(value), float(error) if _is_number(error) else None, count)


def _asked(result: _Result, key: str, leaves: Sequence[str]) -> Samples:
    """Return the samples of a score, with NaN where one has no score that is a number."""
    name, _, chosen = key.partition(",")
    found = {}
    for leaf in leaves:
        for sample in result.samples.get(leaf, ()):
            if sample.get("filter") == chosen:
                what = tuple(sample.get(f"{part}_hash") for part in ("doc", "prompt", "target"))
                score = sample.get(name)
                found[leaf, sample.get("doc_id")] = what, float(score) if _is_number(score) else math.nan
    return found


def _change(
    results: Mapping[str, _Result], scores: Mapping[str, Score], key: str, leaves: Sequence[str]
) -> tuple[Interval | None, str]:
    if not scores.keys() >= {"bf16", "mxfp4"}:
        return None, "one target"
    if results["bf16"].said.get("configs") != results["mxfp4"].said.get("configs"):
        return None, "the task was another one"
    base, new = (_asked(results[role], key, leaves) for role in ("bf16", "mxfp4"))
    if {at: what for at, (what, _) in base.items()} != {at: what for at, (what, _) in new.items()}:
        return None, "the samples were others"
    for role, samples in (("bf16", base), ("mxfp4", new)):
        values = [score for _, score in samples.values()]
        if not values or not abs(math.fsum(values) / len(values) - scores[role].value) <= _SAME:
            return None, "no mean of its samples"
    return mean_change([base[at][1] for at in base], [new[at][1] for at in base]), ""


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
