"""Intervals of a run's cells: the summary's numbers, with the ends that the statistics give for the same records."""

from pathlib import Path

import pytest
from scripted import ScriptedEngine, decode, small_plan
from served import serve, server_plan

from mxq.analysis import summarise
from mxq.analysis.intervals import NOTHING, intervals
from mxq.evaluate import read_run, run
from mxq.evaluate.records import conversations
from mxq.stats import Resampling, acceptance_intervals, count


def test_they_are_of_the_summarys_numbers(tmp_path: Path) -> None:
    run(small_plan(prompts=12), tmp_path / "run", ScriptedEngine(), decode)
    recorded = read_run(tmp_path / "run")
    summary, known = summarise(recorded), intervals(recorded, Resampling(resamples=400))
    assert known
    assert not NOTHING
    for cell in summary.cells:
        mine = known.of(cell)
        assert mine.tokens_per_s
        assert cell.speed
        assert mine.tokens_per_s.estimate == pytest.approx(cell.speed.tokens_per_s.median)
        if cell.arm.method == "ar":
            assert (mine.pooled, mine.survival, mine.speedup) == (None, None, None)
            continue
        assert cell.acceptance
        assert mine.pooled
        assert mine.survival
        assert mine.per_request_mean
        assert mine.speedup
        assert cell.speed.speedup_same_precision
        assert mine.pooled.estimate == pytest.approx(cell.acceptance.pooled)
        assert mine.pooled.lower < mine.pooled.estimate < mine.pooled.upper
        assert mine.per_request_mean.estimate == pytest.approx(cell.acceptance.per_request_mean)
        assert mine.survival.estimate == pytest.approx(cell.acceptance.survival)
        assert mine.speedup.estimate == pytest.approx(cell.speed.speedup_same_precision.median)
        (records,) = [c.records for c in recorded.cells if (c.arm, c.workload) == (cell.arm, cell.workload)]
        passes = [record.passes for record in records if record.passes]
        counted = count(passes, conversations(records), cell.arm.num_speculative_tokens)
        direct = acceptance_intervals(counted, Resampling(resamples=400))
        assert direct
        assert mine.pooled == direct.pooled


def test_requests_side_by_side_have_none_of_their_speed(tmp_path: Path) -> None:
    recorded = read_run(serve(tmp_path / "run", server_plan(concurrencies=(1, 4))))
    summary, known = summarise(recorded), intervals(recorded)
    one, four = (summary.cell("bf16", "dflash-3", "sums", at) for at in (1, 4))
    assert one
    assert four
    assert known.of(one).speedup
    assert known.of(four).pooled
    assert (known.of(four).tokens_per_s, known.of(four).speedup) == (None, None)
