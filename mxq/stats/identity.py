"""Whether two decodings of the same prompts gave the same tokens: greedy speculative decoding must equal plain."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """``first_differences``: per request that differs, the index of the first token that does (also a missing one)."""

    requests: int
    identical: int
    first_differences: tuple[int, ...]


def identity(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> Identity:
    """Compare token ids request by request; both lists are in the same prompt order."""
    differences = [
        position
        for tokens, expected in zip(outputs, reference, strict=True)
        if (position := _first_difference(tokens, expected)) is not None
    ]
    return Identity(len(outputs), len(outputs) - len(differences), tuple(differences))


def _first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    for position, (token, other) in enumerate(zip(tokens, expected, strict=False)):
        if token != other:
            return position
    return None if len(tokens) == len(expected) else min(len(tokens), len(expected))
