"""What a run measures: the same prompts in the same order everywhere, drift spread over arms, warm-up kept out."""

import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import WARM_UP, ScriptedEngine, decode, small_plan

from mxq.engines import Completion, Sampling
from mxq.errors import MxqError, UsageError
from mxq.evaluate import read_run, run


def test_every_arm_measures_the_same_prompts_in_the_same_order(tmp_path: Path) -> None:
    plan, engine = small_plan(), ScriptedEngine()
    run(plan, tmp_path / "run", engine, decode)
    wanted = [ids for workload in plan.workloads for ids in workload.token_ids]
    seen = defaultdict(list)
    for target, method, k, ids in engine.calls:
        seen[target, method, k].append(ids)
    assert len(seen) == len(plan.arms) == 6
    for asked in seen.values():
        assert asked == [WARM_UP, *wanted]
    for cell in read_run(tmp_path / "run").cells:
        expected = next(w for w in plan.workloads if w.workload.name == cell.workload)
        assert [record.prompt_id for record in cell.records] == [prompt.id for prompt in expected.workload.prompts]
        assert cell.finished


def test_arms_take_turns_and_another_one_begins_with_every_prompt(tmp_path: Path) -> None:
    plan, engine = small_plan(names=["sums"]), ScriptedEngine()
    run(plan, tmp_path / "run", engine, decode)
    measured = engine.calls[len(plan.arms) :]
    rounds = [measured[i : i + 6] for i in range(0, len(measured), 6)]
    assert all(len({ids for *_, ids in turn}) == 1 for turn in rounds)
    assert len({turn[0][:3] for turn in rounds}) == len(rounds)


def test_repeats_come_when_every_arm_had_its_turn(tmp_path: Path) -> None:
    plan, engine = replace(small_plan(names=["sums"]), repeats=2), ScriptedEngine()
    run(plan, tmp_path / "together", engine, decode)
    assert len(engine.opened) == 1
    first, second = engine.calls[6 : 6 + 18], engine.calls[6 + 18 :]
    assert [ids for *_, ids in first] == [ids for *_, ids in second]
    assert first[0][:3] != second[0][:3]
    assert not set(engine.seeds[6 : 6 + 18]) & set(engine.seeds[6 + 18 :])
    apart = ScriptedEngine(together=False)
    run(plan, tmp_path / "apart", apart, decode)
    assert [arms[0].target.name for arms in apart.opened] == ["bf16", "mxfp4"] * 2
    recorded = read_run(tmp_path / "apart")
    assert [(cell.concurrency, cell.repeat) for cell in recorded.cells] == [(1, 0)] * 6 + [(1, 1)] * 6
    assert all(cell.facts["ran_beside"] for cell in recorded.cells)
    assert "records" not in recorded.cells[0].facts


def test_one_request_at_a_time_is_all_there_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scripted decodes one request at a time"):
        run(replace(small_plan(), concurrencies=(1, 4)), tmp_path / "run", ScriptedEngine(), decode)
    assert not (tmp_path / "run").exists()


def test_targets_that_do_not_fit_together_run_one_after_the_other(tmp_path: Path) -> None:
    plan, engine = small_plan(), ScriptedEngine(together=False)
    run(plan, tmp_path / "run", engine, decode)
    assert [{arm.target.name for arm in group} for group in engine.opened] == [{"bf16"}, {"mxfp4"}]
    assert read_run(tmp_path / "run").finished
    state = json.loads(next((tmp_path / "run/cells").glob("mxfp4-ar-*/cell.json")).read_text())
    assert state["ran_beside"] == ["mxfp4 ar", "mxfp4 dflash-3", "mxfp4 dflash-7"]


def test_a_prompt_has_one_seed_in_all_arms_and_its_own(tmp_path: Path) -> None:
    plan, engine = small_plan(), ScriptedEngine()
    run(plan, tmp_path / "run", engine, decode)
    by_prompt = defaultdict(set)
    for (*_, ids), seed in zip(engine.calls, engine.seeds, strict=True):
        by_prompt[ids].add(seed)
    assert all(len(seeds) == 1 for seeds in by_prompt.values())
    assert len(set.union(*by_prompt.values())) == len(by_prompt)


def test_what_a_record_holds(tmp_path: Path) -> None:
    run(small_plan(), tmp_path / "run", ScriptedEngine(), decode)
    lines = next((tmp_path / "run/cells").glob("bf16-dflash-3-sums-*/records.jsonl")).read_text().splitlines()
    record = json.loads(lines[0])
    assert record["prompt_id"] == "sums-0"
    assert record["output_tokens"] == len(record["token_ids"]) == 1 + sum(record["accepted"]) + 4
    assert record["text"] == decode(record["token_ids"])
    assert record["drafted"] == [3, 3, 3, 3]
    assert {"ttft_s", "duration_s", "finish_reason", "text_sha256", "started_at", "prompt_tokens"} <= record.keys()


