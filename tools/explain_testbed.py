#!/usr/bin/env python3
"""Explain what MXFP4 changes of the testbed's acceptance, and write benchmarks/WHY.md.

    nice python tools/explain_testbed.py

Converts each target, lets the bf16 target answer the first prompts of each workload plainly, and explains MTP and
DFlash drafting on these answers: what `mxq eval --explain` does after measuring, without measuring. Stopped, it goes on
where it was when given the same --work directory; --report only writes the page of what is there.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are too small for more

from mxq import files, testbed
from mxq.cli import main as mxq
from mxq.evaluate import Request, read_run
from mxq.evaluate.after import Both
from mxq.evaluate.directory import open_run
from mxq.evaluate.inprocess import prepared
from mxq.evaluate.runner import environment
from mxq.explain import Effects, Explained, Why, read_explanations, why
from mxq.explain.measure import Explaining
from mxq.explain.record import EDGES
from mxq.explain.results import CORNER_NAMES
from mxq.stats import Band, Interval


def main(argv: Sequence[str] | None = None) -> int:
    """Explain the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=list(testbed.NAMES), choices=testbed.NAMES)
    add("--workloads", nargs="+", default=["functions", "chat"])
    add("--prompts", type=int, default=12, help="prompts a workload (default: 12)")
    add("--every", type=int, default=4, help="as --explain-every (default: 4)")
    add("-k", type=int, default=15, help="budget of both methods (default: 15)")
    add("--report", action="store_true", help="explain nothing, write the page of what there is")
    add("--work", type=Path, default=Path("runs/why"), help="where models and runs are kept")
    add("--out", type=Path, default=Path("benchmarks/WHY.md"))
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    found = {name: _explained(name, options) for name in options.models}
    text = "\n".join(_page(found, options, _command(parser, options))) + "\n"
    with files.atomic_write(options.out) as stream:
        stream.write(text)
    print(f"written to {options.out}", file=sys.stderr)
    return 0


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return the command that gives this page again, wherever its files are kept."""
    words = ["python", "tools/explain_testbed.py"]
    for name in ("models", "workloads", "prompts", "every", "k"):
        value = getattr(options, name)
        if value != parser.get_default(name):
            values = value if isinstance(value, list) else [value]
            words += ["-k" if name == "k" else f"--{name}", *map(str, values)]
    return shlex.join(words)


def _explained(name: str, options: argparse.Namespace) -> tuple[Why, float]:
    """Return what came out for one model, and the seconds that explaining took."""
    converted, out = options.work / f"{name}-mxfp4", options.work / name
    if not options.report:
        if not converted.exists():
            mxq(["quantize", f"testbed:{name}", str(converted), "--recipe", "mxfp4"], standalone_mode=False)
        request = Request(
            targets={"bf16": f"testbed:{name}", "mxfp4": str(converted)},
            methods=("mtp", "dflash"),
            budgets=(options.k,),
            workloads=options.workloads,
            limit=options.prompts,
            max_tokens=320,
        )
        plan, template, engine = prepared(request)
        with open_run(out, plan, environment(engine)):
            pass  # a run in which nothing is measured yet
        started = time.perf_counter()
        Explaining(options.every).make(Both(plan, template, out))
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    run = read_run(out)
    explanations = read_explanations(out, run.info["definition"])
    return why(explanations), sum(explanation.made["seconds"] for explanation in explanations)


def _page(found: dict[str, tuple[Why, float]], options: argparse.Namespace, command: str) -> Iterator[str]:
    run = read_run(options.work / options.models[0])
    around = run.info["environment"]
    hardware, versions = around["hardware"], around["versions"]
    resampling = next(iter(found.values()))[0].resampling
    yield from ("# Why MXFP4 changes acceptance: the testbed", "", f"`{command}`", "")
    yield (
        f"In process, greedy, bf16 arithmetic, on {hardware['cpu']}, {hardware['cores']} cores, one thread; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". MXFP4 is the recipe `mxfp4`. Explaining took "
        + ", ".join(f"{seconds:.0f} s for testbed:{name}" for name, (_, seconds) in found.items())
        + ", answers included."
    )
    yield ""
    yield (
        f"The bf16 target answers the first {options.prompts} prompts of each workload. Behind one token of "
        f"{options.every} of each answer, a drafter that has read either target so far drafts {options.k} tokens, and "
        "either target judges. Lengths are over all these places, which are not where the passes of decoding begin. "
        "Changes are in tokens per verify pass: from bf16 for both to MXFP4 for both, and its two parts, which add up "
        "(formulas: `mxq/explain/effects.py`). "
        f"Intervals are at {resampling.confidence:.0%}, by a bootstrap over prompts that draws all corners of a prompt "
        f"together, {resampling.resamples} resamples; each holds for its row alone. All alike: workloads weigh alike."
    )
    yield from ("", "## Which route carries the loss", "", _in_short(found), "", *_plainly(found))
    for name, (told, _) in found.items():
        yield from ("", f"## testbed:{name}", "", *_section(told))


def _in_short(found: dict[str, tuple[Why, float]]) -> str:
    """Return the answer in a paragraph."""
    carriers = [_carrier(effects) for told, _ in found.values() for effects in told.overall.values()]
    losing = {carrier for carrier in carriers if carrier is not None}
    if not losing:
        answer = "No loss is shown over all workloads."
    elif len(losing) == 1 and losing <= {"features", "logits"}:
        answer = (
            f"Wherever acceptance is shown to fall over all workloads, most of the fall goes by the {losing.pop()}."
        )
    else:
        answer = "Which route carries the loss differs, or cannot be told: see each below."
    flips = [part.flips for told, _ in found.values() for part in told.parts]
    shares = _range([flip.share.estimate for flip in flips], "{:.1%}")
    gaps = _range([flip.bf16_gap for flip in flips if flip.bf16_gap is not None], "{:.2f}")
    margins = _range([flip.elsewhere for flip in flips if flip.elsewhere is not None], "{:.1f}")
    return (
        f"{answer} The MXFP4 target would choose otherwise for {shares} of the answers' tokens. There bf16 prefers its "
        f"own choice by {gaps} logits (medians, by model and workload), elsewhere by {margins}. All of this is on the "
        "bf16 target's text: what MXFP4 goes on to say once it has parted from that is no part of it."
    )


def _range(values: Sequence[float], form: str) -> str:
    """Return the smallest and the largest of values, - of none."""
    ends = [form.format(value) for value in (min(values), max(values))] if values else ["-"]
    return " to ".join(dict.fromkeys(ends))


def _plainly(found: dict[str, tuple[Why, float]]) -> Iterator[str]:
    sentences: dict[str, list[str]] = {}
    for name, (told, _) in found.items():
        for configuration, effects in told.overall.items():
            parts = [part for part in told.parts if part.configuration == configuration]
            bf16 = sum(part.lengths[0].estimate for part in parts) / len(parts)
            sentences.setdefault(configuration, []).append(f"testbed:{name} {_sentence(effects, bf16)}")
    for configuration, of_models in sentences.items():
        yield f"* **{configuration}**: {'; '.join(of_models)}."


def _sentence(effects: Effects, bf16: float) -> str:
    change = f"changes by {_plain(effects.total)}, {effects.total.estimate / bf16:+.1%} of {bf16:.2f}"
    parts = f"{_plain(effects.features)} by features and {_plain(effects.logits)} by logits"
    if effects.total.upper >= 0:
        return f"shows no loss: it {change} ({parts})"
    name = "features" if effects.features.estimate < effects.logits.estimate else "logits"
    share = getattr(effects, name).estimate / effects.total.estimate
    if _carrier(effects) == name:
        verdict = f"**most of it goes by the {name}** ({share:.0%})"
    else:
        verdict = f"the {name} have the larger part ({share:.0%}), but the intervals of the two overlap"
    return f"{change}; {verdict}: {parts}"


def _carrier(effects: Effects) -> str | None:
    """Return the route that has most of a loss, "" where the intervals of the two overlap, None without a loss."""
    if effects.total.upper >= 0:
        return None
    if effects.features.upper < effects.logits.lower:
        return "features"
    return "logits" if effects.logits.upper < effects.features.lower else ""


def _section(told: Why) -> Iterator[str]:
    corners = [f"{features} features, {logits} logits" for features, logits in CORNER_NAMES]
    effects = ["change", "by features", "by logits", "interaction", "route"]
    rows = [
        [part.workload, part.configuration, *(f"{one.estimate:.2f}" for one in part.lengths), *_effects(part.effects)]
        for part in told.parts
    ]
    rows += [["all alike", name, "", "", "", "", *_effects(one)] for name, one in told.overall.items()]
    counts = {part.workload: f"{part.workload} {part.places} of {part.tokens} tokens" for part in told.parts}
    yield from (f"Places: {', '.join(counts.values())}.", "")
    yield from ("### Acceptance length", "", *_table(["workload", "method-K", *corners, *effects], rows))
    yield from (
        "",
        "### Which drafts pay",
        "",
        "Change of survival by draft position; * where the band excludes 0.",
        "",
    )
    depth = told.parts[0].num_speculative_tokens
    yield from _table(["workload", "method-K", "by", *(str(i + 1) for i in range(depth))], list(_positions(told.parts)))
    yield from ("", "### The verifier", "", *_table(_VERIFIER, list(_verifier(told.parts))))
    yield ""
    yield (
        "KL(bf16 || mxfp4) in nats per token of the answers. A flip is a token where MXFP4 would choose otherwise; "
        "gaps are medians in logits, of each target's own token above the other's, and elsewhere of bf16's best token "
        "above its second best."
    )
    yield from ("", "### What the drafter reads", "", *_table(_DRIFT, list(_drift(told.parts))))
    yield from ("", "Cosine and relative error over the answers' tokens; the error also over the prompt and by token.")


_VERIFIER = ["workload", "tokens", "KL", "median", "90 %", "99 %", "largest", "flips", "gap in bf16", "gap in mxfp4"]
_VERIFIER += ["elsewhere"]
_DRIFT = ["workload", "method-K", "read", "cosine", "error", "prompt"]
_DRIFT += [f"{begin + 1}–{end}" if end else f"{begin + 1}–" for begin, end in zip(EDGES, (*EDGES[1:], 0), strict=True)]


def _positions(parts: Sequence[Explained]) -> Iterator[list[str]]:
    for part in parts:
        for name, effect in (("features", part.features), ("logits", part.logits)):
            shares = [_at(effect, position) for position in range(part.num_speculative_tokens)]
            yield [part.workload, part.configuration, name, *shares]


def _at(effect: Band, position: int) -> str:
    one = effect.at(position)
    return f"{one.estimate:+.3f}{'' if one.holds(0) else '*'}"


def _verifier(parts: Sequence[Explained]) -> Iterator[list[str]]:
    for part in {part.workload: part for part in parts}.values():
        told, flips = part.divergence, part.flips
        gaps = [flips.bf16_gap, flips.mxfp4_gap, flips.elsewhere]
        yield [
            part.workload,
            str(part.tokens),
            f"{told.mean.estimate:.4f} ({told.mean.lower:.4f} to {told.mean.upper:.4f})",
            *(f"{nats:.2g}" for _, nats in told.quantiles),
            f"{told.largest:.2f}",
            f"{flips.count}, {flips.share.estimate:.1%} ({flips.share.lower:.1%} to {flips.share.upper:.1%})",
            *("" if gap is None else f"{gap:.2f}" for gap in gaps),
        ]


def _drift(parts: Sequence[Explained]) -> Iterator[list[str]]:
    for part in parts:
        for read in part.drift:
            errors = ["" if one is None else f"{one.error:.3f}" for one in read.ranges]
            numbers = [f"{read.answers.cosine:.4f}", f"{read.answers.error:.3f}", *errors]
            yield [part.workload, part.configuration, read.name, *numbers]


def _effects(effects: Effects) -> list[str]:
    found = (effects.total, effects.features, effects.logits, effects.interaction)
    return [*map(_plain, found), effects.route]


def _plain(one: Interval) -> str:
    return f"{one.estimate:+.2f} ({one.lower:+.2f} to {one.upper:+.2f})"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    sys.exit(main())
