"""The numbers of a run, against counts that were made up for the purpose."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine, decode, small_plan
from served import TOKENS, ServedCell, serve, server_plan

from mxq.analysis import CellSummary, Summary, summarise
from mxq.analysis.speed import Speed
from mxq.engines import EngineArm
from mxq.errors import InterruptedRunError, MxqError
from mxq.evaluate import Arm, Cell, Run, read_run, run


def measured(path: Path, engine: ScriptedEngine | None = None, **plan: object) -> Run:
    run(small_plan(**plan), path, engine or ScriptedEngine(), decode)  # type: ignore[arg-type]
    return read_run(path)


def speed_of(cell: CellSummary) -> Speed:
    assert cell.speed
    assert cell.throughput_withheld is None
    return cell.speed


def speedups(cell: CellSummary) -> tuple[float | None, float | None]:
    """Over plain decoding of the same target, and of bf16."""
    same, bf16 = speed_of(cell).speedup_same_precision, speed_of(cell).speedup_bf16
    return (same.median if same else None), (bf16.median if bf16 else None)


def fixed(arm: EngineArm, rng: random.Random) -> tuple[int, ...]:
    """Accept 3, 1 and 2 of K on bf16, and one draft fewer in the last pass on MXFP4."""
    if not arm.num_speculative_tokens:
        return ()
    return (3, 1, 2 if arm.target.name == "bf16" else 1)


def test_numbers_of_a_cell(tmp_path: Path) -> None:
    summary = summarise(measured(tmp_path / "run", ScriptedEngine(counts=fixed)))
    cell, other = summary.cell("bf16", "dflash-3", "sums"), summary.cell("mxfp4", "dflash-3", "sums")
    assert cell
    assert other
    assert cell.acceptance
    assert other.acceptance
    assert cell.acceptance.pooled == 3.0
    assert cell.acceptance.survival == pytest.approx((1, 2 / 3, 1 / 3))
    assert other.acceptance.pooled == pytest.approx(8 / 3)
    # 10 and 9 tokens at 130 tokens/s; plain decoding is at 100 tokens/s.
    assert cell.output_tokens == 30
    assert speed_of(cell).tokens_per_s.median == pytest.approx(130)
    assert (cell.repeats, len(speed_of(cell).by_repeat)) == (1, 1)
    assert speedups(cell)[0] == pytest.approx(1.3)
    assert speedups(other)[1] == pytest.approx(1.3)
    # The scripted engine's arms agree as far as their answers reach: 10 tokens here, 12 in plain decoding.
    assert cell.identity
    assert (cell.identity.identical, cell.identity.first_differences) == (0, (10, 10, 10))
    plain = summary.cell("bf16", "ar", "sums")
    assert plain
    assert plain.acceptance is None
    assert plain.identity is None
    assert speedups(plain) == (1.0, 1.0)
    assert speed_of(plain).latencies is None
    assert not summary.warnings


def test_speedups_name_their_baseline(tmp_path: Path) -> None:
    class Slow(ScriptedEngine):
        """MXFP4 decodes at half the speed."""

        def open(self, arms):  # type: ignore[no-untyped-def]
            from contextlib import nullcontext
            from types import SimpleNamespace

            with super().open(arms) as decoders:

                def wrapped(arm, decoder):  # type: ignore[no-untyped-def]
                    factor = 2 if arm.target.name == "mxfp4" else 1

                    def generate(*ids, **options):  # type: ignore[no-untyped-def]
                        done = decoder.generate(*ids, **options)
                        return replace(done, duration_s=done.duration_s * factor)

                    return SimpleNamespace(generate=generate)

                return nullcontext([wrapped(arm, d) for arm, d in zip(arms, decoders, strict=True)])

    summary = summarise(measured(tmp_path / "run", Slow(counts=fixed)))
    cell = summary.cell("mxfp4", "dflash-7", "talk")
    assert cell
    assert list(speedups(cell)) == pytest.approx([1.7, 0.85])


def test_idle_drafters_are_found_where_they_are(tmp_path: Path) -> None:
    def counts(arm: EngineArm, rng: random.Random) -> tuple[int, ...]:
        if not arm.num_speculative_tokens:
            return ()
        return (0, 0) if arm.target.name == "mxfp4" else (0, 1)

    summary = summarise(measured(tmp_path / "run", ScriptedEngine(counts=counts)))
    (warning,) = summary.warnings
    assert "exactly 1.000 for mxfp4 dflash-3 on sums" in warning
    assert "bf16 dflash" not in warning
    assert "mask_token_id" in warning


def test_an_incomplete_run_compares_equal_prompts(tmp_path: Path) -> None:
    def before(call: int) -> None:
        if call == 6 + 6 + 9:  # warm-up, one whole prompt of `sums`, half of the next
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        run(small_plan(), tmp_path / "run", ScriptedEngine(before=before), decode)
    summary = summarise(read_run(tmp_path / "run"))
    assert summary.prompts == {"sums": (2, 3), "talk": (0, 3)}
    assert summary.workloads == ("sums",)
    assert {cell.requests for cell in summary.cells} == {2}
    assert summary.as_json()["finished"] is False


def test_a_run_without_a_common_prompt_says_so(tmp_path: Path) -> None:
    def before(call: int) -> None:
        if call == 8:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        run(small_plan(), tmp_path / "run", ScriptedEngine(before=before), decode)
    with pytest.raises(MxqError, match="no prompt has been answered by all arms"):
        summarise(read_run(tmp_path / "run"))


def test_one_target_alone(tmp_path: Path) -> None:
    plan = small_plan()
    alone = replace(
        plan,
        targets={"mxfp4": plan.targets["mxfp4"]},
        arms=tuple(arm for arm in plan.arms if arm.target == "mxfp4"),
    )
    run(alone, tmp_path / "run", ScriptedEngine(counts=fixed), decode)
    summary = summarise(read_run(tmp_path / "run"))
    assert summary.targets == ("mxfp4",)
    cell = summary.cell("mxfp4", "dflash-3", "sums")
    assert cell
    assert speedups(cell)[0] == pytest.approx(1.3)
    assert speedups(cell)[1] is None
    assert Arm("mxfp4", "ar") in summary.run.arms


def served(path: Path, **options: Any) -> Summary:
    names = ("concurrencies", "repeats", "prompts", "budgets", "names")
    plan = server_plan(**{name: options.pop(name) for name in names if name in options})
    return summarise(read_run(serve(path / "run", plan, **options)))


def test_cells_of_servers_by_concurrency_over_repeats(tmp_path: Path) -> None:
    summary = served(tmp_path, repeats=3)
    assert summary.concurrencies == (1, 4)
    assert len(summary.cells) == 8
    assert {cell.concurrency for cell in summary.lowest} == {1}
    assert not summary.failed_checks
    assert not summary.warnings
    for at in (1, 4):
        plain, cell = (summary.cell("bf16", name, "sums", at) for name in ("ar", "dflash-3"))
        assert plain
        assert cell
        assert (cell.requests, cell.repeats, cell.output_tokens) == (12, 3, 12 * TOKENS)
        # Prefill and then a token every 10 ms; four side by side take 1.75 times that, and each repeat 2 % more.
        seconds = (0.02 + 0.01 * (TOKENS - 1)) * (1.75 if at == 4 else 1) * 1.02 + 0.001
        assert speed_of(plain).tokens_per_s.median == pytest.approx(at * TOKENS / seconds, rel=1e-6)
        decoding = speed_of(plain).decode_tokens_per_s
        assert decoding
        rate = at * 100 / (1.75 if at == 4 else 1)
        assert decoding.median == pytest.approx(rate / 1.02, rel=0.01)
        assert [decoding.lowest, decoding.highest] == pytest.approx([rate / 1.04, rate], rel=0.01)
        found = speed_of(cell).speedup_same_precision
        assert found
        assert found.repeats == 3
        # Within a repeat both arms are slower alike, so that ratios differ by far less than rates do.
        assert found.highest / found.lowest < 1.001
        rates = speed_of(cell).tokens_per_s
        assert rates.highest / rates.lowest > 1.03
        latencies = speed_of(cell).latencies
        assert latencies
        assert latencies.ttft.count == 36
        assert latencies.itl
        assert latencies.tpot
        assert latencies.itl.median_s > 2 * latencies.tpot.median_s  # a piece is a pass: some tokens


def test_speedups_are_ratios_within_a_repeat(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> None:
        # The machine is busy: each repeat is slower than the last, the plain arm's rival alone speeds up by it.
        times = {0: 1.0, 1: 2.0, 2: 8.0}[cell.repeat]
        made.now = [max(made.now) * times * (1.0 if cell.arm.method == "ar" else 0.5)]

    summary = served(tmp_path, repeats=3, concurrencies=(1,), change=change)
    plain, cell = summary.cell("bf16", "ar", "sums"), summary.cell("bf16", "dflash-3", "sums")
    assert plain
    assert cell
    one, two = speed_of(plain).by_repeat, speed_of(cell).by_repeat
    ratios = sorted(b.tokens_per_s / a.tokens_per_s for a, b in zip(one, two, strict=True))
    found = speed_of(cell).speedup_same_precision
    assert found
    assert [found.lowest, found.median, found.highest] == pytest.approx(ratios)


@pytest.mark.parametrize(("said", "why"), [("emulated", "emulated"), (None, "unknown"), ("native", None)])
def test_emulated_speed_is_not_given_as_that_of_mxfp4(tmp_path: Path, said: str | None, why: str | None) -> None:
    summary = served(tmp_path, mxfp4=said)
    for cell in summary.cells:
        assert cell.throughput_withheld == (why if cell.arm.target == "mxfp4" else None)
        assert (cell.speed is None) == (cell.throughput_withheld is not None)
        assert cell.acceptance or cell.arm.method == "ar"
    text = json.dumps([cell for cell in summary.as_json()["cells"] if cell["arm"]["target"] == "mxfp4"])
    assert ("tokens_per_s" in text) == ("speedup" in text) == (why is None)


def test_one_emulated_repeat_is_enough(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> dict[str, Any]:
        return {"server": {"mxfp4": "emulated" if cell.repeat == 1 else "native"}}

    summary = served(tmp_path, repeats=2, change=change)
    assert {c.throughput_withheld for c in summary.cells if c.arm.target == "mxfp4"} == {"emulated"}


@pytest.mark.parametrize(("facts", "why"), [({"mxfp4": "emulated"}, "emulated"), ({}, "unknown")])
def test_speed_in_this_process_is_withheld_unless_native(tmp_path: Path, facts: dict[str, Any], why: str) -> None:
    class Engine(ScriptedEngine):
        def facts(self) -> dict[str, Any]:
            return facts

    summary = summarise(measured(tmp_path / "run", Engine(counts=fixed)))
    assert {(cell.arm.target, cell.throughput_withheld) for cell in summary.cells} == {("bf16", None), ("mxfp4", why)}


def test_acceptance_from_counters_alone(tmp_path: Path) -> None:
    def change(cell: Cell, made: ServedCell) -> dict[str, Any] | None:
        if cell.arm.method == "ar":
            return None
        made.records = [replace(record, accepted=None, drafted=None) for record in made.records]
        return {"passes_from": "counters"}

    known, counted = served(tmp_path / "known"), served(tmp_path / "counted", change=change)
    for a, b in zip(known.cells, counted.cells, strict=True):
        if a.arm.method == "ar":
            continue
        assert a.acceptance
        assert b.acceptance
        assert (a.acceptance.source, b.acceptance.source) == ("passes", "counters")
        assert a.acceptance.survival == b.acceptance.survival
        assert a.acceptance.pooled == b.acceptance.pooled
        assert b.acceptance.conditional is None
    assert not counted.failed_checks


def test_what_servers_have_answered_so_far_is_shown(tmp_path: Path) -> None:
    plan = server_plan(names=["sums", "talk"], repeats=2)
    path = serve(tmp_path / "run", plan)
    for cell in read_run(path).cells:
        if cell.workload == "talk" or cell.repeat or (cell.arm.target, cell.concurrency) == ("mxfp4", 4):
            key = next(
                key
                for key, told in read_run(path).info["cells"].items()
                if told
                == {"arm": vars(cell.arm), "workload": cell.workload, "concurrency": cell.concurrency}
                | {"repeat": cell.repeat}
            )
            shutil.rmtree(path / "cells" / key)
    summary = summarise(read_run(path))
    assert summary.prompts == {"sums": (12, 12), "talk": (0, 12)}
    assert len(summary.cells) == 6
    assert summary.cell("mxfp4", "dflash-3", "sums", 4) is None
    assert {cell.repeats for cell in summary.cells} == {1}


def test_a_second_repeat_on_its_way_takes_nothing_back(tmp_path: Path) -> None:
    plan = replace(small_plan(), repeats=2)

    def before(call: int) -> None:
        if call == 6 + 36 + 8:  # warm-up, the whole first repeat, and a bit of the second
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        run(plan, tmp_path / "run", ScriptedEngine(before=before), decode)
    summary = summarise(read_run(tmp_path / "run"))
    assert summary.prompts == {"sums": (3, 3), "talk": (3, 3)}
    assert {cell.repeats for cell in summary.cells} == {1}


@pytest.mark.parametrize("facts", [{"server": 3, "counters": []}, {"checks": [{}]}, {"wall_s": "long"}], ids=str)
def test_facts_that_are_none_are_an_error_in_a_line(tmp_path: Path, facts: dict[str, Any]) -> None:
    path = serve(tmp_path / "run", server_plan(concurrencies=(1,)))
    file = next((path / "cells").glob("*/cell.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    with pytest.raises(MxqError, match=r"cell\.json does not hold"):
        summarise(read_run(path))


def spoil(path: Path, pattern: str, line: int) -> Path:
    """Make one line of a cell's records no record."""
    records = next(path.glob(f"cells/{pattern}/records.jsonl"))
    lines = records.read_bytes().splitlines(keepends=True)
    lines[line] = b"{}\n"
    records.write_bytes(b"".join(lines))
    return records


