"""The seam between evaluation and whatever decodes: an engine opens arms, an open arm completes prompts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Method = Literal["ar", "mtp", "dflash"]
"""Plain autoregressive decoding, the target's own multi-token-prediction head, the DFlash drafter."""

_GREEDY_BELOW = 1e-5
"""Engines take lower temperatures to be 0."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy and ignores the rest; ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax, so that outputs of different arms can be compared token by token."""
        return self.temperature < _GREEDY_BELOW


@dataclass(frozen=True)
class EngineArm:
    """What an engine needs to know to open an arm; ``drafter`` is None unless the method is "dflash"."""

    target: Path
    method: Method
    num_speculative_tokens: int
    drafter: Path | None


@dataclass(frozen=True)
class Completion:
    """One answered prompt. ``accepted`` and ``drafted`` have one entry per verify pass; times are in seconds.

    ``drafted`` counts the drafts proposed; ``accepted`` leaves out those behind an end of text; both are None where a
    server does not say. ``target_s`` and ``draft_s`` are the time inside the two models' forward passes, None where an
    engine cannot tell. ``arrivals_s`` is when each piece with tokens came, None where tokens come all at once.
    """

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...] | None
    drafted: tuple[int, ...] | None
    finish_reason: str
    ttft_s: float
    duration_s: float
    target_s: float | None = None
    draft_s: float | None = None
    arrivals_s: tuple[float, ...] | None = None


class Decoder(Protocol):
    """An open arm."""

    def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, seed: int) -> Completion:
        """Complete one prompt; with the same seed, an engine gives the same tokens again."""
        ...


class Engine(Protocol):
    """Something that decodes. ``semantics`` is raised when a change of it makes old and new records incomparable."""

    name: str
    semantics: int

    def groups(self, arms: Sequence[EngineArm]) -> list[list[EngineArm]]:
        """Split arms into groups that can be open at once, in the order in which to run them."""
        ...

    def open(self, arms: Sequence[EngineArm]) -> AbstractContextManager[list[Decoder]]:
        """Open one group; what it holds is released at the end of the block."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what is worth keeping beside the records: device, threads, how MXFP4 is computed."""
        ...
