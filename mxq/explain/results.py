"""What explaining comes to: effects by route, what became of each draft position, the verifier, and what is read."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mxq.explain.record import Drift
from mxq.stats import ENOUGH, Band, Interval, Resampling

Route = Literal["few prompts", "none shown", "features", "logits", "both", "not told apart", "higher"]

CORNER_NAMES = (("bf16", "bf16"), ("bf16", "mxfp4"), ("mxfp4", "bf16"), ("mxfp4", "mxfp4"))
"""Whose features and whose logits, in the order of :data:`mxq.decode.factorial.CORNERS`."""


@dataclass(frozen=True)
class Effects:
    """Changes of the acceptance length, in tokens per verify pass, defined in :mod:`mxq.explain.effects`."""

    features: Interval
    logits: Interval
    interaction: Interval
    total: Interval

    @property
    def route(self) -> Route:
        """Return which route the loss goes by, as far as the intervals say: those that exclude 0."""
        if self.total.prompts < ENOUGH:
            return "few prompts"
        if self.total.holds(0):
            return "none shown"
        if self.total.lower > 0:
            return "higher"
        by_features, by_logits = self.features.upper < 0, self.logits.upper < 0
        if by_features and by_logits:
            return "both"
        return "features" if by_features else "logits" if by_logits else "not told apart"

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        parts = {name: getattr(self, name).as_json() for name in ("features", "logits", "interaction", "total")}
        return parts | {"route": self.route}


@dataclass(frozen=True)
class Divergence:
    """KL(bf16 || mxfp4) in nats per token of the answers: mean, quantiles (share, nats), and the largest."""

    mean: Interval
    quantiles: tuple[tuple[float, float], ...]
    largest: float


@dataclass(frozen=True)
class Flips:
    """Tokens of the answers where MXFP4 chooses otherwise; gaps in logits, None without a flip.

    ``bf16_gap`` is by how much bf16 prefers its own choice to MXFP4's, ``mxfp4_gap`` the reverse, medians;
    ``elsewhere`` is the median by which bf16 prefers its choice to its second best where both choose alike.
    """

    count: int
    share: Interval
    bf16_gap: float | None
    bf16_gap_largest: float | None
    mxfp4_gap: float | None
    elsewhere: float | None


@dataclass(frozen=True)
class ReadDrift:
    """How far one thing that the drafter reads has drifted: over all of the answers, and by range of tokens.

    ``ranges`` begin with the prompt; then come those of :data:`mxq.explain.record.EDGES`. None where there is no token.
    """

    name: str
    answers: Drift
    ranges: tuple[Drift | None, ...]


@dataclass(frozen=True)
class Explained:
    """One method and K on one workload. ``lengths`` and ``survival`` [K] are by corner, as in ``CORNERS``.

    ``features`` and ``logits`` are the two effects on survival by draft position, with simultaneous bands.
    """

    method: str
    num_speculative_tokens: int
    workload: str
    every: int
    prompts: int
    conversations: int
    places: int
    tokens: int
    lengths: tuple[Interval, ...]
    effects: Effects
    survival: tuple[tuple[float, ...], ...]
    features: Band
    logits: Band
    divergence: Divergence
    flips: Flips
    drift: tuple[ReadDrift, ...]

    @property
    def configuration(self) -> str:
        """Return method and budget, such as ``dflash-15``."""
        return f"{self.method}-{self.num_speculative_tokens}"

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; numbers are not rounded."""
        corners = [f"{features} features, {logits} logits" for features, logits in CORNER_NAMES]
        numbers = ("every", "prompts", "conversations", "places", "tokens")
        return {
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
            "workload": self.workload,
            **{name: getattr(self, name) for name in numbers},
            "lengths": {corner: length.as_json() for corner, length in zip(corners, self.lengths, strict=True)},
            "effects": self.effects.as_json(),
            "survival": dict(zip(corners, self.survival, strict=True)),
            "effects_on_survival": {"features": self.features.as_json(), "logits": self.logits.as_json()},
            "divergence": {
                "mean": self.divergence.mean.as_json(),
                "quantiles": {str(share): nats for share, nats in self.divergence.quantiles},
                "largest": self.divergence.largest,
            },
            "flips": {**asdict(self.flips), "share": self.flips.share.as_json()},
            "drift": [asdict(one) for one in self.drift],
        }


@dataclass(frozen=True)
class Why:
    """All of a run that is explained, and each method's effects over all workloads, which weigh alike."""

    parts: tuple[Explained, ...]
    overall: dict[str, Effects]
    resampling: Resampling

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "resampling": asdict(self.resampling),
            "parts": [part.as_json() for part in self.parts],
            "all_workloads": {configuration: effects.as_json() for configuration, effects in self.overall.items()},
        }
