"""``mxq doctor``: is this machine set up for what a model needs, and what did a server really use?"""

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from mxq.errors import MxqError, UsageError
from mxq.progress import note, printable

if TYPE_CHECKING:
    from mxq.engines.vllm_log import LogFacts
    from mxq.hardware.environment import Environment
    from mxq.hardware.rules import Finding

_EPILOG = """\b
Nothing is imported, but for what was built for another torch, which is
tried in a process of its own. What needs knowledge of the model (experts or
not, which activations) is judged as if it could be anything, unless MODEL is
given. Nothing is asked of a server's command: what TP and EP do to a model
is in `mxq plan --tp`, what a drafter or MTP needs in `mxq serve --print`.

\b
Exit code 0: nothing is known to be wrong, though there may be warnings (one
is for GPUs that the rules do not know); 1: something is: an error was found,
MXFP4 is emulated, a drafter was not loaded, or the server did not start;
2: wrong usage, or a file that is not what it should be.

\b
Examples:
  mxq doctor
  mxq doctor ./Qwen3.5-35B-A3B-MXFP4
  mxq doctor --json > there.json   (on the server; then, anywhere:)
  mxq doctor --env there.json ./Qwen3.5-35B-A3B-MXFP4
  vllm serve ... 2>&1 | tee server.log; mxq doctor --server-log server.log
"""

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@click.command(epilog=_EPILOG)
@click.argument("model", required=False)
@click.option(
    "--env",
    "environment_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Judge what `mxq doctor --json` wrote elsewhere, and not this machine.",
)
@click.option(
    "--server-log",
    metavar="FILE",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Say what a vLLM server really used, from its log; - is stdin.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: what --env reads, and findings.")
def command(model: str | None, environment_file: Path | None, server_log: Path | None, as_json: bool) -> None:
    """Say what is installed, set, and known to go wrong with it; for MODEL, if given.

    MODEL is a directory, a model's id on the Hugging Face hub, or a testbed model; of it only its config is looked at.
    """
    if server_log is not None:
        if model is not None or environment_file is not None:
            raise UsageError("--server-log is judged for itself", "leave MODEL and --env out")
        _judge_log(server_log, as_json)
        return
    from mxq.hardware import doctor, environment

    if environment_file is None:
        note("looking at this machine")
    found = environment.collect() if environment_file is None else environment.read(environment_file)
    if model is not None:
        found = dataclasses.replace(found, model=doctor.look_at(model))
    findings = doctor.examine(found)
    if as_json:
        click.echo(json.dumps(found.as_dict() | {"findings": _as_dicts(findings)}, indent=2))
    else:
        _show_environment(found)
        _show_findings(findings)
    _end(findings)


def _judge_log(path: Path, as_json: bool) -> None:
    from mxq.checkpoint.headers import open_regular
    from mxq.engines.vllm_log import lines_of, read_log
    from mxq.hardware import doctor

    if str(path) == "-":
        facts = read_log(lines_of(sys.stdin.buffer))
    else:
        stream: IO[bytes]
        try:
            with open_regular(path) as stream:
                facts = read_log(lines_of(stream))
        except MxqError as error:
            raise UsageError(error.message, error.hint) from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}", "give the file of a server's log") from None
    if not facts.logged:
        raise UsageError(
            f"{path} is no log of vLLM's: none of its {facts.lines} lines is one that vLLM's logger prints",
            "give what `vllm serve` printed, stderr too: vllm serve ... 2>&1 | tee server.log",
        )
    findings = doctor.examine_log(facts)
    if as_json:
        click.echo(json.dumps({"log": dataclasses.asdict(facts), "findings": _as_dicts(findings)}, indent=2))
    else:
        _show_log(facts)
        _show_findings(findings)
    _end(findings)


def _end(findings: Sequence["Finding"]) -> None:
    wrong = [finding for finding in findings if finding.severity == "error"]
    if wrong:
        count = "1 error" if len(wrong) == 1 else f"{len(wrong)} errors"
        raise MxqError(f"{count}: {', '.join(finding.id for finding in wrong)}", wrong[0].do)


def _as_dicts(findings: Iterable["Finding"]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(finding) for finding in findings]


