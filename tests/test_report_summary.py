"""The numbers of a run, against counts that were made up for the purpose."""

import random
from pathlib import Path

import pytest
from scripted import ScriptedEngine, decode, small_plan

from mxq.engines import EngineArm
from mxq.errors import InterruptedRunError, MxqError
from mxq.evaluate import Arm, Run, read_run, run
from mxq.report import summarise


def measured(path: Path, engine: ScriptedEngine | None = None, **plan: object) -> Run:
    run(small_plan(**plan), path, engine or ScriptedEngine(), decode)  # type: ignore[arg-type]
    return read_run(path)


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
    assert cell.throughput.output_tokens == 30
    assert cell.throughput.tokens_per_s == pytest.approx(130)
    assert cell.speedup_same_precision == pytest.approx(1.3)
    assert other.speedup_bf16 == pytest.approx(1.3)
    # The scripted engine's arms agree as far as their answers reach: 10 tokens here, 12 in plain decoding.
    assert cell.identity
    assert (cell.identity.identical, cell.identity.first_differences) == (0, (10, 10, 10))
    plain = summary.cell("bf16", "ar", "sums")
    assert plain
    assert plain.acceptance is None
    assert plain.identity is None
    assert plain.speedup_bf16 == 1.0
    assert not summary.warnings


def test_speedups_name_their_baseline(tmp_path: Path) -> None:
    class Slow(ScriptedEngine):
        """MXFP4 decodes at half the speed."""

        def open(self, arms):  # type: ignore[no-untyped-def]
            from contextlib import nullcontext
            from dataclasses import replace
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
    assert cell.speedup_same_precision == pytest.approx(1.7)
    assert cell.speedup_bf16 == pytest.approx(0.85)


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
    from dataclasses import replace

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
    assert cell.speedup_same_precision == pytest.approx(1.3)
    assert cell.speedup_bf16 is None
    assert Arm("mxfp4", "ar") in summary.run.arms
