"""Measure the testbed with the real verify loop and write the table that says what its models can do.

    python tools/measure_testbed.py --jobs 8            every held-out prompt: hours of one core, shared among processes
    python tools/measure_testbed.py --limit 16          a first look

Converts each target to MXFP4, runs autoregressive, MTP and DFlash decoding at K=3, 7 and 15 on the held-out prompts of
all five workloads, greedily, and writes benchmarks/TESTBED.md: acceptance lengths, right answers, what differs from
plain decoding and how near a tie it was, how even the experts are used. Stopped, it goes on where it was when given the
same --runs directory; --report only reads the runs that are there, finished or not, and may do so on any machine.
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are too small for more

import torch
from testbed_training import export
from testbed_training import measure as measure_training
from testbed_training import target as training

from mxq import decode, files, testbed
from mxq.analysis import Summary, summarise
from mxq.checkpoint import Checkpoint
from mxq.cli import main as mxq
from mxq.decode.ties import parting
from mxq.engines import Decoder
from mxq.evaluate import Plan, Record, Request, Run, measure, read_run
from mxq.evaluate.directory import open_run
from mxq.evaluate.inprocess import prepared
from mxq.evaluate.runner import complete, environment, prompt_ids
from mxq.progress import progress
from mxq.workloads import ChatTemplate, load

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = (3, 7, 15)
CONFIGURATIONS = [f"{method}-{k}" for method in ("mtp", "dflash") for k in BUDGETS]


def main(argv: list[str] | None = None) -> int:
    """Measure the models asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(testbed.NAMES), choices=testbed.NAMES)
    parser.add_argument("--limit", type=int, default=None, help="prompts a workload (default: all)")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the table of what there is")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where run directories are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "TESTBED.md")
    args = parser.parse_args(argv)
    args.runs.mkdir(parents=True, exist_ok=True)
    sections: list[str] = []
    for name in args.models:
        converted = args.runs / f"{name}-mxfp4"
        if not converted.exists():
            mxq(["quantize", f"testbed:{name}", str(converted), "--recipe", "mxfp4"], standalone_mode=False)
        request = Request(
            targets={"bf16": f"testbed:{name}", "mxfp4": str(converted)},
            methods=("mtp", "dflash"),
            budgets=BUDGETS,
            workloads=testbed.WORKLOADS,
            limit=args.limit,
            max_tokens=320,
        )
        out = args.runs / name
        run = read_run(out) if args.report else _measure(request, out, args.jobs)
        if not sections:
            sections.append(_introduction(args, run))
        targets = {"bf16": testbed.path(f"testbed:{name}"), "mxfp4": converted}
        sections.append(_section(name, summarise(run, check_answers=True), targets))
    with files.atomic_write(args.out) as stream:
        stream.write("\n\n".join(sections) + "\n")
    print(f"written to {args.out}", file=sys.stderr)
    return 0


def _measure(request: Request, out: Path, jobs: int) -> Run:
    """Measure as :func:`mxq.evaluate.measure` does, each prompt in one of ``jobs`` processes."""
    if jobs == 1:
        return measure(request, out)
    plan, _, engine = prepared(request)
    with (
        multiprocessing.get_context("spawn").Pool(jobs, _open, (request,)) as pool,
        open_run(out, plan, environment(engine)) as cells,
        progress("requests", sum(len(w.token_ids) for w in plan.workloads) * len(plan.arms), "requests") as advance,
    ):
        longest = max(len(workload.token_ids) for workload in plan.workloads)
        places = [
            (number, position)
            for position in range(longest)
            for number, workload in enumerate(plan.workloads)
            if position < len(workload.token_ids)
            and any(cells[arm, workload.workload.name, 1, 0].done <= position for arm in plan.arms)
        ]
        for (number, position), records in zip(places, pool.imap(_records, places), strict=True):
            name = plan.workloads[number].workload.name
            for arm, record in zip(plan.arms, records, strict=True):
                if cells[arm, name, 1, 0].done == position:
                    cells[arm, name, 1, 0].append(record)
            advance(len(records))
        for cell in cells.values():
            cell.finish({"processes": jobs})
    return read_run(out)


_worker: tuple[Plan, ChatTemplate, list[Decoder]]
_models = contextlib.ExitStack()


def _open(request: Request) -> None:
    """Load every arm into this process, for as long as it lives."""
    global _worker
    plan, template, engine = prepared(request)
    _worker = plan, template, _models.enter_context(engine.open([plan.engine_arm(arm) for arm in plan.arms]))


def _records(place: tuple[int, int]) -> list[Record]:
    plan, template, decoders = _worker
    workload, position = plan.workloads[place[0]], place[1]
    return [
        complete(plan, workload, position, arm, decoder, template.decode, prompt_ids(workload, position, (), None))
        for arm, decoder in zip(plan.arms, decoders, strict=True)
    ]


def _introduction(args: argparse.Namespace, run: Run) -> str:
    around = run.info["environment"]
    hardware, versions = around["hardware"], around["versions"]
    given = {"--limit": args.limit, "--jobs": args.jobs if args.jobs > 1 else None}
    options = "".join(f" {option} {value}" for option, value in given.items() if value)
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    return (
        "# The testbed's models\n\n"
        f"`python tools/measure_testbed.py{options}`\n\n"
        f"In-process verify loop, greedy, bf16 arithmetic, on {machine}, one thread per process; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". Acceptance lengths are pooled over all verify passes of a workload, bonus token included; MXFP4 is the "
        "recipe `mxfp4` (W4A4). Point estimates, without intervals.\n\n"
        "How the models were trained, with the commands and logs: [testbed-training](testbed-training.md)."
    )


