"""What measuring quality writes: a file for every workload and text, RUN/quality/answers-<name>.json, text-<name>.json.

A file holds what was seen, token by token, and no interval; it is written whole, once, and belongs to the run whose
models, prompts and settings its definition repeats.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mxq import files
from mxq.errors import MxqError
from mxq.evaluate import Settings
from mxq.evaluate.derived import read_derived, refuse_unlike, write_derived

FORMAT = 1
SEMANTICS = 1
"""Raised when a change makes old and new files incomparable."""
DIRECTORY = "quality"

_MOST_NATS = 1e40  # more than logits in float32 can be apart, and no sum of them overflows

Kind = Literal["answers", "text"]
"""The bf16 target's own greedy answers to the prompts of a workload, or a text that the user gave."""

_REMOVE = "remove the file, and the same `mxq eval --quality` makes it again"


@dataclass(frozen=True)
class Read:
    """One answer, or one window of a text: what both targets say of each of its tokens, defined in
    :mod:`mxq.decode.divergence`.

    ``cluster`` is what is drawn as one when intervals are made: the id of the first prompt of a conversation, a text.
    ``divergence``, ``bf16_nll`` and ``mxfp4_nll`` (nats) have one number per token; ``unlike`` are the tokens, from 0,
    instead of which the two would choose different ones.
    """

    id: str
    cluster: str
    divergence: tuple[float, ...]
    bf16_nll: tuple[float, ...]
    mxfp4_nll: tuple[float, ...]
    unlike: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Return of how many tokens it is."""
        return len(self.divergence)


@dataclass(frozen=True)
class Recorded:
    """One file. ``made`` says by what, when and how long."""

    kind: Kind
    name: str
    definition: Mapping[str, Any]
    made: Mapping[str, Any]
    read: tuple[Read, ...]

    @property
    def window(self) -> int | None:
        """Return the tokens of a window of a text; None for answers."""
        return self.definition["text"]["window"] if self.kind == "text" else None


def define(run: Mapping[str, Any], kind: Kind, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of one file in a run whose own definition, as run.json has it, is ``run``.

    ``about`` is the run's word on a workload, or of a text its ``name``, ``sha256``, ``texts`` and ``window``.
    """
    return {
        "targets": {role: model["fingerprint"] for role, model in run["targets"].items()},
        "kind": kind,
        "workload" if kind == "answers" else "text": dict(about),
        "quality": SEMANTICS,
        **{name: run[name] for name in Settings.__dataclass_fields__ if name in run},
    }


def path_of(run: Path, kind: Kind, name: str) -> Path:
    """Return where a file is."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name)
    if plain != name:  # which another name may become, too
        plain = f"{plain[:60]}-{files.sha256_text(name)[:8]}"
    return run / DIRECTORY / f"{kind}-{plain}.json"


def write(run: Path, recorded: Recorded) -> None:
    """Write one file, whole or not at all, one line per answer or window. Raises MxqError."""
    path = path_of(run, recorded.kind, recorded.name)
    head = {"format": FORMAT, "definition": recorded.definition, "made": recorded.made}
    write_derived(path, head, "read", map(_as_json, recorded.read))


def read_qualities(run: Path, definition: Mapping[str, Any]) -> tuple[Recorded, ...]:
    """Return what a run directory has of quality: answers in the run's order of workloads, then texts by name.

    ``definition`` is the run's, as run.json has it. Raises MxqError for a file that is damaged or another run's.
    """
    order = [facts["name"] for facts in definition["workloads"]]
    found = [read(path, definition) for path in sorted((run / DIRECTORY).glob("*.json"))]
    return tuple(
        sorted(found, key=lambda one: (one.kind, order.index(one.name) if one.kind == "answers" else 0, one.name))
    )


def read(path: Path, definition: Mapping[str, Any]) -> Recorded:
    """Read one file of the run that ``definition`` describes; raises MxqError."""
    value = read_derived(path, FORMAT, _REMOVE)
    try:
        own = value["definition"]
        kind: Kind = own["kind"]
        about = _workload(definition, own) if kind == "answers" else _text(own["text"])
        recorded = Recorded(kind, about["name"], own, value["made"], tuple(map(_parse, value["read"])))
        expected = define(definition, kind, about)
        ids = [one.id for one in recorded.read]
        if not ids or len(set(ids)) < len(ids):
            raise ValueError("no answer or window, or one twice")
        if kind == "answers" and len(ids) != about["prompts"]:
            raise ValueError(f"{len(ids)} answers to {about['prompts']} prompts")
        if not math.isfinite(recorded.made["seconds"]):
            raise ValueError("no time that it took")
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration, OverflowError) as error:
        raise MxqError(f"{path} is not what measuring quality writes ({error!r:.200})", _REMOVE) from None
    refuse_unlike(path, own, expected, path_of(Path(), kind, recorded.name), _REMOVE)
    return recorded


def _workload(definition: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run's own word on the workload that a file names."""
    found: Mapping[str, Any] = next(
        facts for facts in definition["workloads"] if facts["name"] == own["workload"]["name"]
    )
    return found


def _text(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a file says of its text, of which a run knows nothing."""
    types = {"name": str, "sha256": str, "texts": int, "window": int}
    if about.keys() != types.keys() or any(type(about[name]) is not kind for name, kind in types.items()):
        raise TypeError("not what there is to say of a text")
    if about["window"] < 2 or about["texts"] < 1:
        raise ValueError(f"{about['texts']} texts in windows of {about['window']} tokens")
    return about


def _as_json(one: Read) -> dict[str, Any]:
    lists = {name: [float(f"{n:.6g}") for n in getattr(one, name)] for name in ("divergence", "bf16_nll", "mxfp4_nll")}
    return {"id": one.id, "cluster": one.cluster, **lists, "unlike": one.unlike}


def _parse(value: Mapping[str, Any]) -> Read:
    divergence, bf16, mxfp4 = (_nats(value[name]) for name in ("divergence", "bf16_nll", "mxfp4_nll"))
    unlike = value["unlike"]
    if not (type(value["id"]) is type(value["cluster"]) is str):
        raise TypeError("an id that is no text")
    if not divergence or not len(divergence) == len(bf16) == len(mxfp4):
        raise ValueError(f"{len(divergence)} divergences, {len(bf16)} and {len(mxfp4)} log-probabilities")
    if any(type(token) is not int for token in unlike) or any(
        b <= a for a, b in zip((-1, *unlike), (*unlike, len(divergence)), strict=True)
    ):
        raise ValueError("tokens that are not there, in order")
    return Read(value["id"], value["cluster"], divergence, bf16, mxfp4, tuple(unlike))


def _nats(values: Sequence[Any]) -> tuple[float, ...]:
    if not all(type(value) is float and 0 <= value < _MOST_NATS for value in values):
        raise TypeError("not a list of nats")
    return tuple(values)
