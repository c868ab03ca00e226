"""Explanations made of numbers that tests choose."""

import random
from collections.abc import Callable

from mxq.explain.record import EDGES, Drift, ExplainedPrompt, Explanation
from mxq.stats import Passes

Counts = Callable[[random.Random, int], tuple[int, int, int, int]]
"""Accepted drafts in the four corners at a place, by a prompt's draws and its number."""


def explanation(
    counts: Counts,
    *,
    prompts: int = 24,
    places: int = 10,
    k: int = 7,
    method: str = "dflash",
    workload: str = "sums",
    seed: int = 0,
) -> Explanation:
    """Return what might have been seen on ``prompts`` prompts of ``places`` places each."""
    rng = random.Random(f"{seed}/{workload}")
    read = ("layer 1", "layer 3") if method == "dflash" else ("final norm",)
    made = []
    for number in range(prompts):
        at = [counts(rng, number) for _ in range(places)]
        corners = [Passes(tuple(row[c] for row in at), (k,) * places) for c in range(4)]
        tokens = 4 * places
        drift = (Drift(5, 0.99, 0.1), Drift(16, 0.98, 0.2), Drift(tokens - 16, 0.96, 0.3))
        made.append(
            ExplainedPrompt(
                prompt_id=f"{workload}-{number}",
                conversation=f"{workload}-{number}",
                answer_tokens=tokens,
                places=tuple(range(0, tokens, 4)),
                corners=(corners[0], corners[1], corners[2], corners[3]),
                divergence=tuple(rng.expovariate(50) for _ in range(tokens)),
                margin=tuple(rng.expovariate(0.2) for _ in range(tokens)),
                flips=((3, 0.25, 0.5), (9, 0.75, 0.125)),
                drift=((*drift, *[None] * (len(EDGES) - 2)),) * len(read),
            )
        )
    return Explanation(method, k, workload, 4, read, {}, {}, tuple(made))


def losing(features: int, logits: int) -> Counts:
    """Lose so many drafts by features and by logits, now and then, of six to be had."""

    def counts(rng: random.Random, number: int) -> tuple[int, int, int, int]:
        own = rng.randint(3, 6)
        f, v = (lost * (rng.random() < 0.5) for lost in (features, logits))
        return own, max(0, own - v), max(0, own - f), max(0, own - f - v)

    return counts