def _section(name: str, summary: Summary, targets: dict[str, Path]) -> str:
    prompts = min(used for used, _ in summary.prompts.values())
    lines = [f"## testbed:{name}", "", f"{prompts} held-out prompts a workload.", "", "### Acceptance length", ""]
    lines += _table(
        ["workload", "target", *(c.replace("-", " K=") for c in CONFIGURATIONS)],
        [
            [workload, target, *(_length(summary, target, c, workload) for c in CONFIGURATIONS)]
            for workload in summary.workloads
            for target in summary.targets
        ],
    )
    lines += ["", "### From K=7 to K=15, bf16", ""]
    lines += _table(
        ["workload", "MTP gains", "DFlash gains"],
        [
            [workload, *(f"{_gain(summary, method, workload):+.2f}" for method in ("mtp", "dflash"))]
            for workload in summary.workloads
        ],
    )
    lines += ["", "### Right answers, autoregressive", ""]
    judged = [w for w in summary.workloads if (cell := summary.cell("bf16", "ar", w)) and cell.checked]
    lines += _table(
        ["workload", *summary.targets],
        [[w, *(_right(summary, target, w) for target in summary.targets)] for w in judged],
    )
    lines += ["", "### Greedy answers that differ from the target's own autoregressive ones", ""]
    lines += _table(
        ["target", *(c.replace("-", " K=") for c in CONFIGURATIONS), "by rounding", "median gap", "largest gap"],
        [
            [target, *(_differing(summary, target, c) for c in CONFIGURATIONS), *_ties(summary, target, directory)]
            for target, directory in targets.items()
        ],
    )
    lines += [
        "",
        "Gap: by how much, at the first token that differs, the worse of the two tokens is below the best logit in "
        "float32; in brackets the largest error of a logit in that sequence, bf16 against float32. A difference is by "
        "rounding if its gap is at most twice that error. With W4A4, rounding may change the code of an activation "
        "and then weighs more.",
    ]
    if name == "moe":
        lines += ["", "### Share of routed tokens that each expert gets, bf16", ""]
        shares = _expert_shares(name, summary)
        experts = [f"expert {e}" for e in range(len(shares[0]))]
        lines += _table(["layer", *experts], [[str(i), *(f"{s:.1%}" for s in layer)] for i, layer in enumerate(shares)])
    return "\n".join(lines)


def _length(summary: Summary, target: str, configuration: str, workload: str) -> str:
    cell = summary.cell(target, configuration, workload)
    return "" if cell is None or cell.acceptance is None else f"{cell.acceptance.pooled:.2f}"


def _gain(summary: Summary, method: str, workload: str) -> float:
    lengths = []
    for k in (7, 15):
        cell = summary.cell("bf16", f"{method}-{k}", workload)
        assert cell is not None
        assert cell.acceptance is not None
        lengths.append(cell.acceptance.pooled)
    return lengths[1] - lengths[0]


def _right(summary: Summary, target: str, workload: str) -> str:
    cell = summary.cell(target, "ar", workload)
    return "" if cell is None else f"{cell.right} of {cell.checked} ({cell.right / cell.checked:.1%})"


def _differing(summary: Summary, target: str, configuration: str) -> str:
    found = [cell.identity for w in summary.workloads if (cell := summary.cell(target, configuration, w))]
    known = [identity for identity in found if identity is not None]
    return f"{sum(i.requests - i.identical for i in known)} of {sum(i.requests for i in known)}"


def _ties(summary: Summary, target: str, directory: Path) -> list[str]:
    """Return how many of a target's differences are near-ties, the median gap, and the largest beside its rounding."""
    exact, served = decode.load_target(directory, dtype=torch.float32), decode.load_target(directory)
    template = ChatTemplate(directory, thinking=False)
    records = {
        (cell.arm.configuration, cell.workload): cell.records for cell in summary.run.cells if cell.arm.target == target
    }
    found = []
    for (configuration, workload), drafted in records.items():
        plain = records["ar", workload]
        for prompt, a, b in zip(load(workload).prompts, plain, drafted, strict=False):
            at = parting(exact, served, template.encode(prompt.messages), a.token_ids, b.token_ids)
            if configuration != "ar" and at is not None:
                found.append(at)
    if not found:
        return ["0 of 0", "", ""]
    widest = max(found, key=lambda at: at.gap)
    ties = sum(at.near_tie for at in found)
    median = statistics.median(at.gap for at in found)
    return [f"{ties} of {len(found)}", f"{median:.3f}", f"{widest.gap:.3f} ({widest.rounding:.3f})"]


def _expert_shares(name: str, summary: Summary) -> list[list[float]]:
    """Send the bf16 target's own answers, with their prompts, through its routers."""
    directory = testbed.path(f"testbed:{name}")
    template = ChatTemplate(directory, thinking=False)
    rows = [
        [*template.encode(prompt.messages), *record.token_ids]
        for cell in summary.run.cells
        if (cell.arm.target, cell.arm.method) == ("bf16", "ar")
        for prompt, record in zip(load(cell.workload).prompts, cell.records, strict=False)
    ]
    config = Checkpoint.open(directory).config
    text = config["text_config"]
    model = training.build(config, export.Shape(layers=text["num_hidden_layers"], experts=text["num_experts"]), 0)
    training.load(model, directory)
    return measure_training.expert_shares(training.as_served(model, "cpu"), rows)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    sys.exit(main())
