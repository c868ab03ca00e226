"""The fastest method and budget: by workload and requests in flight, and of all workloads together.

Configurations of one target are compared by tokens per second of the same prompts. One is called faster than another
where the interval of its advantage lies above 0; those that the fastest is not shown to beat are ties, and of ties the
smallest budget is recommended: it costs the least where more requests come than were measured. Each interval stands for
itself. Over workloads, advantages are the mean of their logarithms, workloads weighing alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mxq.analysis import evidence
from mxq.analysis.common import cut
from mxq.analysis.speed import Repeats, rate, withheld
from mxq.errors import UsageError
from mxq.evaluate import Run
from mxq.evaluate.matrix import VLLM
from mxq.stats import (
    Interval,
    Resampling,
    Timed,
    all_alike,
    over_repeats,
    repeats_change,
    throughput_change,
    throughput_interval,
)


@dataclass(frozen=True)
class Choice:
    """The fastest configuration of a target at some requests in flight; ``workload`` is None for all alike.

    ``tokens_per_s`` is of the fastest (of all workloads the geometric mean, without ends); ``over_runner_up`` and
    ``over_plain`` are its relative advantages, None where there is nothing to compare with, unbounded where one repeat
    gives no interval. ``ties`` are the configurations that it is not shown to beat, fastest first, itself among them;
    ``recommended`` is one of these, and ``recommended_over_plain`` its own advantage, None for plain decoding itself.
    """

    target: str
    workload: str | None
    concurrency: int
    fastest: str
    tokens_per_s: Interval
    runner_up: str | None
    over_runner_up: Interval | None
    over_plain: Interval | None
    ties: tuple[str, ...]
    recommended: str
    recommended_over_plain: Interval | None

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        intervals = ("tokens_per_s", "over_runner_up", "over_plain", "recommended_over_plain")
        found = {name: value.as_json() if (value := getattr(self, name)) else None for name in intervals}
        return {**vars(self), **found, "ties": list(self.ties)}


@dataclass(frozen=True)
class Sweep:
    """``choices`` by target, concurrency, and then workload with all of them last; ``withheld`` says why by target.

    ``once`` says that servers measured arms once, one request at a time: intervals over prompts leave a drift out.
    """

    choices: tuple[Choice, ...]
    withheld: dict[str, str]
    once: bool

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values; numbers are not rounded."""
        choices = [choice.as_json() for choice in self.choices]
        return {"choices": choices, "withheld": self.withheld, "measured_once": self.once}


@dataclass(frozen=True)
class _Speed:
    """How fast a configuration was on a workload: by prompt with one request in flight, by repeat with several."""

    interval: Interval
    timed: Timed | None
    rates: tuple[float, ...]


def sweep(run: Run, resampling: Resampling, workloads: Sequence[str] = ()) -> Sweep:
    """Find the fastest configurations of a run; raises UsageError where no arm has a speculative one to compare."""
    groups: dict[tuple[str, int], dict[str, dict[str, Repeats]]] = {}
    reasons: dict[str, str] = {}
    for (arm, workload, concurrency), repeats in cut(run)[0].items():
        if workloads and workload not in workloads:
            continue
        if (why := withheld(run, repeats)) is not None:
            reasons[arm.target] = why
        else:
            by_workload = groups.setdefault((arm.target, concurrency), {})
            by_workload.setdefault(workload, {})[arm.configuration] = repeats
    choices: list[Choice] = []
    for (target, concurrency), by_workload in sorted(groups.items()):
        measured = {
            workload: speeds
            for workload, cells in by_workload.items()
            if len(speeds := _measured(cells, concurrency, resampling)) > 1
        }
        for workload, speeds in measured.items():
            one = {configuration: [speed] for configuration, speed in speeds.items()}
            choices.append(_choice(target, workload, concurrency, one, resampling))
        everywhere = [name for name in _names(run, target) if all(name in speeds for speeds in measured.values())]
        if len(measured) > 1 and len(everywhere) > 1:
            several = {name: [speeds[name] for speeds in measured.values()] for name in everywhere}
            choices.append(_choice(target, None, concurrency, several, resampling))
    if not choices and not reasons:
        raise UsageError(
            f"{run.name} has one arm of each target: nothing to choose from", "measure more with --spec, -k"
        )
    served = run.info["definition"]["engine"] == VLLM
    once = any(
        at == 1 and len(repeats) == 1
        for (_, at), by_workload in groups.items()
        for cells in by_workload.values()
        for repeats in cells.values()
    )
    return Sweep(tuple(choices), reasons, served and once)


def _names(run: Run, target: str) -> list[str]:
    return list(dict.fromkeys(arm.configuration for arm in run.arms if arm.target == target))


def _measured(cells: dict[str, Repeats], concurrency: int, resampling: Resampling) -> dict[str, _Speed]:
    common = sorted(set.intersection(*(set(repeats) for repeats in cells.values())))
    found: dict[str, _Speed] = {}
    for name, repeats in cells.items() if common else ():
        if concurrency == 1:
            timed = evidence.times(repeats[repeat] for repeat in common)
            found[name] = _Speed(throughput_interval(timed, resampling), timed, ())
        else:
            rates = tuple(rate(repeats[repeat]) for repeat in common)
            found[name] = _Speed(over_repeats(rates, resampling), None, rates)
    return found


def _choice(
    target: str, workload: str | None, concurrency: int, speeds: dict[str, list[_Speed]], resampling: Resampling
) -> Choice:
    means = {name: _geometric([speed.interval.estimate for speed in several]) for name, several in speeds.items()}
    ordered = sorted(speeds, key=lambda name: -means[name])
    fastest = ordered[0]
    over = {name: _advantage(speeds[fastest], speeds[name], resampling) for name in ordered[1:]}
    # Without intervals nothing is a tie: the estimates are all there is.
    ties = (fastest, *(name for name, advantage in over.items() if advantage.bounded and advantage.lower <= 0))
    alone = speeds[fastest][0].interval
    prompts = sum(speed.interval.prompts for speed in speeds[fastest])
    recommended = min(ties, key=lambda name: (budget(name), -means[name]))
    own = recommended != "ar" and "ar" in speeds
    return Choice(
        target=target,
        workload=workload,
        concurrency=concurrency,
        fastest=fastest,
        tokens_per_s=alone if workload is not None else Interval(means[fastest], -math.inf, math.inf, prompts),
        runner_up=ordered[1],
        over_runner_up=over[ordered[1]],
        over_plain=over.get("ar"),
        ties=ties,
        recommended=recommended,
        recommended_over_plain=_advantage(speeds[recommended], speeds["ar"], resampling) if own else None,
    )


def _advantage(fast: Sequence[_Speed], slow: Sequence[_Speed], resampling: Resampling) -> Interval:
    """Return the relative advantage in tokens per second, of one workload or of several alike."""
    changes = [
        throughput_change(other.timed, mine.timed, resampling)
        for mine, other in zip(fast, slow, strict=True)
        if mine.timed and other.timed
    ]
    if changes:
        return changes[0] if len(changes) == 1 else all_alike(changes, resampling)
    mine, other = (
        [_geometric(rates) for rates in zip(*(s.rates for s in side), strict=False)] for side in (fast, slow)
    )
    return repeats_change(other, mine, resampling)


def budget(configuration: str) -> int:
    """Return the budget in a configuration's name, 0 for plain decoding."""
    return int(configuration.rpartition("-")[2]) if "-" in configuration else 0


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
