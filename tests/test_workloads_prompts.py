"""Prompt files: what is accepted, what identifies a set, and what each mistake says."""

import json
from pathlib import Path

import pytest

from mxq import testbed
from mxq.errors import UsageError
from mxq.workloads import PUBLISHED, Prompt, load


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_prompts_and_conversations(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    spec = write(tmp_path / "mine.jsonl", {"prompt": "2+2?", "answer": "4"}, "", {"id": 7, "messages": talk})
    workload = load(spec)
    assert workload.name == "mine"
    assert workload.prompts == (
        Prompt("mine-0001", (("user", "2+2?"),), answer="4"),
        Prompt("7", (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"))),
    )


def test_a_line_separator_inside_a_string_is_not_a_line_end(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    assert load(str(path)).prompts[0].messages == (("user", "one\u2028two"),)


def test_kept_prompts_read_back_as_the_same_set(tmp_path: Path) -> None:
    first = load(write(tmp_path / "a.jsonl", {"prompt": "x", "tests": "assert f(1) == 2"}, {"prompt": "y"}))
    again = load(write(tmp_path / "b.jsonl", *(prompt.as_json() for prompt in first.prompts)))
    assert again.prompts == first.prompts
    assert again.sha256 == first.sha256


def test_the_fingerprint_follows_what_is_sent(tmp_path: Path) -> None:
    lines = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}]
    base = load(write(tmp_path / "base.jsonl", *lines)).sha256
    assert load(write(tmp_path / "answered.jsonl", {**lines[0], "answer": "1"}, lines[1])).sha256 == base
    for name, changed in {
        "order": lines[::-1],
        "text": [{"id": "a", "prompt": "x "}, lines[1]],
        "id": [{"id": "c", "prompt": "x"}, lines[1]],
        "fewer": lines[:1],
    }.items():
        assert load(write(tmp_path / f"{name}.jsonl", *changed)).sha256 != base, name
    assert load(str(tmp_path / "base.jsonl"), limit=1).sha256 == load(str(tmp_path / "fewer.jsonl")).sha256


def test_a_limit_beyond_the_file_and_repeated_prompts_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = load(write(tmp_path / "mine.jsonl", {"prompt": "same"}, {"prompt": "same"}), limit=5)
    assert len(workload.prompts) == 2
    said = capsys.readouterr().err
    assert "2 prompts, fewer than the limit of 5" in said
    assert "more than once (1 of 2 prompts)" in said


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no prompts"),
        (["", "  "], "holds no prompts"),
        ([{"prompt": "x"}, '{"prompt": '], "line 2: not JSON (Expecting value at column 12)"),
        (["[" * 100_000], "line 1: not JSON"),
        (['{"prompt": "x", "n": ' + "9" * 5000 + "}"], "line 1: not JSON (a number has too many digits)"),
        ([{"prompt": "\ud83d!"}], 'line 1: prompt has half a character, "\\ud83d"'),
        ([{"prompt": "x"}, {"prompt": "x", "id": "\udc00"}], "line 2: id has half a character"),
        ([{"prompt": "x", "tests": "assert '\ud83d'"}], "line 1: tests has half a character"),
        (["[1]"], "line 1: list instead of an object"),
        ([{"question": "x"}], "line 1: neither 'prompt' nor 'messages'"),
        ([{"prompt": "x", "messages": []}], "line 1: both 'prompt' and 'messages'"),
        ([{"prompt": " "}], 'line 1: prompt is " "'),
        ([{"prompt": 3}], "line 1: prompt is 3"),
        ([{"messages": []}], "line 1: 'messages' is not a list of messages"),
        ([{"messages": ["hi"]}], "line 1: a message has role None"),
        ([{"messages": [{"role": "user"}]}], "line 1: the user message's content is null"),
        ([{"messages": [{"role": "assistant", "content": "hi"}]}], "line 1: the last message is the assistant's"),
        ([{"id": True, "prompt": "x"}], "line 1: id is true"),
        ([{"turns": []}], "line 1: 'turns' is not a list of texts"),
        ([{"turns": "x"}], "line 1: 'turns' is not a list of texts"),
        ([{"turns": ["x"] * 200_000}], "line 1: 200,000 turns"),
        ([{"turns": ["x", None]}], "line 1: turn 2 is null"),
        ([{"turns": ["x"], "prompt": "x"}], "line 1: both 'prompt' and 'turns'"),
        ([{"turns": ["x", "y"], "answer": "4"}], "line 1: 'turns' with a reference answer"),
        ([{"id": "a", "turns": ["x", "y"]}, {"id": "a, turn 2", "prompt": "x"}], "id 'a, turn 2' is on line 1"),
        ([{"prompt": "x", "answer": 4}], "line 1: answer is 4"),
        ([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}], "id 'a' is on line 1 and again on line 2"),
        ([{"id": 1, "prompt": "x"}, {"id": "1", "prompt": "y"}], "id '1' is on line 1 and again on line 2"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, lines: list[object], message: str) -> None:
    spec = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(UsageError) as caught:
        load(spec)
    assert message in caught.value.message
    assert spec in caught.value.message
    assert caught.value.hint


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot read"):
        load(str(tmp_path / "bad.jsonl"))


def test_a_directory_is_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        load(str(tmp_path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        load("gsm9k")
    assert "'gsm9k'" in caught.value.message
    assert all(name in str(caught.value.hint) for name in (*testbed.WORKLOADS, *PUBLISHED))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one(limit: int) -> None:
    with pytest.raises(UsageError, match="limit"):
        load("chat", limit)
