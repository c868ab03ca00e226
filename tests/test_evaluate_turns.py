"""Conversations: each turn is a request, a later one is sent behind what the arm itself answered."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from decoding import Models
from scripted import ScriptedEngine, decode, small_plan

from mxq.analysis import summarise
from mxq.cli import main
from mxq.errors import UsageError
from mxq.evaluate import Plan, read_run, run
from mxq.evaluate.matrix import TokenizedWorkload
from mxq.workloads import ChatTemplate, Workload, load


def encode(messages: Sequence[tuple[str, str]]) -> list[int]:
    """Stand in for a chat template and tokenizer."""
    return list("".join(f"<{role}>{content}" for role, content in messages).encode())


def plan(tmp_path: Path) -> Plan:
    """A plain arm and a speculative one per target, on two conversations of three turns and two."""
    path = tmp_path / "talks.jsonl"
    lines = [{"id": "a", "turns": ["1?", "2?", "3?"]}, {"id": "b", "turns": ["4?", "5?"]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return with_workload(small_plan(budgets=[3]), load(str(path)))


def with_workload(plan: Plan, workload: Workload) -> Plan:
    ids = tuple(tuple(encode(prompt.messages)) if prompt.turn == 1 else None for prompt in workload.prompts)
    return replace(plan, workloads=(TokenizedWorkload(workload, ids),))


def sent(engine: ScriptedEngine, target: str, method: str) -> list[str]:
    """Return what an arm was asked, warm-up left out."""
    return [bytes(ids).decode() for at, how, _, ids in engine.calls if (at, how) == (target, method)][1:]


def test_a_turn_is_sent_behind_the_arms_own_answers(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    run(plan(tmp_path), tmp_path / "run", engine, decode, encode)
    for cell in read_run(tmp_path / "run").cells:
        one, two, three, four, _ = cell.records
        assert [record.prompt_id for record in cell.records] == ["a", "a, turn 2", "a, turn 3", "b", "b, turn 2"]
        assert [record.turn for record in cell.records] == [1, 2, 3, 1, 2]
        assert sent(engine, cell.arm.target, cell.arm.method) == [
            "<user>1?",
            f"<user>1?<assistant>{one.text}<user>2?",
            f"<user>1?<assistant>{one.text}<user>2?<assistant>{two.text}<user>3?",
            "<user>4?",
            f"<user>4?<assistant>{four.text}<user>5?",
        ]
        assert [record.prompt_tokens for record in cell.records] == [
            len(text) for text in sent(engine, cell.arm.target, cell.arm.method)
        ]
        assert (one.prompt_sha256, four.prompt_sha256) == (None, None)
        assert two.prompt_sha256 != three.prompt_sha256
        for impossible in ({"turn": 1}, {"turn": 0}, {"turn": True}, {"prompt_sha256": None}):
            with pytest.raises(ValueError, match="prompt hash"):
                replace(two, **impossible).check(cell.arm.num_speculative_tokens)


@pytest.mark.parametrize("call", [5, 9, 13, 17])
def test_stopped_within_a_conversation_and_continued(tmp_path: Path, call: int) -> None:
    def stop(number: int) -> None:
        if number == call:
            raise KeyboardInterrupt

    whole, engine = ScriptedEngine(), ScriptedEngine()
    run(plan(tmp_path), tmp_path / "whole", whole, decode, encode)
    with pytest.raises(Exception, match="interrupted"):
        run(plan(tmp_path), tmp_path / "run", ScriptedEngine(before=stop), decode, encode)
    run(plan(tmp_path), tmp_path / "run", engine, decode, encode)
    for ours, theirs in zip(read_run(tmp_path / "run").cells, read_run(tmp_path / "whole").cells, strict=True):
        assert [record.token_ids for record in ours.records] == [record.token_ids for record in theirs.records]
        assert [record.prompt_sha256 for record in ours.records] == [record.prompt_sha256 for record in theirs.records]


def test_turns_are_part_of_what_defines_a_cell(tmp_path: Path) -> None:
    both = plan(tmp_path)
    first = with_workload(both, load(str(tmp_path / "talks.jsonl"), turns=1))
    assert {cell.key for cell in both.cells()}.isdisjoint(cell.key for cell in first.cells())
    facts = both.definition()["workloads"][0]
    assert (facts["prompts"], facts["conversations"]) == (5, 2)
    assert "conversations" not in first.definition()["workloads"][0]


def test_an_engine_without_turns_refuses_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="talks has conversations"):
        run(plan(tmp_path), tmp_path / "run", ScriptedEngine(), decode)
    assert not (tmp_path / "run").exists()


def test_later_turns_are_compared_where_arms_were_asked_the_same(tmp_path: Path) -> None:
    """Answers of the scripted arms differ in length: a second turn is then another question, and no difference more."""
    run(plan(tmp_path), tmp_path / "run", ScriptedEngine(), decode, encode)
    summary = summarise(read_run(tmp_path / "run"))
    cell = summary.cell("bf16", "dflash-3", "talks")
    assert cell is not None
    assert cell.identity is not None
    assert cell.requests == 5
    assert (cell.identity.requests, cell.identity.identical) == (2, 0)


def test_published_workloads_are_measured_in_process(dense_models: Models, tmp_path: Path) -> None:
    """What the models saw is what the chat template makes of the conversation, for every arm by itself."""
    rows: dict[str, list[dict[str, object]]] = {
        "gsm8k": [{"question": "2 + 2?", "answer": "#### 4"}, {"question": "3 + 3?", "answer": "#### 6"}],
        "mt-bench": [{"prompt": ["Tell me a story.", "Shorter."], "prompt_id": 81}],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "run"
    words = [
        *("eval", "--bf16", dense_models.target, "--drafter", dense_models.drafter, "-k", 3, "--max-tokens", 8),
        *("--workload", "gsm8k", "--workload", "mt-bench", "--data-dir", tmp_path, "--limit", 9, "--out", out),
    ]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert "gsm8k has 2 prompts, fewer than the limit of 9; taking all" in result.stderr
    assert "mt-bench has conversations (1): each turn counts as a request" in " ".join(result.stdout.split())
    measured = read_run(out)
    assert measured.prompts == {"gsm8k": 2, "mt-bench": 2}
    source = measured.info["sources"]["gsm8k"]
    assert source["dataset"] == "openai/gsm8k"
    assert source["template"].endswith("\\boxed{}.")
    assert list(source["files"]) == [str(tmp_path / "gsm8k.jsonl")]
    idle = CliRunner().invoke(main, [*map(str, words[:9]), "--workload", "chat", *map(str, words[-6:])])
    assert (idle.exit_code, "no published workload" in idle.stderr) == (2, True)
    template = ChatTemplate(dense_models.target, thinking=False)
    kept = load(str(out / "workloads/mt-bench.jsonl")).prompts
    for cell in measured.cells:
        if cell.workload == "mt-bench":
            first, second = cell.records
            ids = template.encode(kept[1].conversation([first.text]))
            assert second.prompt_tokens == len(ids) > first.prompt_tokens
            assert second.prompt_sha256 == hashlib.sha256(str(ids).replace(" ", "").encode()).hexdigest()
