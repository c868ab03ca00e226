"""What measuring quality might have seen, made of numbers that tests choose."""

import random
from collections.abc import Callable

from mxq.quality import Read, Recorded

Token = tuple[float, float, float, bool]
"""Divergence, nll of bf16 and of MXFP4, and whether the two would choose otherwise."""


def reading(name: str, cluster: str, tokens: list[Token]) -> Read:
    """Return one answer or window."""
    unlike = tuple(number for number, token in enumerate(tokens) if token[3])
    divergence, bf16, mxfp4 = (tuple(token[i] for token in tokens) for i in range(3))
    return Read(name, cluster, divergence, bf16, mxfp4, unlike)


def worse(rng: random.Random) -> Token:
    """Return a token of a target that is a little worse: by 0.02 nats, and otherwise in a token of twenty."""
    nll = rng.expovariate(2)
    return rng.expovariate(50), nll, max(0.0, nll + rng.gauss(0.02, 0.05)), rng.random() < 0.05


def recorded(
    token: Callable[[random.Random], Token] = worse,
    *,
    prompts: int = 24,
    tokens: int = 30,
    name: str = "sums",
    window: int | None = None,
    seed: int = 0,
) -> Recorded:
    """Return the answers to a workload, or the windows of a text."""
    rng = random.Random(f"{seed}/{name}")
    read = [
        reading(f"{name}-{i}", f"{name}-{i}", [token(rng) for _ in range(tokens + 2 * (i % 5))]) for i in range(prompts)
    ]
    about = {"name": name} if window is None else {"name": name, "sha256": "", "texts": prompts, "window": window}
    kind = "answers" if window is None else "text"
    definition = {"workload" if window is None else "text": about}
    return Recorded(kind, name, definition, {"seconds": 2.5}, tuple(read))  # type: ignore[arg-type]
