"""Verify passes of two arms as decoding gives them, made up: what the statistics are checked with.

A prompt has a difficulty: the logit of the chance that a draft is accepted, drawn from Student's t with four degrees of
freedom, so that some prompts are far from all others. Within an answer the chance drifts slowly (an autoregressive
state), as easy and hard passages follow each other. A pass accepts drafts until the first failure, at most K. Answers
end after a number of tokens that differs tenfold between prompts (log-normal, 5th to 95th percentile), in a pass whose
drafts behind the end do not count.

The second arm has the same prompts. Up to some token greedy answers are the same: state and most accepted counts are
shared. From there on both go their own ways, and end after different numbers of tokens; a fifth never part. Its chances
are shifted by ``shift`` on the logit scale, which gives a true loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mxq.stats import Counts

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """What prompts and answers are like; ``shift`` is what the second arm loses (below 0) on the logit scale."""

    name: str
    num_speculative_tokens: int
    logit: float
    between: float
    within: float = 0.6
    memory: float = 0.9
    tokens: float = 256.0
    same: float = 0.85
    shift: float = 0.0


SETTINGS = (
    Setting("code, dflash-15", 15, 1.5, 0.35),
    Setting("chat, dflash-15", 15, 0.3, 0.45),
    Setting("maths, mtp-3", 3, 1.2, 0.4),
)


def arms(setting: Setting, prompts: int, seed: int) -> tuple[Counts, Counts]:
    """Return the sums of ``prompts`` prompts in both arms; seeds give independent prompts."""
    rng = np.random.default_rng([seed, prompts])
    K = setting.num_speculative_tokens
    difficulty = setting.logit + setting.between * rng.standard_t(4, prompts)
    spread = np.log(10) / (2 * 1.645)
    tokens = setting.tokens * np.exp(spread * rng.standard_normal(prompts))
    parting = np.where(rng.random(prompts) < 0.2, np.inf, rng.random(prompts) * tokens)
    ends = [tokens, np.where(np.isinf(parting), tokens, np.maximum(parting, tokens * _noise(rng, prompts, 0.25)))]
    state = [setting.within * rng.standard_normal(prompts)] * 2
    step = setting.within * (1 - setting.memory**2) ** 0.5
    committed, last = np.ones((2, prompts)), np.zeros((2, prompts), dtype=np.int64)
    passes = np.zeros((2, prompts, K + 1))
    there = np.arange(prompts)
    while len(there):
        parted = committed[0, there] >= parting[there]
        moves = step * rng.standard_normal((2, len(there)))
        moves[1] = np.where(parted, moves[1], moves[0])
        luck = rng.random((2, len(there)))
        luck[1] = np.where(~parted & (rng.random(len(there)) < setting.same), luck[0], luck[1])
        for arm in range(2):
            state[arm] = setting.memory * state[arm] + moves[arm]
            logit = difficulty[there] + state[arm] + setting.shift * arm
            # The number of successes before a failure is above a with probability chance**(a + 1).
            accepted = np.minimum(np.log(luck[arm]) / -np.log1p(np.exp(-logit)), K).astype(np.int64)
            running = committed[arm, there] < ends[arm][there]
            at, counts = there[running], accepted[running]
            passes[arm, at, counts] += 1
            committed[arm, at] += counts + 1
            last[arm, at] = counts
        keep = (committed[0, there] < ends[0][there]) | (committed[1, there] < ends[1][there])
        there, state = there[keep], [values[keep] for values in state]
    return _counts(passes[0], last[0]), _counts(passes[1], last[1])


def _noise(rng: np.random.Generator, count: int, spread: float) -> Floats:
    return np.exp(spread * rng.standard_normal(count))


def _counts(passes: Floats, last: Integers) -> Counts:
    """Sum what was accepted, [prompts, K + 1] passes by number; the last pass had no more drafts than it accepted."""
    reached = passes[:, ::-1].cumsum(axis=1)[:, ::-1]
    at_risk = reached[:, :-1] - (last[:, None] == np.arange(passes.shape[1] - 1))
    total, survived = reached[:, 0], reached[:, 1:]
    accepted = survived.sum(axis=1)
    names = tuple(f"p{place:07}" for place in range(len(passes)))
    return Counts(names, total, accepted, survived, at_risk, np.ones_like(total), 1 + accepted / total)


def part(counts: Counts, first: int, prompts: int) -> Counts:
    """Return ``prompts`` of the prompts from the ``first`` on: one study of many."""
    at = slice(first, first + prompts)
    arrays = {name: value[at] for name, value in vars(counts).items()}
    return Counts(**arrays)


def with_losses(setting: Setting, losses: Sequence[float], prompts: int = 100_000) -> list[Setting]:
    """Return the setting with second arms that have about these true relative losses of pooled acceptance length."""
    shifts = np.array([-0.1, -0.2, -0.3, -0.5])
    found = []
    for shift in shifts:
        base, new = arms(replace(setting, shift=float(shift)), prompts, 10**6)
        found.append(1 - pooled(new) / pooled(base))
    # A loss of 0 needs no shift: the curve goes through 0.
    (slope, bend), *_ = np.linalg.lstsq(np.stack([shifts, shifts**2], axis=1), np.array(found))
    grid = np.linspace(-0.6, 0, 6001)
    curve = slope * grid + bend * grid**2
    return [replace(setting, shift=float(grid[np.abs(curve - loss).argmin()]) if loss else 0.0) for loss in losses]


def pooled(counts: Counts) -> float:
    """Return the pooled acceptance length."""
    return float(1 + counts.accepted.sum() / counts.passes.sum())
