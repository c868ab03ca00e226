"""A run on the real vLLM, as recorded: what it counted and what its answers say are the same, whoever counts."""

import json
from pathlib import Path

import pytest

from mxq.analysis import Summary, summarise
from mxq.analysis.checks import tally
from mxq.evaluate import read_run

RUN = Path(__file__).parent.parent / "notebooks" / "data" / "vllm-cpu"


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(read_run(RUN))


def test_it_is_whole_and_passes_every_check(summary: Summary) -> None:
    assert summary.run.finished
    assert summary.prompts == {"arithmetic": (12, 12), "chat": (12, 12)}
    assert [made for made in summary.checks if made.check.ok is not True] == []
    assert tally(summary.checks)["accepted by position"] == (16, 0, 0)
    assert tally(summary.checks)["acceptance length is that at concurrency 1"] == (4, 0, 0)
    differing = [made for made in summary.checks if "part at near-ties" in made.check.detail]
    assert differing  # of the same answers, bfloat16 decides a few otherwise, and the server says how near they were
    assert not summary.warnings


def test_numbers_of_the_tables_are_those_of_the_raw_files(summary: Summary) -> None:
    """The oracle reads JSON and nothing of mxq's."""
    for file in RUN.glob("cells/bf16-dflash-7-chat-c*-r0-*/cell.json"):
        raw = json.loads(file.read_text())
        lines = [json.loads(line) for line in (file.parent / "records.jsonl").read_text().splitlines()]
        cell = summary.cell("bf16", "dflash-7", "chat", raw["concurrency"])
        assert cell
        assert cell.speed
        assert cell.acceptance
        tokens = sum(line["output_tokens"] for line in lines)
        assert cell.speed.by_repeat[0].tokens_per_s == pytest.approx(tokens / raw["wall_s"])
        counters = raw["counters"]
        assert cell.acceptance.pooled == pytest.approx(1 + counters["accepted"] / counters["drafts"])
        for survival, count in zip(cell.acceptance.survival, counters["per_position"], strict=True):
            assert survival == pytest.approx(count / counters["drafts"])
        if raw["concurrency"] == 1:
            # One at a time, all that is no decoding is the wait for first tokens, and the gaps between requests.
            after = sum(line["arrivals_s"][-1] - line["ttft_s"] for line in lines)
            decoding = cell.speed.decode_tokens_per_s
            assert decoding
            assert decoding.lowest <= (tokens - len(lines)) / after * (1 + 1e-9)
            assert decoding.highest >= (tokens - len(lines)) / after * (1 - 1e-9)


def test_nothing_of_the_machine_is_in_it() -> None:
    for file in RUN.rglob("*"):
        if file.is_file():
            assert "/tmp/" not in (text := file.read_text()), file
            assert "/home/" not in text, file
