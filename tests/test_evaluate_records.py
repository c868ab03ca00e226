"""What a record's verify passes count for at the end of an answer, as the acceptance statistics define it."""

import pytest

from mxq.engines import Completion
from mxq.evaluate import Record
from mxq.stats import Passes, acceptance


@pytest.mark.parametrize(
    ("tokens", "accepted", "drafted", "finish_reason", "counted"),
    [
        # 1 + (2 + 1) + (1 + 1) tokens, of which the last, not a draft but the target's own, ended the text.
        (6, (2, 1), (4, 4), "stop", (4, 4)),
        # The one accepted draft of the last pass ended the text: no bonus token, and nothing behind it could count.
        (5, (2, 1), (4, 4), "stop", (4, 1)),
        # A limit on the answer's length cut the tokens of the last pass, which counts in full.
        (5, (2, 3), (4, 4), "length", (4, 4)),
        # There was room for two drafts only.
        (7, (2, 2), (4, 2), "length", (4, 2)),
    ],
)
def test_the_last_pass(
    tokens: int, accepted: tuple[int, ...], drafted: tuple[int, ...], finish_reason: str, counted: tuple[int, ...]
) -> None:
    completion = Completion((1,) * tokens, accepted, drafted, finish_reason, ttft_s=0.1, duration_s=1.0)
    record = Record.of("a", 3, completion, "text", started_at=0.0)
    record.check(4)
    assert record.passes == Passes(accepted, counted)
    found = acceptance([record.passes], 4)
    assert found is not None
    assert found.pooled == 1 + sum(accepted) / 2
    assert found.at_risk == tuple(
        sum(a >= i and d > i for a, d in zip(accepted, counted, strict=True)) for i in range(4)
    )
