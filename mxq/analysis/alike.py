"""What must be the same for a comparison to mean anything, and where two runs, or the arms of one, differ in it.

A comparison of targets is one only where nothing else differs: the prompts as the models saw them, sampling, limits,
the drafter, the engine. Arms of one run share all of it by construction, but for the versions of servers.
Some differences can be wanted (the same target in two engines): these can be allowed by name, and are then said with
the result. The others make prompts of both sides different questions, and cannot.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxq import files
from mxq.errors import UsageError
from mxq.evaluate import RecordedCell, Run

ALLOWABLE = ("arithmetic", "drafter", "engine", "hardware", "options", "versions")
"""What may be allowed to differ: answers are still to the same prompts."""

_DIGITS = 12
"""Of a hash, as it is shown."""
_VERSIONS = ("mxq", "torch", "transformers")
"""Packages that can change a number; the others read files and speak HTTP."""


@dataclass(frozen=True)
class Unlike:
    """One thing that differs, with both values in words."""

    name: str
    base: str
    new: str

    @property
    def words(self) -> str:
        """Return it as a part of a sentence."""
        return f"{self.name}: {self.base} in the base, {self.new} in the new"

    def as_json(self) -> dict[str, str]:
        """Return it as JSON values."""
        return {"name": self.name, "base": self.base, "new": self.new}


def differences(
    base: Run, new: Run, base_cells: Sequence[RecordedCell], new_cells: Sequence[RecordedCell]
) -> list[Unlike]:
    """Return everything but the target that differs between what is compared; the cells are those with a partner."""
    found = list(_of_servers(base_cells, new_cells))
    if base is new:
        return found
    workloads = {cell.workload for cell in base_cells}
    methods = {cell.arm.method for cell in base_cells}
    both = (base.info, new.info)
    unlike = [*_of_prompts(both, workloads), *_of_settings(both), *_of_models(base, new, base_cells, new_cells), *found]
    if "dflash" in methods:
        unlike += _differing_models("drafter", [info["definition"].get("drafter") for info in both])
    unlike += _of_engines(both)
    merged: dict[str, Unlike] = {}
    for one in unlike:  # versions are those of the process and those of servers
        earlier = merged.get(one.name)
        merged[one.name] = (
            Unlike(one.name, f"{earlier.base}, {one.base}", f"{earlier.new}, {one.new}") if earlier else one
        )
    return list(merged.values())


def refuse(unlike: Sequence[Unlike], allowed: Collection[str]) -> None:
    """Raise UsageError that names what differs and was not allowed to, with both values."""
    refused = [one for one in unlike if one.name not in allowed]
    if not refused:
        return
    may = [one.name for one in refused if one.name in ALLOWABLE]
    if len(may) == len(refused):
        hint = f"measure both alike, or say that it is meant: {' '.join(f'--allow {name}' for name in may)}"
    else:
        hint = "measure both alike: these change what is asked, not only who answers"
    raise UsageError(f"not alike: {'; '.join(one.words for one in refused)}", hint)


def _differing(name: str, values: Iterable[str]) -> Iterator[Unlike]:
    base, new = values
    if base != new:
        yield Unlike(name, base, new)


def _of_prompts(both: Sequence[Mapping[str, Any]], workloads: Collection[str]) -> Iterator[Unlike]:
    described = [{facts["name"]: facts for facts in info["definition"]["workloads"]} for info in both]
    for name in sorted(workloads):
        facts = [by_name[name] for by_name in described]
        prompts = list(_differing("prompts", (f"{name} {f['prompts']} ({_short(f['sha256'])})" for f in facts)))
        yield from prompts
        same = ("template_sha256", "thinking")
        if not prompts and all(both[0]["definition"][key] == both[1]["definition"][key] for key in same):
            yield from _differing("token ids", (f"{name} {_short(f['tokens_sha256'])}" for f in facts))


def _of_settings(both: Sequence[Mapping[str, Any]]) -> Iterator[Unlike]:
    settings = [info["definition"] for info in both]
    yield from _differing("template", (_short(s["template_sha256"]) for s in settings))
    yield from _differing("thinking", ("on" if s["thinking"] else "off" for s in settings))
    yield from _differing("sampling", (_listed(s["sampling"]) for s in settings))
    yield from _differing("token limit", (str(s["max_tokens"]) for s in settings))
    yield from _differing("end of text", (" ".join(map(str, s["eos_token_ids"])) for s in settings))
    yield from _differing("arithmetic", (str(s["dtype"]) for s in settings))


def _of_models(
    base: Run, new: Run, base_cells: Sequence[RecordedCell], new_cells: Sequence[RecordedCell]
) -> Iterator[Unlike]:
    """Compare the models as far as the runs say what they are: dimensions, and the base where both runs have it.

    Two targets in one role, such as two quantizations, are what is compared.
    """
    shapes = [run.info.get("architecture") for run in (base, new)]
    if all(shapes) and (unlike := list(_differing("model", (_listed(shape or {}) for shape in shapes)))):
        yield from unlike
        return
    for role in {cell.arm.target for cell in base_cells} - {cell.arm.target for cell in new_cells}:
        targets = [run.info["definition"]["targets"].get(role) for run in (base, new)]
        if all(targets):
            yield from _differing_models(f"{role} target", targets)


def _of_engines(both: Sequence[Mapping[str, Any]]) -> Iterator[Unlike]:
    settings, around = [info["definition"] for info in both], [info.get("environment", {}) for info in both]
    engine = list(_differing("engine", (str(s["engine"]) for s in settings)))
    yield from engine
    if not engine:
        yield from _differing("semantics", (str(s["semantics"]) for s in settings))
        options = (" ".join((*s["engine_args"], *s["engine_env"])) or "none" for s in settings)
        yield from _differing("options", options)
    yield from _differing("hardware", (_hardware(s, a) for s, a in zip(settings, around, strict=True)))
    versions = [{name: a.get("versions", {}).get(name) for name in _VERSIONS} for a in around]
    if not engine:
        for version, a in zip(versions, around, strict=True):
            version["engine"] = a.get("engine", {}).get("version")
    changed = [name for name in versions[0] if versions[0][name] != versions[1].get(name)]
    yield from _differing("versions", (_listed({name: version[name] for name in changed}) for version in versions))


def _of_servers(base_cells: Sequence[RecordedCell], new_cells: Sequence[RecordedCell]) -> Iterator[Unlike]:
    """Compare what servers said they are, cell by cell; a difference within one side is one, too."""
    arms: dict[str, dict[str, None]] = {}
    for cell in (*base_cells, *new_cells):
        server = cell.facts.get("server")
        if isinstance(server, Mapping):
            words = " ".join(str(server[key]) for key in ("build", "version") if server.get(key))
            arms.setdefault(words or "a server that says no version", {})[cell.arm.label] = None
    if len(arms) > 1:
        said = [f"{version} ({', '.join(labels)})" for version, labels in arms.items()]
        yield Unlike("versions", said[0], " and ".join(said[1:]))


def _hardware(settings: Mapping[str, Any], around: Mapping[str, Any]) -> str:
    engine, machine = around.get("engine", {}), around.get("hardware", {})
    gpu = engine.get("device_name") or engine.get("hardware")
    found = (settings["device"], gpu if gpu != settings["device"] else None, machine.get("cpu"), machine.get("cores"))
    return ", ".join(str(part) for part in found if part is not None)


def _differing_models(name: str, both: Sequence[Mapping[str, Any] | None]) -> Iterator[Unlike]:
    """Compare models by their files, wherever these lie."""
    prints = [json.dumps(told and told["fingerprint"], sort_keys=True) for told in both]
    if prints[0] != prints[1]:
        words = (
            f"{told['spec']} ({_short(files.sha256_text(text))})" if told else "none"
            for told, text in zip(both, prints, strict=True)
        )
        yield Unlike(name, *words)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in values.items())


def _short(digest: str) -> str:
    return digest[:_DIGITS]
