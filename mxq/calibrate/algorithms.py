"""The algorithms that a recipe may name, their options, and its ``calibration`` section."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxq.errors import UsageError

OPTIONS: dict[str, dict[str, bool | int | float]] = {
    "gptq": {"block_size": 128, "damp_percent": 0.01, "desc_act": True},
    "awq": {},
    "smoothquant": {"alpha": 0.5, "scale_clamp_min": 1e-3},
}
"""Algorithm -> its options with Quark's own values for Qwen3.5, which count where a recipe gives none."""

ALGORITHMS = tuple(OPTIONS)


@dataclass(frozen=True)
class Calibration:
    """A recipe's ``calibration`` section.

    Attributes:
        set: what text is taken: names of workloads, or a file; None for the testbed's own.
        samples: how many pieces of text, each of
        length: so many tokens.
        seed: what they are drawn with.
    """

    set: str | None
    samples: int
    length: int
    seed: int


def check_options(algorithm: str, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return an algorithm's options with the defaults for those that are not given; ``where`` begins an error's line.

    Raises:
        UsageError: there is no such algorithm or option, or a value is of the wrong type or out of range.
    """
    if algorithm not in OPTIONS:
        raise UsageError(f"{where}: there is no algorithm {algorithm!r}", f"use one of {', '.join(ALGORITHMS)}")
    known = OPTIONS[algorithm]
    for name, value in options.items():
        if name not in known:
            have = f"it has {', '.join(known)}" if known else "it has none"
            raise UsageError(f"{where}: {algorithm} has no option {name!r}", have)
        _check_value(name, value, known[name], where)
    return {**known, **options}


def _check_value(name: str, value: Any, default: bool | int | float, where: str) -> None:
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, wanted = type(value) is int and value > 0, "a whole number above 0"
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1
        wanted = "a number between 0 and 1"
    if not fits:
        like = ", such as 0.001 (1e-3 is text to YAML)" if isinstance(value, str) and "number between" in wanted else ""
        raise UsageError(f"{where}: {name} is {value!r:.40}", f"give {wanted}{like}")
