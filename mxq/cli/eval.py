"""``mxq eval``: measure arms on workloads into a run directory, then print what it says."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mxq.cli.eval_servers import server_options, servers_of
from mxq.cli.eval_tasks import task_options, tasks_of
from mxq.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from mxq.analysis import Summary
    from mxq.evaluate import Request, Run
    from mxq.evaluate.after import After
    from mxq.explain import Why
    from mxq.quality import Quality

_EPILOG = """\b
Workloads: arithmetic, maths, functions, programs, chat (mxq's own, all by
default for testbed models); gsm8k, math500, humaneval, mbpp, mt-bench (the
published ones, from --data-dir or the hub); or a file with one
{"prompt": "..."}, {"messages": [...]} or {"turns": ["...", ...]} per line,
and optionally "id", "answer" and "tests".

\b
The run directory gets run.json, workloads/, and cells/<key>/records.jsonl
with one line per request, and the logs of servers. Stop it at any time; the
same command continues it. A directory that holds another run is refused.

\b
With --engine vllm, each arm's server is started once, measured at every
--concurrency with the same prompts, and stopped. One that crashes is started
again once, and what it was in is measured from the start.

\b
--explain writes RUN/explain/: on the bf16 target's own answers, drafters that
have read either target draft, and either target judges. --show shows it.

\b
--quality writes RUN/quality/: perplexity of both targets, KL divergence and
equal choices on the bf16 target's own answers. --quality-text FILE adds a
text of your own: plain, or one {"text": "..."} per line of a .jsonl file.