def test_the_run_says_what_it_is(tmp_path: Path) -> None:
    plan = small_plan()
    run(plan, tmp_path / "run", ScriptedEngine(), decode)
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["command"]
    assert info["environment"]["versions"].keys() >= {"mxq", "python", "torch", "transformers"}
    assert info["environment"]["hardware"]["cores"] == os.cpu_count()
    definition = info["definition"]
    assert definition["targets"]["mxfp4"]["fingerprint"] == {"config_sha256": "mxfp4"}
    assert [workload["sha256"] for workload in definition["workloads"]] == ["sha of sums", "sha of talk"]
    assert definition["sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    assert (definition["thinking"], definition["template_sha256"]) == (False, "template")
    assert len(info["cells"]) == 12
    kept = [json.loads(line) for line in (tmp_path / "run/workloads/talk.jsonl").read_text().splitlines()]
    assert kept[1] == {"id": "talk-1", "messages": [{"role": "user", "content": "talk 1"}]}


def test_a_key_follows_everything_that_defines_a_cell() -> None:
    plan = small_plan()
    arm, workload = plan.arms[2], plan.workloads[0]
    base = plan.cell(arm, workload).key
    settings = plan.settings
    target = plan.targets["bf16"]
    assert plan.drafter is not None
    changed = {
        "semantics": replace(plan, settings=replace(settings, semantics=2)),
        "sampling": replace(plan, settings=replace(settings, sampling=Sampling(temperature=1.0))),
        "seed": replace(plan, settings=replace(settings, sampling=Sampling(seed=1))),
        "tokens": replace(plan, settings=replace(settings, max_tokens=65)),
        "thinking": replace(plan, settings=replace(settings, thinking=True)),
        "template": replace(plan, settings=replace(settings, template_sha256="other")),
        "dtype": replace(plan, settings=replace(settings, dtype="float32")),
        "target": replace(plan, targets={**plan.targets, "bf16": replace(target, fingerprint={"config_sha256": "x"})}),
        "options": replace(plan, settings=replace(settings, engine_args=("max-model-len=512",))),
        "variables": replace(plan, settings=replace(settings, engine_env=("A=1",))),
        "drafter": replace(plan, drafter=replace(plan.drafter, fingerprint={"config_sha256": "x"})),
    }
    keys = {name: other.cell(arm, workload).key for name, other in changed.items()}
    keys["workload"] = plan.cell(arm, plan.workloads[1]).key
    keys["arm"] = plan.cell(plan.arms[1], workload).key
    prompts = replace(workload, token_ids=((9,), *workload.token_ids[1:]))
    keys["token ids"] = plan.cell(arm, prompts).key
    keys["concurrency"] = plan.cell(arm, workload, 4).key
    keys["repeat"] = plan.cell(arm, workload, 1, 1).key
    assert base not in keys.values()
    assert len(set(keys.values())) == len(keys)
    # Where a model is, and what the user called it, does not matter; nor does the drafter of another arm.
    moved = replace(plan, targets={**plan.targets, "bf16": replace(target, spec="y", path=Path("/y"))})
    assert moved.cell(arm, workload).key == base
    plain = plan.arms[0]
    assert changed["drafter"].cell(plain, workload).key == plan.cell(plain, workload).key


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("accepted", (9, 0), "accepted 9 of 3 drafts"),
        ("accepted", (0, 0), "6 output tokens but the passes committed 3"),
        ("drafted", (3,), "2 accepted counts but 1 drafted"),
        ("finish_reason", "tired", "finish reason 'tired'"),
        ("ttft_s", 9.0, "first token after 9.0 s of 1.0 s"),
        ("token_ids", (), "0 output tokens"),
    ],
)
def test_impossible_counts_stop_the_run(tmp_path: Path, field: str, value: Any, message: str) -> None:
    good = Completion((5,) * 6, (2, 1), (3, 3), "length", 0.1, 1.0)

    class Broken(ScriptedEngine):
        def open(self, arms):  # type: ignore[no-untyped-def]
            from contextlib import nullcontext
            from types import SimpleNamespace

            spoilt = replace(good, **{field: value})
            plain = replace(good, accepted=(), drafted=())
            answers = [spoilt if arm.num_speculative_tokens else plain for arm in arms]
            return nullcontext([SimpleNamespace(generate=lambda *a, answer=answer, **k: answer) for answer in answers])

    with pytest.raises(MxqError, match="bf16 dflash-3 on sums-0") as caught:
        run(small_plan(budgets=[3]), tmp_path / "run", Broken(), decode)
    assert message in caught.value.message
    assert not next((tmp_path / "run/cells").glob("bf16-dflash-3-sums-*/records.jsonl")).read_bytes()
