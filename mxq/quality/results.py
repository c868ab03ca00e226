"""From what was read to quality with intervals: of each workload's answers, of all of them, and of each text.

With the sums over the tokens of answers (or of windows), -log p and -log q for the token that is there:

    perplexity  = exp(sum of nll / tokens)                       of either target
    ratio       = MXFP4's perplexity / bf16's = exp(sum of (nll of MXFP4 - nll of bf16) / tokens)
    divergence  = sum of KL(bf16 || MXFP4) / tokens              nats
    agreement   = tokens for which both would choose the same / tokens

All are ratios of sums over conversations (or texts), which :mod:`mxq.stats.bootstrap` draws whole, with what both
targets say of them together. ``all`` is over workloads, each weighing alike: the arithmetic mean of divergence and
agreement, the geometric one of perplexities and their ratio. Texts are no part of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mxq.quality.record import Kind, Read, Recorded
from mxq.stats import Interval, Resampling
from mxq.stats.bootstrap import LINEAR, SHARE, Array, Scale, mean_of_strata, replicates
from mxq.stats.intervals import interval

QUANTILES = (0.5, 0.9, 0.99)

_EXPONENTIAL = Scale(np.positive, np.ones_like, np.exp, np.log)
"""Means of logarithms, or their difference, shown as their exponential."""


@dataclass(frozen=True)
class Means:
    """What :mod:`mxq.quality.results` defines, each with its interval over prompts."""

    bf16_perplexity: Interval
    mxfp4_perplexity: Interval
    ratio: Interval
    divergence: Interval
    agreement: Interval

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {name: getattr(self, name).as_json() for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class TextQuality:
    """Quality on the answers to a workload, or on a text in windows of ``window`` tokens.

    ``read`` answers or windows of ``tokens`` tokens; ``unlike`` tokens where the two would choose otherwise.
    ``quantiles`` of the divergence over tokens are (share, nats), ``largest`` its maximum. ``seconds`` it took.
    """

    kind: Kind
    name: str
    window: int | None
    read: int
    tokens: int
    means: Means
    unlike: int
    quantiles: tuple[tuple[float, float], ...]
    largest: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; numbers are not rounded."""
        names = ("kind", "name", "window", "read", "tokens", "unlike", "largest", "seconds")
        quantiles = {str(share): nats for share, nats in self.quantiles}
        return {name: getattr(self, name) for name in names} | {"quantiles": quantiles} | self.means.as_json()


@dataclass(frozen=True)
class Quality:
    """All that a run has of quality; ``overall`` is over its workloads, None where no answers were measured."""

    parts: tuple[TextQuality, ...]
    overall: Means | None
    resampling: Resampling

    @property
    def answers(self) -> tuple[TextQuality, ...]:
        """Return the parts on the bf16 target's own answers."""
        return tuple(part for part in self.parts if part.kind == "answers")

    @property
    def texts(self) -> tuple[TextQuality, ...]:
        """Return the parts on texts that the user gave."""
        return tuple(part for part in self.parts if part.kind == "text")

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "resampling": asdict(self.resampling),
            "parts": [part.as_json() for part in self.parts],
            "all_workloads": None if self.overall is None else self.overall.as_json(),
        }


def judge(recorded: Sequence[Recorded], resampling: Resampling | None = None) -> Quality:
    """Compute quality and its intervals from what was read."""
    drawing = Resampling() if resampling is None else resampling
    workloads = [_sums(one.read) for one in recorded if one.kind == "answers"]
    return Quality(
        tuple(_part(one, drawing) for one in recorded), _means(workloads, drawing) if workloads else None, drawing
    )


def _part(one: Recorded, resampling: Resampling) -> TextQuality:
    nats = np.concatenate([np.asarray(read.divergence) for read in one.read])
    return TextQuality(
        kind=one.kind,
        name=one.name,
        window=one.window,
        read=len(one.read),
        tokens=len(nats),
        means=_means([_sums(one.read)], resampling),
        unlike=sum(len(read.unlike) for read in one.read),
        quantiles=tuple((share, float(np.quantile(nats, share))) for share in QUANTILES),
        largest=float(nats.max()),
        seconds=float(one.made["seconds"]),
    )


@dataclass(frozen=True)
class _Sums:
    """Sums over clusters, [1, clusters, 1] each."""

    tokens: Array
    bf16: Array
    mxfp4: Array
    divergence: Array
    alike: Array


def _sums(read: Sequence[Read]) -> _Sums:
    names = sorted({one.cluster for one in read})
    place = [names.index(one.cluster) for one in read]

    def of(value: Callable[[Read], float]) -> Array:
        sums = np.zeros((1, len(names), 1))
        np.add.at(sums[0, :, 0], place, [value(one) for one in read])
        return sums

    return _Sums(
        of(lambda one: one.tokens),
        of(lambda one: math.fsum(one.bf16_nll)),
        of(lambda one: math.fsum(one.mxfp4_nll)),
        of(lambda one: math.fsum(one.divergence)),
        of(lambda one: one.tokens - len(one.unlike)),
    )


def _means(strata: Sequence[_Sums], resampling: Resampling) -> Means:
    # The logit of a workload where all agree has no mean with others.
    share = SHARE if len(strata) == 1 else LINEAR

    def of(what: Callable[[_Sums], Array], scale: Scale, within: tuple[float, float]) -> Interval:
        drawn = [replicates(what(one), one.tokens, resampling, scale) for one in strata]
        return interval(drawn[0] if len(drawn) == 1 else mean_of_strata(drawn), resampling, within)

    return Means(
        bf16_perplexity=of(lambda one: one.bf16, _EXPONENTIAL, (1.0, math.inf)),
        mxfp4_perplexity=of(lambda one: one.mxfp4, _EXPONENTIAL, (1.0, math.inf)),
        ratio=of(lambda one: one.mxfp4 - one.bf16, _EXPONENTIAL, (0.0, math.inf)),
        divergence=of(lambda one: one.divergence, LINEAR, (0.0, math.inf)),
        agreement=of(lambda one: one.alike, share, (0.0, 1.0)),
    )
