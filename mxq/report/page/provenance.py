"""The sections of a report about where its numbers come from: warnings, checks, kernels, command, versions, files."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mxq import files
from mxq.analysis.checks import tally
from mxq.analysis.summary import POINT_ESTIMATES, Summary
from mxq.report.page.content import Cell, Grid, Section, cells
from mxq.report.speed_tables import kernels
from mxq.report.tables import notes


def checks_section(summary: Summary) -> Section:
    """Return every check by name, and each that failed or could not be made."""
    counts = tally(summary.checks)
    passed, wrong, unknown = (sum(row[i] for row in counts.values()) for i in range(3))
    rows = tuple(
        (Cell(str(name)), Cell(str(good)), Cell(str(bad), tone="failed" if bad else ""), Cell(str(missing)))
        for name, (good, bad, missing) in counts.items()
    )
    grids = [Grid("Checks by name", ("", "passed", "failed", "not made"), rows, folded=not wrong)]
    for ok, title in ((False, "failed"), (None, "could not be made")):
        found = [made for made in summary.checks if made.check.ok is ok]
        listed = tuple(cells([f"{made.check.name}\n{made.where}", made.check.detail]) for made in found)
        if listed:
            grids.append(
                Grid(f"{len(found)} {title}", ("check", "what it found"), listed, folded=ok is None, wide=True)
            )
    return Section(
        "checks",
        "Checks",
        text=(
            f"{passed} passed, {wrong} failed, {unknown} could not be made. Records are held to the servers' own "
            "counters and to what must be so between cells.",
            *(note for note in notes(summary) if note != POINT_ESTIMATES),
        ),
        grids=tuple(grids),
        after=tuple(_identity(summary)),
    )


def provenance_section(summary: Summary) -> Section:
    """Return how the run was made, of what, on what, and by which kernels."""
    grids = (
        _pairs("How it was made", _made(summary.run.info)),
        _pairs("Models", _models(summary.run.info["definition"])),
        _pairs("Prompts", _prompts(summary)),
        *_kernels(summary),
        *_servers(summary),
    )
    return Section("provenance", "Provenance", grids=grids)


def _made(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    definition, environment = info["definition"], info["environment"]
    yield "command", shlex.join(map(str, info["command"]))
    yield "started", str(info.get("started_at"))
    yield "versions", _words(environment.get("versions"))
    yield "hardware", _hardware(environment.get("hardware"))
    yield "engine", _words(environment.get("engine"))
    yield "arithmetic", f"{definition['dtype']} on {definition['device']}"
    yield "sampling", "greedy" if not definition["sampling"]["temperature"] else _words(definition["sampling"])
    yield "thinking", "on" if definition["thinking"] else "off"
    yield "longest answer", f"{definition['max_tokens']} tokens"
    yield "chat template", f"sha256 {definition['template_sha256']}"
    yield "requests in flight", ", ".join(map(str, definition["concurrency"]))
    yield "repeats", str(definition["repeats"])
    for name, said in (("engine arguments", "engine_args"), ("environment", "engine_env")):
        if definition.get(said):
            yield name, "\n".join(map(str, definition[said]))


def _models(definition: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    models = {**definition["targets"], "drafter": definition.get("drafter")}
    for role, model in models.items():
        if not model:
            continue
        fingerprint = model["fingerprint"]
        weights = fingerprint.get("weights") or {}
        size = sum(facts["bytes"] for facts in weights.values())
        digest = files.sha256_text(json.dumps(fingerprint, sort_keys=True))
        lines = [model["spec"], f"{len(weights)} files of weights, {files.size(size)}", f"fingerprint sha256 {digest}"]
        yield role, "\n".join(map(str, lines))


def _prompts(summary: Summary) -> Iterator[tuple[str, str]]:
    sources = summary.run.info.get("sources") or {}
    for facts in summary.run.info["definition"]["workloads"]:
        used, total = summary.prompts[facts["name"]]
        lines = [f"{total} prompts" if used == total else f"{used} of {total} prompts"]
        if "conversations" in facts:
            lines[0] += f", in {facts['conversations']} conversations"
        if source := sources.get(facts["name"]):
            lines.append(_words(source))
        yield facts["name"], "\n".join([*lines, f"sha256 {facts['sha256']}"])


def _kernels(summary: Summary) -> Iterator[Grid]:
    found = kernels(summary)
    rows = [(", ".join(arms), "\n".join(f"{what}: {said}" for what, said in pairs)) for pairs, arms in found.items()]
    if rows:
        yield _pairs("Kernels and backends, as the servers' logs name them", rows)


def _servers(summary: Summary) -> Iterator[Grid]:
    """Yield the command of each arm's server, and what happened to servers."""
    commands: dict[str, list[str]] = {}
    for cell in summary.run.cells:
        server = cell.facts.get("server")
        if isinstance(server, Mapping) and isinstance(server.get("command"), Sequence):
            variables = server.get("env")
            pairs = variables.items() if isinstance(variables, Mapping) else ()
            command = " ".join([*(f"{k}={v}" for k, v in pairs), shlex.join(map(str, server["command"]))])
            arms = commands.setdefault(command, [])
            arms += [cell.arm.label] if cell.arm.label not in arms else []
    if commands:
        rows = [(", ".join(arms), command) for command, arms in commands.items()]
        yield Grid("Commands of the servers", ("arms", "command"), tuple(map(cells, rows)), folded=True, wide=True)
    events = [
        (f"{cell.arm.label} on {cell.workload}, {cell.concurrency} in flight", said)
        for cell in summary.run.cells
        for said in _events(cell.facts)
    ]
    if events:
        yield Grid("What went wrong meanwhile", ("cell", "what"), tuple(map(cells, events)), wide=True)


def _events(facts: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"server lost, cell measured again: {said}" for said in facts.get("lost") or ())
    if refused := facts.get("refused"):
        yield f"{refused} requests were refused for now, and sent again"
    if resent := facts.get("resent"):
        yield f"{resent} requests met a connection that the server was closing, and were sent again"


def _identity(summary: Summary) -> Iterator[Grid]:
    """Yield how many greedy answers are those of plain decoding."""
    rows = []
    for configuration in summary.configurations:
        row = [configuration]
        for target in summary.targets:
            found = [
                cell.identity
                for workload in summary.workloads
                if (cell := summary.cell(target, configuration, workload)) and cell.identity
            ]
            same, asked = sum(one.identical for one in found), sum(one.requests for one in found)
            row.append(f"{same} of {asked}" if found else "–")
        rows.append(cells(row))
    if any(cell.identity for cell in summary.cells):
        caption = "Greedy answers identical, token by token, to plain decoding of the same target"
        yield Grid(caption, ("method and K", *summary.targets), tuple(rows), folded=True)


def _pairs(caption: str, rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> Grid:
    return Grid(caption, ("", ""), tuple(cells(row) for row in rows), wide=True)


def _hardware(facts: Any) -> str:
    if not isinstance(facts, Mapping):
        return _words(facts)
    memory = facts.get("memory_bytes")
    size = f", {files.size(memory)} of memory" if isinstance(memory, int) else ""
    rest = {name: value for name, value in facts.items() if name not in ("cpu", "cores", "memory_bytes")}
    return f"{facts.get('cpu')}, {facts.get('cores')} cores{size}\n{_words(rest)}".strip()


def _words(value: Any) -> str:
    """Return facts as people read them: names with values, without brackets."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(inner)}" for name, inner in value.items() if inner is not None)
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
