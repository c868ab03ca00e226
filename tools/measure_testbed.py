"""Measure the testbed with the real verify loop and write the table that says what its models can do.

    python tools/measure_testbed.py                     every held-out prompt: about an hour a model on one core
    python tools/measure_testbed.py --limit 16          a first look

Converts each target to MXFP4, runs autoregressive, MTP and DFlash decoding at K=3, 7 and 15 on the held-out prompts of
all five workloads, greedily, and writes benchmarks/TESTBED.md: acceptance lengths, right answers, how even the experts
are used, and the training's own log lines. Stopped, it goes on where it was when given the same --runs directory.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrices are too small for more

from testbed_training import export, target
from testbed_training import measure as measure_training

from mxq import files, testbed
from mxq.checkpoint import Checkpoint
from mxq.cli import main as mxq
from mxq.evaluate import Request, measure
from mxq.report import Summary, summarise
from mxq.workloads import ChatTemplate, load

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = (3, 7, 15)
CONFIGURATIONS = [f"{method}-{k}" for method in ("mtp", "dflash") for k in BUDGETS]


def main(argv: list[str] | None = None) -> int:
    """Measure the models asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(testbed.NAMES), choices=testbed.NAMES)
    parser.add_argument("--limit", type=int, default=None, help="prompts a workload (default: all)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where run directories are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "TESTBED.md")
    args = parser.parse_args(argv)
    args.runs.mkdir(parents=True, exist_ok=True)
    sections = [_introduction(args.limit)]
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
        run = measure(request, args.runs / name)
        sections.append(_section(name, summarise(run, check_answers=True)))
    with files.atomic_write(args.out) as stream:
        stream.write("\n\n".join(sections) + "\n")
    print(f"written to {args.out}", file=sys.stderr)
    return 0


def _introduction(limit: int | None) -> str:
    hardware, versions = files.hardware(), files.versions("torch", "transformers")
    command = "python tools/measure_testbed.py" + (f" --limit {limit}" if limit else "")
    machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    return (
        "# The testbed's models\n\n"
        f"`{command}`\n\n"
        f"In-process verify loop, greedy, bf16 arithmetic, one thread of {machine}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". Acceptance lengths are pooled over all verify passes of a workload, bonus token included; MXFP4 is the "
        "recipe `mxfp4` (W4A4). Point estimates, without intervals.\n\n"
        "How the models were trained, with the command and log: [testbed-training](testbed-training.md)."
    )


def _section(name: str, summary: Summary) -> str:
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
        ["target", *(c.replace("-", " K=") for c in CONFIGURATIONS)],
        [[target, *(_differing(summary, target, c) for c in CONFIGURATIONS)] for target in summary.targets],
    )
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
    model = target.build(config, export.Shape(layers=text["num_hidden_layers"], experts=text["num_experts"]), 0)
    target.load(model, directory)
    return measure_training.expert_shares(target.as_served(model, "cpu"), rows)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    sys.exit(main())
