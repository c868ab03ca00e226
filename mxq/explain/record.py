"""What explaining writes: a file per method, K and workload, RUN/explain/<method>-<K>-<workload>.json.

A file holds what was seen, prompt by prompt, and no interval; it is written whole, once, and belongs to the run whose
models, prompts and settings its definition repeats. It is no cell: acceptance at places of a given text is not that of
decoding.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq.errors import MxqError
from mxq.evaluate import Settings
from mxq.evaluate.derived import read_derived, refuse_unlike, write_derived
from mxq.stats import Passes
from mxq.stats.acceptance import check_passes

FORMAT = 1
SEMANTICS = 1
"""Raised when a change makes old and new files incomparable."""
DIRECTORY = "explain"
EDGES = (0, 16, 64, 256, 1024)
"""Drift is kept for the prompt, and for the answer from each of these tokens to the next."""

_REMOVE = "remove the file, and the same `mxq eval --explain` makes it again"


@dataclass(frozen=True)
class Drift:
    """How far what a drafter reads has drifted over ``tokens`` tokens: means of cosine and of relative error."""

    tokens: int
    cosine: float
    error: float


@dataclass(frozen=True)
class ExplainedPrompt:
    """One prompt. ``conversation`` is the id of its first turn: what is drawn as one when intervals are made.

    ``corners`` are in the order of :data:`mxq.decode.factorial.CORNERS`, each with an entry per place; ``divergence``
    (nats) and ``margin`` (logits) have one per token of the answer; ``flips`` are (token, gap in the first target, gap
    in the second), see :mod:`mxq.decode.forced`; ``drift`` is by what is read, and then for the prompt and the ranges
    of :data:`EDGES`, None where the answer has no such token.
    """

    prompt_id: str
    conversation: str
    answer_tokens: int
    places: tuple[int, ...]
    corners: tuple[Passes, Passes, Passes, Passes]
    divergence: tuple[float, ...]
    margin: tuple[float, ...]
    flips: tuple[tuple[int, float, float], ...]
    drift: tuple[tuple[Drift | None, ...], ...]


@dataclass(frozen=True)
class Explanation:
    """One file. ``read`` names what the drafter reads of the target; ``made`` says by what, when and how long."""

    method: str
    num_speculative_tokens: int
    workload: str
    every: int
    read: tuple[str, ...]
    definition: Mapping[str, Any]
    made: Mapping[str, Any]
    prompts: tuple[ExplainedPrompt, ...]

    @property
    def configuration(self) -> str:
        """Return method and budget, such as ``dflash-15``."""
        return f"{self.method}-{self.num_speculative_tokens}"


def define(run: Mapping[str, Any], method: str, k: int, workload: str, every: int) -> dict[str, Any]:
    """Return the definition of one file in a run whose own definition, as run.json has it, is ``run``."""
    drafter = run["drafter"]["fingerprint"] if method == "dflash" else None
    return {
        "targets": {role: model["fingerprint"] for role, model in run["targets"].items()},
        "drafter": drafter,
        "method": method,
        "num_speculative_tokens": k,
        "workload": next(facts for facts in run["workloads"] if facts["name"] == workload),
        "every": every,
        "explaining": SEMANTICS,
        **{name: run[name] for name in Settings.__dataclass_fields__ if name in run},
    }


def path_of(run: Path, method: str, k: int, workload: str) -> Path:
    """Return where a file is."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", workload)
    return run / DIRECTORY / f"{method}-{k}-{name}.json"


def write(run: Path, explanation: Explanation) -> None:
    """Write one file, whole or not at all, one line per prompt. Raises MxqError."""
    path = path_of(run, explanation.method, explanation.num_speculative_tokens, explanation.workload)
    head = {
        "format": FORMAT,
        "read": explanation.read,
        "definition": explanation.definition,
        "made": explanation.made,
    }
    write_derived(path, head, "prompts", map(_as_json, explanation.prompts))


def read_explanations(run: Path, definition: Mapping[str, Any]) -> tuple[Explanation, ...]:
    """Return what a run directory explains, by method, K and workload in the run's order; () where nothing is.

    ``definition`` is the run's, as run.json has it. Raises MxqError for a file that is damaged or another run's.
    """
    order = [facts["name"] for facts in definition["workloads"]]
    found = [read(path, definition) for path in sorted((run / DIRECTORY).glob("*.json"))]
    return tuple(sorted(found, key=lambda e: (e.method, e.num_speculative_tokens, order.index(e.workload))))


