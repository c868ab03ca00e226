"""What a record's verify passes count for at the end of an answer, and which records cannot be."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mxq import files
from mxq.engines import Completion
from mxq.errors import MxqError
from mxq.evaluate import Record
from mxq.evaluate.records import cannot_write, read_records, write_records
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


SERVED = Record(
    *("a", 3, 6, "length", 0.1, 0.5, None, None, 0.0, (2, 1), (3, 3)),
    *(files.sha256_text("x"), "x", (1,) * 6),
    arrivals_s=(0.1, 0.2, 0.4),
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"accepted": None, "drafted": None}, None),
        ({"accepted": (2,), "drafted": (3,)}, None),  # two passes had no drafts: a server says nothing of them
        ({"accepted": (2,), "drafted": (3,), "arrivals_s": None}, "6 output tokens but the passes committed 4"),
        ({"accepted": (3, 3), "drafted": (3, 3), "output_tokens": 5, "token_ids": (1,) * 5}, "committed 9"),
        ({"accepted": None}, "verify passes are missing"),
        ({"accepted": None, "drafted": None, "arrivals_s": None}, "verify passes are missing"),
        ({"duration_s": 10**400}, "duration_s is 1000"),
        ({"arrivals_s": ()}, "impossible times"),
        ({"arrivals_s": (0.1, 0.3, 0.2)}, "impossible times"),
        ({"arrivals_s": (0.1, 0.6)}, "impossible times"),
        ({"arrivals_s": (0.2, 0.4)}, "impossible times"),
        ({"arrivals_s": (0.1,) * 7}, "impossible times"),
    ],
)
def test_what_a_server_answered(tmp_path: Path, changed: dict[str, Any], message: str | None) -> None:
    record = replace(SERVED, **changed)
    write_records(tmp_path / "records.jsonl", [record])
    if message is None:
        assert read_records(tmp_path / "records.jsonl", 3) == [record]
    else:
        with pytest.raises(MxqError, match=message):
            read_records(tmp_path / "records.jsonl", 3)
    assert (record.passes is None) == (record.accepted is None or record.drafted is None)


@pytest.mark.parametrize(
    ("number", "what"),
    [(28, "make room"), (122, "make room"), (13, "make it writable"), (30, "make it writable")],
    ids=["ENOSPC", "EDQUOT", "EACCES", "EROFS"],
)
def test_what_cannot_be_written_says_what_helps(number: int, what: str) -> None:
    error = cannot_write(Path("run") / "records.jsonl", OSError(number, os.strerror(number)))
    assert str(error.hint) == f"{what} and run the same command to continue"
    assert os.strerror(number) in error.message
