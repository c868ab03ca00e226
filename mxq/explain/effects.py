"""From what explaining saw to effects: which route costs acceptance, with intervals.

With L(f, v) the acceptance length in the corner where the drafter reads target f and target v judges, over all places
(0 bf16, 1 MXFP4)::

    features    = ((L(1,0) - L(0,0)) + (L(1,1) - L(0,1))) / 2
    logits      = ((L(0,1) - L(0,0)) + (L(1,1) - L(1,0))) / 2
    interaction =  (L(1,1) - L(1,0)) - (L(0,1) - L(0,0))
    total       =   L(1,1) - L(0,0)  = features + logits

features and logits are the two main effects of a 2 x 2 factorial: the change by one route, averaged over both states
of the other. All four corners have the same places, so that every effect is a ratio of sums over prompts, and the
bootstrap of :mod:`mxq.stats.bootstrap` draws the corners of a conversation together. The same goes for survival at each
draft position, whose effects add up to those of the length.

Each interval is of one effect on one workload: with many rows, some of those without any effect will exclude 0.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from mxq.explain.record import EDGES, Drift, ExplainedPrompt, Explanation
from mxq.explain.results import CORNER_NAMES, Divergence, Effects, Explained, Flips, ReadDrift, Why
from mxq.stats import Band, Counts, Interval, Resampling, count
from mxq.stats.bootstrap import LINEAR, SHARE, Array, Replicates, Scale, mean_of_strata, replicates
from mxq.stats.intervals import band, interval

_FEATURES = (-0.5, -0.5, 0.5, 0.5)
_LOGITS = (-0.5, 0.5, -0.5, 0.5)
_INTERACTION = (1.0, -1.0, -1.0, 1.0)
_TOTAL = (-1.0, 0.0, 0.0, 1.0)
_QUANTILES = (0.5, 0.9, 0.99)


def why(explanations: Sequence[Explanation], resampling: Resampling | None = None) -> Why:
    """Compute effects and their intervals from what was seen; explanations without a place are left out."""
    drawing = Resampling() if resampling is None else resampling
    seen = [e for e in explanations if any(prompt.places for prompt in e.prompts)]
    drawn = {(e.configuration, e.workload): _drawn(_corner_counts(e), drawing) for e in seen}
    overall: dict[str, Effects] = {}
    for configuration in dict.fromkeys(e.configuration for e in seen):
        of_workloads = [drawn[key] for key in drawn if key[0] == configuration]
        overall[configuration] = _effects(
            [mean_of_strata(list(same)) for same in zip(*of_workloads, strict=True)], drawing
        )
    parts = tuple(_explained(e, drawn[e.configuration, e.workload], drawing) for e in seen)
    return Why(parts, overall, drawing)


def _corner_counts(explanation: Explanation) -> list[Counts]:
    conversations = [prompt.conversation for prompt in explanation.prompts]
    return [
        count([prompt.corners[c] for prompt in explanation.prompts], conversations, explanation.num_speculative_tokens)
        for c in range(len(CORNER_NAMES))
    ]


def _drawn(corners: Sequence[Counts], resampling: Resampling) -> list[Replicates]:
    """Return the draws of features, logits, interaction and total."""
    return [
        replicates(_contrast(corners, weights, _tokens), corners[0].passes[None, :, None], resampling)
        for weights in (_FEATURES, _LOGITS, _INTERACTION, _TOTAL)
    ]


def _effects(drawn: Sequence[Replicates], resampling: Resampling) -> Effects:
    features, logits, interaction, total = (interval(one, resampling) for one in drawn)
    return Effects(features, logits, interaction, total)


def _tokens(counts: Counts) -> Array:
    return (counts.accepted + counts.passes)[:, None]


def _survived(counts: Counts) -> Array:
    return counts.survived


def _contrast(corners: Sequence[Counts], weights: Sequence[float], what: Callable[[Counts], Array]) -> Array:
    """Return the weighted sum of corners by conversation, [1, conversations, quantities]."""
    return np.sum([weight * what(corner) for weight, corner in zip(weights, corners, strict=True)], axis=0)[None]


def _explained(e: Explanation, drawn: Sequence[Replicates], resampling: Resampling) -> Explained:
    corners = _corner_counts(e)
    places = corners[0].passes[None, :, None]
    k = float(e.num_speculative_tokens)

    def by_position(weights: Sequence[float]) -> Band:
        return band(replicates(_contrast(corners, weights, _survived), places, resampling), resampling, (-1.0, 1.0))

    return Explained(
        method=e.method,
        num_speculative_tokens=e.num_speculative_tokens,
        workload=e.workload,
        every=e.every,
        prompts=len(e.prompts),
        conversations=len(corners[0].conversations),
        places=int(corners[0].passes.sum()),
        tokens=sum(prompt.answer_tokens for prompt in e.prompts),
        lengths=tuple(
            interval(replicates(_tokens(corner)[None], places, resampling), resampling, (1.0, 1.0 + k))
            for corner in corners
        ),
        effects=_effects(drawn, resampling),
        survival=tuple(
            tuple(float(share) for share in corner.survived.sum(axis=0) / corner.passes.sum()) for corner in corners
        ),
        features=by_position(_FEATURES),
        logits=by_position(_LOGITS),
        divergence=_divergence(e.prompts, resampling),
        flips=_flips(e.prompts, resampling),
        drift=tuple(
            ReadDrift(name, *_pooled([prompt.drift[index] for prompt in e.prompts]))
            for index, name in enumerate(e.read)
        ),
    )


def _per_token(
    prompts: Sequence[ExplainedPrompt],
    value: Callable[[ExplainedPrompt], float],
    resampling: Resampling,
    scale: Scale = LINEAR,
) -> Interval:
    """Return the interval of a sum over the answers per token of them."""
    names = sorted({prompt.conversation for prompt in prompts})
    sums = np.zeros((2, len(names), 1))
    for prompt in prompts:
        sums[:, names.index(prompt.conversation), 0] += value(prompt), prompt.answer_tokens
    return interval(replicates(sums[:1], sums[1:], resampling, scale), resampling, (0.0, math.inf))


def _divergence(prompts: Sequence[ExplainedPrompt], resampling: Resampling) -> Divergence:
    tokens = np.concatenate([np.asarray(prompt.divergence) for prompt in prompts])
    return Divergence(
        _per_token(prompts, lambda prompt: sum(prompt.divergence), resampling),
        tuple((share, float(np.quantile(tokens, share))) for share in _QUANTILES),
        float(tokens.max()),
    )


def _flips(prompts: Sequence[ExplainedPrompt], resampling: Resampling) -> Flips:
    gaps = np.array([gaps for prompt in prompts for _, *gaps in prompt.flips]).reshape(-1, 2)
    flipped = [{token for token, *_ in prompt.flips} for prompt in prompts]
    elsewhere = [
        margin
        for prompt, at in zip(prompts, flipped, strict=True)
        for token, margin in enumerate(prompt.margin)
        if token not in at
    ]
    some = len(gaps) > 0
    return Flips(
        count=len(gaps),
        share=_per_token(prompts, lambda prompt: len(prompt.flips), resampling, SHARE),
        bf16_gap=float(np.median(gaps[:, 0])) if some else None,
        bf16_gap_largest=float(gaps[:, 0].max()) if some else None,
        mxfp4_gap=float(np.median(gaps[:, 1])) if some else None,
        elsewhere=float(np.median(elsewhere)) if elsewhere else None,
    )


def _pooled(prompts: Sequence[Sequence[Drift | None]]) -> tuple[Drift, tuple[Drift | None, ...]]:
    """Return drift over all answers, and over each range; means over tokens."""
    ranges = tuple(mean_drift([prompt[index] for prompt in prompts]) for index in range(len(EDGES) + 1))
    answers = mean_drift(ranges[1:])
    assert answers is not None  # no answer is empty
    return answers, ranges


def mean_drift(parts: Sequence[Drift | None]) -> Drift | None:
    """Return the means over all tokens of the parts, None without any."""
    there = [part for part in parts if part is not None]
    tokens = sum(part.tokens for part in there)
    if not tokens:
        return None
    cosine, error = (sum(part.tokens * getattr(part, name) for part in there) / tokens for name in ("cosine", "error"))
    return Drift(tokens, cosine, error)