def read(path: Path, definition: Mapping[str, Any]) -> Explanation:
    """Read one file of the run that ``definition`` describes; raises MxqError."""
    value = read_derived(path, FORMAT, _REMOVE)
    try:
        own = value["definition"]
        explanation = Explanation(
            own["method"],
            own["num_speculative_tokens"],
            own["workload"]["name"],
            own["every"],
            tuple(map(str, value["read"])),
            own,
            value["made"],
            tuple(_parse(line, own["num_speculative_tokens"]) for line in value["prompts"]),
        )
        expected = define(
            definition, own["method"], own["num_speculative_tokens"], explanation.workload, explanation.every
        )
        depth = len(explanation.read)
        if any(len(prompt.drift) != depth for prompt in explanation.prompts) or not explanation.prompts:
            raise ValueError(f"drift is not that of {depth} layers")
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration, OverflowError) as error:
        raise MxqError(f"{path} is not what explaining writes ({error!r})", _REMOVE) from None
    named = path_of(Path(), own["method"], own["num_speculative_tokens"], explanation.workload)
    refuse_unlike(path, own, expected, named, _REMOVE)
    return explanation


def _as_json(prompt: ExplainedPrompt) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "conversation": prompt.conversation,
        "answer_tokens": prompt.answer_tokens,
        "places": prompt.places,
        "accepted": [corner.accepted for corner in prompt.corners],
        "drafted": [corner.drafted for corner in prompt.corners],
        "divergence": _rounded(prompt.divergence),
        "margin": _rounded(prompt.margin),
        "flips": [(token, *_rounded(gaps)) for token, *gaps in prompt.flips],
        "drift": [
            [None if part is None else (part.tokens, *_rounded((part.cosine, part.error))) for part in layer]
            for layer in prompt.drift
        ],
    }


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [float(f"{number:.6g}") for number in numbers]


def _parse(value: Mapping[str, Any], k: int) -> ExplainedPrompt:
    places = _numbers(value["places"], int)
    tokens = value["answer_tokens"]
    corners = [
        Passes(_numbers(accepted, int), _numbers(drafted, int))
        for accepted, drafted in zip(value["accepted"], value["drafted"], strict=True)
    ]
    for corner in corners:
        check_passes(corner, k)
        if len(corner.accepted) != len(places):
            raise ValueError(f"{len(corner.accepted)} counts for {len(places)} places")
    divergence, margin = (_numbers(value[name], float) for name in ("divergence", "margin"))
    if type(tokens) is not int or tokens < 1 or len(divergence) != tokens or len(margin) != tokens:
        raise ValueError(f"{tokens} tokens, {len(divergence)} divergences and {len(margin)} margins")
    if any(b <= a for a, b in zip((-1, *places), (*places, tokens), strict=True)):
        raise ValueError("places that are not in the answer, in order")
    if any(len(layer) != len(EDGES) + 1 for layer in value["drift"]):
        raise ValueError(f"drift that is not over the prompt and {len(EDGES)} ranges of tokens")
    one, two, three, four = corners
    return ExplainedPrompt(
        str(value["prompt_id"]),
        str(value["conversation"]),
        tokens,
        places,
        (one, two, three, four),
        divergence,
        margin,
        tuple((*_numbers([token], int), *_gaps(gaps)) for token, *gaps in value["flips"]),
        tuple(tuple(_drift(part) for part in layer) for layer in value["drift"]),
    )


def _gaps(gaps: Sequence[Any]) -> tuple[float, float]:
    first, second = _numbers(gaps, float)
    return first, second


def _drift(part: Any) -> Drift | None:
    if part is None:
        return None
    tokens, *means = part
    return Drift(*_numbers([tokens], int), *_numbers(means, float))


def _numbers(values: Sequence[Any], kind: type[int] | type[float]) -> tuple[Any, ...]:
    if not all(type(value) is kind and math.isfinite(value) for value in values):
        raise TypeError(f"not a list of {kind.__name__} numbers")
    return tuple(values)
