"""What the page about the testbed says in words follows from the intervals."""

import random

import pytest
from explain_testbed import _in_short, _plainly
from explained import Counts, explanation, losing

from mxq.explain import why


def gaining(rng: random.Random, number: int) -> tuple[int, int, int, int]:
    return 3, 3, 4, 4


@pytest.mark.parametrize(
    ("counts", "said", "short"),
    [
        (losing(3, 1), "**most of it goes by the features** (", "most of the fall goes by the features."),
        (losing(1, 3), "**most of it goes by the logits** (", "most of the fall goes by the logits."),
        (losing(2, 2), "but the intervals of the two overlap", "Which route carries the loss differs"),
        (losing(0, 0), "testbed:moe shows no loss: it changes by +0.00", "No loss is shown"),
        (gaining, "testbed:moe shows no loss: it changes by +1.00", "No loss is shown"),
    ],
)
def test_which_route_carries_the_loss(counts: Counts, said: str, short: str) -> None:
    told = why([explanation(counts, workload=workload, prompts=12) for workload in ("sums", "talk")])
    (line,) = _plainly({"moe": (told, 1.0)})
    assert line.startswith("* **dflash-7**: testbed:moe ")
    assert said in line
    assert short in _in_short({"moe": (told, 1.0)})