\b
Examples:
  mxq eval --bf16 testbed:dense --mxfp4 ./dense-mxfp4 --limit 8 --out ./run
  mxq eval --bf16 testbed:dense --mxfp4 ./dense-mxfp4 --limit 8 --explain \\
      --workload functions --out ./run-why
  mxq eval --bf16 testbed:dense --mxfp4 ./dense-mxfp4 --spec ar --quality \\
      --quality-text ./wikitext-2-test.txt --out ./run-quality
  mxq eval --bf16 testbed:dense --spec dflash --spec mtp -k 3 -k 7 -k 15 \\
      --workload chat --out ./run-chat
  mxq eval --mxfp4 ./model-mxfp4 --drafter ./drafter \\
      --workload prompts.jsonl --out ./run-mine
  mxq eval --engine vllm --hardware h200 --gpus 0,1 --repeats 3 \\
      --bf16 Qwen/Qwen3.5-27B --mxfp4 ./Qwen3.5-27B-MXFP4 \\
      --drafter z-lab/Qwen3.5-27B-DFlash --workload gsm8k \\
      --concurrency 1 --concurrency 32 --out ./run-h200
  mxq eval --engine vllm --bf16 testbed:dense --served-as dense \\
      --base-url 'bf16 ar=http://host:8000' --out ./run-there
  mxq eval --engine vllm --hardware mi355x --spec ar --workload gsm8k \\
      --bf16 Qwen/Qwen3.5-27B --mxfp4 ./Qwen3.5-27B-MXFP4 \\
      --lm-eval mmlu,ifeval --lm-eval-chat --concurrency 32 --out ./run-tasks
  mxq eval --show ./run
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--bf16",
    metavar="MODEL",
    help="The target as released, bf16 or block-FP8: a directory, a hub id, or a testbed model.",
)
@click.option("--mxfp4", metavar="MODEL", help="Its MXFP4 conversion, or that as `mxq dequantize` wrote it.")
@click.option(
    "--spec",
    "methods",
    type=click.Choice(["ar", "mtp", "dflash"]),
    multiple=True,
    default=["dflash"],
    show_default=True,
    help="Method, repeatable. Plain decoding (ar) always runs: it is the baseline.",
)
@click.option("--drafter", metavar="MODEL", help="DFlash drafter.  [default: the testbed's own for testbed models]")
@click.option(
    "-k",
    "budgets",
    type=click.IntRange(min=1),
    metavar="K",
    multiple=True,
    default=[15],
    show_default=True,
    help="Draft tokens per verify pass, for every method of --spec; repeatable.",
)
@click.option("--workload", "workloads", metavar="NAME|FILE", multiple=True, help="Prompts to measure, repeatable.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Only the first so many prompts of each workload."
)
@click.option(
    "--turns",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the first so many turns of each conversation; 1 is what the published client sends of mt-bench.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Read published workloads from here, as the hub has them (DIR/openai/gsm8k/main/...) or as DIR/gsm8k.jsonl.",
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="N", default=512, show_default=True, help="Longest answer."
)
@click.option("--temperature", metavar="T", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", metavar="P", type=float, default=1.0, show_default=True, help="Nucleus sampling; 1 is off.")
@click.option(
    "--top-k", metavar="N", type=int, default=0, show_default=True, help="Sample from the k likeliest tokens; 0 is off."
)
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of all sampling.")
@click.option("--thinking/--no-thinking", default=False, show_default=True, help="Thinking mode of the chat template.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True, help="Arithmetic."
)
@click.option(
    "--device", metavar="NAME", default="cpu", show_default=True, help="torch's name of the device, such as cuda:0."
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Measure everything so many times, arm after arm each time.",
)
@server_options
@task_options
@click.option("--out", type=click.Path(path_type=Path), metavar="RUN", help="Run directory, new or to be continued.")
@click.option("--show", metavar="RUN", help="Only print what a run directory says, or example:dense.")
@click.option(
    "--check-answers",
    is_flag=True,
    help="Count right answers where prompts have an answer or tests. Runs code that the models wrote.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Then tell why acceptance changed: by the features that drafters read, or by the logits that judge.",
)
@click.option(
    "--explain-every",
    "every",
    type=click.IntRange(min=1),
    metavar="N",
    default=4,
    show_default=True,
    help="Explain behind one token of N of each answer; 1 is every token.",
)
@click.option(
    "--quality",
    is_flag=True,
    help="Then tell how good the MXFP4 target is: perplexity, KL divergence and equal choices against bf16.",
)
@click.option(
    "--quality-text",
    "texts",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Also on this text, repeatable.",
)
@click.option(
    "--quality-window",
    "window",
    type=click.IntRange(min=2),
    metavar="N",
    default=2048,
    show_default=True,
    help="Read texts in windows of so many tokens, each from its start.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    out: Path | None,
    show: str | None,
    check_answers: bool,
    explain: bool,
    every: int,
    quality: bool,
    texts: tuple[Path, ...],
    window: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Run targets x methods x budgets x workloads into a run directory.

    Every arm gets the same prompts in the same order: one request at a time in this process, or --concurrency at a time
    on vLLM servers. Afterwards, acceptance lengths, survival curves and speed of all arms are printed side by side.
    """
    if (out is None) == (show is None):
        raise UsageError("give either --out or --show", "--out RUN measures into RUN, --show RUN prints what is there")
    if not explain and _given()["every"]:
        raise UsageError("--explain-every without --explain", "add --explain")
    if texts and not quality:
        raise UsageError("--quality-text without --quality", "add --quality")
    if _given()["window"] and not texts:
        raise UsageError("--quality-window without --quality-text", "windows are of texts: give one")
    # Before torch is loaded: its threads spin while they wait, which on a busy machine makes small models tens of times
    # slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from mxq.evaluate import measure
    from mxq.evaluate.recorded import read

    if show is not None:
        run = read(show)
    else:
        assert out is not None
        tasks = tasks_of(options, _given())
        servers = servers_of(options, _given())
        if servers is not None and explain:
            raise UsageError(
                "--explain with --engine vllm", "servers do not show what drafters read: explain in process, without it"
            )
        if servers is not None and quality:
            raise UsageError(
                "--quality with --engine vllm", "servers do not show all logits: measure it in process, without it"
            )
        request = _request(**options)
        if servers is None:
            run = measure(request, out, [*_explaining(explain, every), *_judging(quality, texts, window)])
        else:
            from mxq.evaluate.servers import measure_on_servers

            run = measure_on_servers(request, servers, out, tasks)
    explained = _explained(run)
    if explain and explained is None:
        raise UsageError(
            f"{run.path} explains nothing", "run the `mxq eval` that made it again, with --explain and without --show"
        )
    judged = _judged(run)
    if quality and judged is None:
        raise UsageError(
            f"{run.path} has no quality", "run the `mxq eval` that made it again, with --quality and without --show"
        )
    _print(run, explained, judged, check_answers, as_json)


def _explaining(wanted: bool, every: int) -> "list[After]":
    if not wanted:
        return []
    from mxq.explain.measure import Explaining

    return [Explaining(every)]


def _judging(wanted: bool, texts: tuple[Path, ...], window: int) -> "list[After]":
    if not wanted:
        return []
    from mxq.quality.measure import Judging

    return [Judging(texts, window)]


def _given() -> dict[str, bool]:
    """Return which options the user wrote."""
    context = click.get_current_context()
    return {name: context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in context.params}


def _request(bf16: str | None, mxfp4: str | None, workloads: tuple[str, ...], **options: Any) -> "Request":
    from mxq import testbed
    from mxq.engines import Sampling
    from mxq.evaluate import Request

    targets = {role: spec for role, spec in (("bf16", bf16), ("mxfp4", mxfp4)) if spec is not None}
    if not targets:
        raise UsageError("no target", "give --bf16 MODEL, --mxfp4 MODEL, or both")
    if not workloads:
        if not any(spec.startswith(testbed.PREFIX) for spec in targets.values()):
            raise UsageError("no workload", "give --workload NAME or FILE, see `mxq eval --help`")
        workloads = testbed.WORKLOADS
    sampling = Sampling(**{name: options.pop(name) for name in ("temperature", "top_p", "top_k", "seed")})
    return Request(targets=targets, workloads=workloads, sampling=sampling, **options)


def _explained(run: "Run") -> "Why | None":
    from mxq.explain import read_explanations, why

    found = read_explanations(run.path, run.info["definition"])
    return why(found) if found else None


def _judged(run: "Run") -> "Quality | None":
    from mxq.quality import judge, read_qualities

    found = read_qualities(run.path, run.info["definition"])
    return judge(found) if found else None


def _print(run: "Run", explained: "Why | None", judged: "Quality | None", check_answers: bool, as_json: bool) -> None:
    from mxq.analysis import summarise
    from mxq.analysis.tasks import task_scores

    summary, tasks = summarise(run, check_answers=check_answers), task_scores(run)
    if as_json:
        value = summary.as_json() | ({} if explained is None else {"explain": explained.as_json()})
        value |= {} if judged is None else {"quality": judged.as_json()}
        value |= {"lm_eval": [score.as_json() for score in tasks]} if tasks else {}
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        from mxq.report.explain_tables import show_why
        from mxq.report.quality_tables import show_quality
        from mxq.report.tables import show
        from mxq.report.task_tables import show_tasks

        console = Console()
        show(summary, console)
        if tasks:
            console.print()
            show_tasks(tasks, console)
        if explained is not None:
            console.print()
            show_why(explained, console)
        if judged is not None:
            console.print()
            show_quality(judged, console)
    refuse_contradictions(summary)


def refuse_contradictions(summary: "Summary") -> None:
    """Raise MismatchError if numbers of a run contradict each other."""
    if summary.contradictions:
        raise MismatchError(
            f"{len(summary.contradictions)} checks failed: numbers of this run are not to be trusted",
            "the tables say which, and --json has all of them",
        )
