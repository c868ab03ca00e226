"""The published acceptance lengths beside those of a run, where model, workload, method and budget are the same.

What was not published is not there: no cell is filled in from another one. Where the run was made otherwise than the
published measurements, as far as these say how they were made, that is told with the numbers.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mxq.analysis import evidence
from mxq.analysis.common import cut
from mxq.analysis.summary import counted
from mxq.errors import MxqError
from mxq.evaluate import RecordedCell, Run
from mxq.stats import Interval, Resampling, acceptance_intervals
from mxq.workloads import PUBLISHED

FILE = Path(__file__).with_name("published.json")
"""The tables as data, with their source."""

# Of the published models' config.json: what tells them apart from every other Qwen3.5 model.
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3.5-27B": {"hidden_size": 5120, "num_hidden_layers": 64, "num_experts": None, "vocab_size": 248320},
    "Qwen3.5-35B-A3B": {"hidden_size": 2048, "num_hidden_layers": 40, "num_experts": 256, "vocab_size": 248320},
}


@dataclass(frozen=True)
class PublishedRow:
    """A cell of a run beside the published one: pooled acceptance lengths, in tokens per verify pass.

    ``run`` has its interval where passes of single requests are known, else no ends. ``published`` is None for what was
    not published; then ``difference`` (run - published) and ``inside`` are None, and ``inside`` also without interval.
    """

    workload: str
    configuration: str
    target: str
    prompts: int
    run: Interval
    published: float | None

    @property
    def difference(self) -> float | None:
        """Return by how much the run's length is larger."""
        return None if self.published is None else self.run.estimate - self.published

    @property
    def inside(self) -> bool | None:
        """Whether the published number is in the run's interval."""
        return None if self.published is None or not self.run.bounded else self.run.holds(self.published)


@dataclass(frozen=True)
class Beside:
    """A run beside the published tables. ``model`` is None, and there are no rows, if they have no such model.

    ``matched`` says by what the model was found, or what the run's model is instead; ``unlike`` in what else the run
    differs from the published measurements.
    """

    model: str | None
    matched: str
    source: str
    rows: tuple[PublishedRow, ...]
    unlike: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values; numbers are not rounded."""
        rows = [
            {**asdict(row), "run": row.run.as_json(), "difference": row.difference, "inside": row.inside}
            for row in self.rows
        ]
        return {"model": self.model, "matched": self.matched, "source": self.source, "rows": rows} | {
            "unlike": list(self.unlike)
        }


def beside(run: Run, resampling: Resampling, workloads: Collection[str] = ()) -> Beside:
    """Set a run, or only some workloads of it, beside the published tables.

    Raises MxqError where the run has no results yet, or is damaged.
    """
    tables: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    try:
        return _beside(run, tables, resampling, workloads)
    except (KeyError, TypeError, AttributeError) as error:
        raise MxqError(f"{run.name}: run.json does not describe its run ({error!r})", "start a new run") from None


def _beside(run: Run, tables: dict[str, Any], resampling: Resampling, workloads: Collection[str]) -> Beside:
    model, matched = _model(run)
    if model is None:
        return Beside(None, matched, tables["source"], (), ())
    cells, _ = cut(run)
    lowest = min(concurrency for _, _, concurrency in cells)
    rows = []
    for (arm, workload, concurrency), repeats in cells.items():
        cell = repeats[min(repeats)]
        if arm.method == "ar" or concurrency != lowest or (workloads and workload not in workloads):
            continue
        if (length := _length(cell, resampling)) is None:
            continue
        number = _published(tables, model, arm.target, arm.configuration, workload)
        rows.append(PublishedRow(workload, arm.configuration, arm.target, len(cell.records), length, number))
    return Beside(model, matched, tables["source"], tuple(rows), tuple(_unlike(run, tables, lowest)))


def _model(run: Run) -> tuple[str | None, str]:
    """Return the published model that a run's targets are, and by what that is known."""
    shape, specs = run.info.get("architecture"), [told["spec"] for told in run.info["definition"]["targets"].values()]
    if isinstance(shape, Mapping) and shape:
        for name, known in _ARCHITECTURES.items():
            if all(shape.get(key) == value for key, value in known.items()):
                return name, "by the dimensions in its config.json"
        dimensions = ", ".join(f"{key} {shape.get(key)}" for key in next(iter(_ARCHITECTURES.values())))
        return None, f"the run's model is {', '.join(specs)} ({dimensions}); published are {', '.join(_ARCHITECTURES)}"
    for name in sorted(_ARCHITECTURES, key=len, reverse=True):
        # A run that was recorded before dimensions were: hub ids and directories begin with the model's name.
        if specs and all(Path(spec.partition("@")[0]).name.startswith(name) for spec in specs):
            return name, f"by its name alone, {', '.join(specs)}"
    return None, f"the run's model is {', '.join(specs)}; published are {', '.join(_ARCHITECTURES)}"


def _length(cell: RecordedCell, resampling: Resampling) -> Interval | None:
    """Return the pooled acceptance length; without ends where only the server's counters are known."""
    if (counts := evidence.counts(cell)) is not None:
        found = acceptance_intervals(counts, resampling)
        return found.pooled if found else None
    said = counted(cell)
    return Interval(said.pooled, -math.inf, math.inf, 0) if said else None


def _published(tables: Mapping[str, Any], model: str, target: str, configuration: str, workload: str) -> float | None:
    """Return a published acceptance length, None where there is none."""
    if workload not in tables["workloads"]:
        return None
    if target == "bf16":
        method, _, budget = configuration.partition("-")
        lengths = tables["acceptance_bf16"][model].get(method, {}).get(budget)
    else:
        lengths = tables["acceptance_mxfp4_dflash15"][model] if configuration == "dflash-15" else None
    return None if lengths is None else float(lengths[tables["workloads"].index(workload)])


def _unlike(run: Run, tables: Mapping[str, Any], concurrency: int) -> Iterator[str]:
    """Yield how a run was made otherwise than the published measurements, or what these do not say."""
    settings, around = run.info["definition"], tables["environment"]
    yield f"thinking is {'on' if settings['thinking'] else 'off'} in the run; the publication does not say"
    if settings["max_tokens"] != around["max_tokens"]:
        yield f"answers have at most {settings['max_tokens']} tokens in the run, {around['max_tokens']} as published"
    if settings["sampling"]["temperature"] != 0:
        yield f"temperature is {settings['sampling']['temperature']} in the run; the published client's is 0"
    if concurrency != 1:
        yield f"{concurrency} requests in flight in the run, one as published"
    sources = run.info.get("sources", {})
    for facts in settings["workloads"]:
        name = facts["name"]
        if name in PUBLISHED and sources.get(name, {}).get("dataset") != PUBLISHED[name].dataset:
            yield f"{name} is not known to be {PUBLISHED[name].dataset}: prompts of the run came from elsewhere"
        elif name in PUBLISHED and facts["prompts"] != around["num_prompts"]:
            yield f"{name} has {facts['prompts']} requests in the run, {around['num_prompts']} as published"
        if name in PUBLISHED and "conversations" in facts:
            yield f"{name} has all turns in the run; the published client sends the first"
    engine = run.info.get("environment", {}).get("engine", {})
    here = " ".join(str(part) for part in (settings["engine"], engine.get("version")) if part)
    machine = engine.get("device_name") or engine.get("hardware") or settings["device"]
    yield f"{here} on {machine} in the run, vllm {around['vllm']} on {around['gpu']} as published"
