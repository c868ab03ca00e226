"""How many drafts are accepted, as a prediction takes it: an acceptance length, or survival by position."""

from collections.abc import Sequence
from dataclasses import dataclass

from mxq.errors import UsageError


@dataclass(frozen=True)
class Accepted:
    """Survival at positions 1 to K: the share of verify passes that accept at least so many drafts.

    ``assumed``: only a length was given, and every draft is taken to be accepted with the same probability, once those
    before it are.
    """

    survival: tuple[float, ...]
    assumed: bool

    @property
    def k(self) -> int:
        """The budget."""
        return len(self.survival)

    def length(self, k: int) -> float:
        """Return the acceptance length with a budget of ``k``, at most that of the survival: 1 + sum of survival."""
        return 1 + sum(self.survival[:k])


def of_length(length: float, k: int) -> Accepted:
    """Return survival p, p^2, ... p^K with 1 + sum = ``length``.

    Raises:
        UsageError: ``length`` is not from 1 to K + 1.
    """
    if not 1 <= length <= k + 1:
        raise UsageError(
            f"an acceptance length of {length:g} with K {k}: a pass commits 1 to K + 1 = {k + 1} tokens",
            "give tokens per verify pass, the target's own one included",
        )
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(middle**i for i in range(1, k + 1)) < length else (low, middle)
    if length == k + 1:
        high = 1.0
    return Accepted(tuple(high**i for i in range(1, k + 1)), assumed=True)


def of_survival(shares: Sequence[float], k: int) -> Accepted:
    """Return survival as given.

    Raises:
        UsageError: there are not K shares, one is not from 0 to 1, or one is above that before it.
    """
    if len(shares) != k:
        raise UsageError(f"survival has {len(shares)} shares with K {k}", "give one for each draft, or another -k")
    for position, (before, share) in enumerate(zip((1.0, *shares), shares, strict=False), start=1):
        if not 0 <= share <= 1:
            raise UsageError(f"survival at position {position} is {share:g}", "give shares of passes, from 0 to 1")
        if share > before:
            raise UsageError(
                f"survival rises from {before:g} to {share:g} at position {position}",
                "a pass that accepts i drafts has accepted those before: give shares that never rise",
            )
    return Accepted(tuple(shares), assumed=False)
