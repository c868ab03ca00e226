"""What the page about the testbed says in words follows from the intervals."""

import random

import pytest
from explain_testbed import _plainly
from explained import Counts, explanation, losing

from mxq.explain import why


def gaining(rng: random.Random, number: int) -> tuple[int, int, int, int]:
    return 3, 3, 4, 4


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (losing(3, 1), "**most of it goes by the features** ("),
        (losing(1, 3), "**most of it goes by the logits** ("),
        (losing(2, 2), "but the intervals of the two overlap"),
        (losing(0, 0), "testbed:moe shows no loss: it changes by +0.00"),
        (gaining, "testbed:moe shows no loss: it changes by +1.00"),
    ],
)
def test_which_route_carries_the_loss(counts: Counts, said: str) -> None:
    told = why([explanation(counts, workload=workload, prompts=12) for workload in ("sums", "talk")])
    (line,) = _plainly({"moe": (told, 1.0)})
    assert line.startswith("* **dflash-7**: testbed:moe ")
    assert said in line