def test_a_damaged_line_takes_its_prompt_from_all_arms_and_no_more(tmp_path: Path) -> None:
    path, untouched = (serve(tmp_path / name, server_plan(repeats=2)) for name in ("run", "untouched"))
    spoil(path, "mxfp4-dflash-3-sums-c1-r0-*", 4)
    spoil(path, "bf16-dflash-3-sums-c4-r1-*", 7)
    summary, whole = summarise(read_run(path)), summarise(read_run(untouched))
    assert summary.prompts == {"sums": (10, 12)}
    assert {(cell.requests, cell.repeats) for cell in summary.cells} == {(10, 2)}
    assert len([warning for warning in summary.warnings if "not a possible record" in warning]) == 2
    # What the servers counted was of twelve answers: no check is made by it, and none fails.
    assert summary.failed_checks == []
    for cell, other in zip(summary.cells, whole.cells, strict=True):
        assert cell.throughput_withheld == (None if cell.concurrency == 1 else "damaged")
        if cell.acceptance:
            assert other.acceptance
            assert cell.acceptance.pooled != other.acceptance.pooled
    # One at a time, an answer that is lost takes its time with it.
    plain, before = (of.cell("bf16", "ar", "sums", 1) for of in (summary, whole))
    assert plain
    assert before
    assert speed_of(plain).tokens_per_s.median == pytest.approx(speed_of(before).tokens_per_s.median, rel=0.01)


def test_a_file_of_records_that_is_lost_takes_its_own_cell_only(tmp_path: Path) -> None:
    run(small_plan(), tmp_path / "run", ScriptedEngine(), decode)
    next((tmp_path / "run").glob("cells/mxfp4-dflash-7-sums-*/records.jsonl")).unlink()
    summary = summarise(read_run(tmp_path / "run"))
    assert summary.prompts == {"sums": (3, 3), "talk": (3, 3)}
    assert summary.cell("mxfp4", "dflash-7", "sums") is None
    assert len(summary.cells) == 11


def test_nothing_left_names_what_is_damaged(tmp_path: Path) -> None:
    path = serve(tmp_path / "run", server_plan(concurrencies=(1,), prompts=1))
    records = spoil(path, "bf16-ar-sums-*", 0)
    other = spoil(path, "mxfp4-ar-sums-*", 0)
    for file in path.glob("cells/*/records.jsonl"):
        if file not in (records, other):
            file.unlink()
    with pytest.raises(MxqError, match=r"no prompt is left that all arms have answered\. .*records\.jsonl"):
        summarise(read_run(path))