def _show_environment(found: "Environment") -> None:
    from mxq.hardware.environment import PACKAGES, VLLM

    gpus: dict[str, int] = {}
    for gpu in found.gpus:
        name = gpu.name if gpu.target is None else f"{gpu.name} ({gpu.target})"
        gpus[name] = gpus.get(name, 0) + 1
    system = found.system
    _show_group(
        "machine",
        {
            "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none found",
            "ROCm": system.get("rocm"),
            "processor": " ".join(system[name] for name in ("cpu", "features") if name in system),
            "system": system.get("system"),
            "Python": system.get("python"),
        },
    )
    missing = [name for name in PACKAGES if name not in found.packages and name not in VLLM]
    if not set(VLLM) & found.packages.keys():
        missing.insert(0, "vllm")
    absent = ", ".join(missing)
    plugins = {"plugins of vLLM": ", ".join(found.plugins)} if found.plugins else {}
    _show_group("installed", dict(found.packages) | plugins | ({"not installed": absent} if absent else {}))
    _show_group("environment variables", dict(found.variables) or {"": "none that matters here is set"})
    model = found.model
    if model is not None:
        if model.form is None:
            stored = "not MXFP4"
        else:
            stored = f"MXFP4 in the form of {model.form}, activations {'unquantized' if model.weight_only else 'MXFP4'}"
        sizes = f"E={model.experts}, H={model.hidden}, I={model.expert_intermediate}" if model.moe else "dense"
        _show_group("model", {"name": model.name, "kind": sizes, "weights": stored})


def _show_log(facts: "LogFacts") -> None:
    if facts.starts > 1:
        note(f"the log has {facts.starts} starts of a server; this is the last one")
    spec = "none"
    if facts.method is not None:
        spec = f"{facts.method}, K={facts.budget}, drafter {facts.drafter}"
    elif facts.asked:
        spec = "asked for, not in the engine's config"
    loaded = {True: "yes", False: "no", None: None}[facts.drafter_loaded]
    _show_group(
        "server",
        {
            "vLLM": facts.version,
            "model": facts.model,
            "architecture": ", ".join(facts.architectures),
            "device": facts.device,
            "quantization": facts.quantization or "none",
            "tensor parallel": None if facts.tensor_parallel is None else str(facts.tensor_parallel),
            "prefix caching": {True: "on", False: "off", None: None}[facts.prefix_caching],
            "took requests": "yes" if facts.ready else "no",
        },
    )
    _show_group(
        "used",
        {
            "linear kernel": ", ".join(facts.linear_kernels) or "not logged",
            "MoE backend": ", ".join((*facts.moe_backends, *facts.moe_experts)) or "not logged",
            "attention": ", ".join(facts.attention_backends) or "not logged",
            "gated DeltaNet": ", ".join((*facts.gdn_kernels, *(f"{name} (spec)" for name in facts.gdn_spec_kernels)))
            or "not logged",
            "model runner": facts.runner or "not logged",
            "speculation": spec,
            "drafter loaded": loaded,
            "acceptance length": None if facts.acceptance is None else f"{facts.acceptance} (the last that was logged)",
        },
    )


def _show_group(title: str, rows: Mapping[str, str | None]) -> None:
    click.secho(title, bold=True)
    known = {name: text for name, text in rows.items() if text}
    width = max(map(len, known), default=0)
    for name, text in known.items():
        _say(f"  {name:{width}}{'  ' if width else ''}", printable(text))
    click.echo()


def _show_findings(findings: Sequence["Finding"]) -> None:
    for finding in findings:
        click.secho(f"{finding.severity}: {finding.id}", fg=_COLOURS[finding.severity], bold=True)
        _say("  ", printable(finding.text))
        _say("  -> ", printable(finding.do))
        _say("  see ", "; ".join(finding.references))
    counts = [
        f"{count} {word}{'s' if count > 1 else ''}"
        for word in _COLOURS
        if (count := sum(finding.severity == word for finding in findings))
    ]
    click.echo(", ".join(counts) if counts else "nothing found")


def _say(mark: str, text: str) -> None:
    """Print a line, folded to a terminal; whole in a pipe or file, so that what it says is found."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        click.echo(
            textwrap.fill(
                text,
                width,
                initial_indent=mark,
                subsequent_indent=" " * len(mark),
                break_on_hyphens=False,
            )
        )
    else:
        click.echo(mark + text)
