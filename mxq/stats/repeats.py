"""What repeats of one measurement say: the middle, and how far apart they were."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Repeated:
    """Median, smallest and largest of ``repeats`` values: of a handful, a range says more than a deviation."""

    repeats: int
    median: float
    lowest: float
    highest: float


def repeated(values: Sequence[float]) -> Repeated | None:
    """Summarise one value per repeat; None without any."""
    if not values:
        return None
    return Repeated(len(values), statistics.median(values), min(values), max(values))
