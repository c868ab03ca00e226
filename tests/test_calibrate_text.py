"""Calibration text: which documents, in which order, as which tokens; and what is said when it cannot be had."""

import json
import shutil
from pathlib import Path

import calibration_text
import pytest
import torch
from transformers import AutoTokenizer

from mxq import testbed
from mxq.calibrate import ALGORITHMS, OPTIONS, Calibration, check_options
from mxq.calibrate.text import Samples, tokens
from mxq.errors import UsageError

DENSE = testbed.path("testbed:dense")
VOCABULARY = 768


def drawn(
    set_: str | None, *, samples: int = 4, length: int = 64, seed: int = 0, model: str = "testbed:dense"
) -> Samples:
    return tokens(Calibration(set_, samples, length, seed), model, DENSE, VOCABULARY)


def text_of(samples: Samples) -> str:
    decoded: str = AutoTokenizer.from_pretrained(DENSE).decode(samples.ids.flatten())
    return decoded


def test_the_testbeds_text_is_what_the_tool_writes_and_no_held_out_prompt_is_in_it() -> None:
    written = testbed.calibration_text().read_text()
    assert written == "".join(f"{line}\n" for line in calibration_text.lines())
    assert len(written) <= 250_000
    prompts = [json.loads(line)["prompt"] for line in written.splitlines()]
    held_out = {
        json.loads(line)["prompt"]
        for name in testbed.WORKLOADS
        for line in (testbed.prompts_dir() / f"{name}.jsonl").read_text().splitlines()
    }
    assert len(held_out) > 300
    assert not held_out & set(prompts)
    assert len(set(prompts)) == len(prompts)


def test_testbed_models_have_a_text_of_five_families_with_answers() -> None:
    made = drawn(None, samples=128, length=512)
    assert made.ids.shape == (128, 512)
    assert made.ids.dtype == torch.int64
    text = text_of(made)
    for part in ("The answer is", "```python", " = 0", "<|im_start|>assistant", "<|im_end|><|im_start|>user"):
        assert text.count(part) > 10, part
    assert "<|endoftext|>" not in text  # the padding


def test_the_same_seed_draws_the_same_samples_and_another_one_others() -> None:
    first = drawn(None)
    assert torch.equal(first.ids, drawn(None).ids)
    assert first.facts == drawn(None).facts
    other = drawn(None, seed=1)
    assert not torch.equal(first.ids, other.ids)
    assert first.facts["sha256"] != other.facts["sha256"]
    assert first.facts | {"sha256": "", "documents": 0} == {
        "set": "testbed", "samples": 4, "length": 64, "seed": 0, "documents": 0, "sha256": "",
    }  # fmt: skip


def test_another_model_needs_a_text_to_be_named() -> None:
    with pytest.raises(UsageError, match=r"no calibration text for Qwen/Qwen3\.5-27B.*; give --calib") as caught:
        drawn(None, model="Qwen/Qwen3.5-27B")
    assert caught.value.exit_code == 2


def test_workloads_by_name_are_prompts_up_to_where_the_answer_begins() -> None:
    text = text_of(drawn("chat,maths", samples=8, length=128))
    assert "<think>\n\n</think>\n\n<|im_end|><|im_start|>user" in text
    assert "Solve for" in text
    with pytest.raises(UsageError, match="workload 'chatt' is neither"):
        drawn("chat,chatt")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "Plain words.\nMore of them.\n", "Plain words.\nMore of them.\n<|im_end|>"),
        ("a.jsonl", '{"text": "Plain words."}\n', "Plain words.<|im_end|>"),
        (
            "b.jsonl",
            '{"prompt": "Why?", "response": "So."}\n',
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nSo.<|im_end|>",
        ),
        (
            "c.jsonl",
            '{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}\n',
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nSo.<|im_end|>",
        ),
    ],
)
def test_a_document_becomes_what_the_model_would_read(name: str, content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    length = len(AutoTokenizer.from_pretrained(DENSE)(expected)["input_ids"])
    assert text_of(drawn(str(tmp_path / name), samples=1, length=length)) == expected


def test_a_long_plain_text_is_shuffled_in_pieces(tmp_path: Path) -> None:
    lines = [f"Line {number} of a long text that goes on and on.\n" for number in range(2000)]
    (tmp_path / "long.txt").write_text("".join(lines))
    beginnings = {text_of(drawn(str(tmp_path / "long.txt"), seed=seed))[:12] for seed in range(5)}
    assert len(beginnings) > 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.txt", " \n\n", "is empty"),
        ("a.jsonl", '{"text": "Too short."}\n', r"has \d tokens; 4 samples of 64 are 256; give more text$"),
        ("a.txt", "word " * 70, r"has \d+ tokens; .*; give more text, or fewer samples: it is enough for [123]$"),
        ("a.jsonl", '{"text": ""}\n', "line 1: no text"),
        ("a.jsonl", '{"words": "x"}\n', "line 1: no text"),
        ("a.jsonl", '{"messages": ["x"]}\n', "line 1: 'messages' is not a list"),
        ("a.jsonl", '{"messages": []}\n', "line 1: no message is the user's"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "line 1: no content"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "line 1: text has half a character"),
        ("a.jsonl", "not JSON\n", "line 1: not JSON"),
    ],
)
def test_text_that_cannot_be_used_is_refused_in_one_line(
    name: str, content: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=complaint) as caught:
        drawn(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    calibration = Calibration(None, 4, 64, 0)
    for vocabulary in (767, 248_320):
        with pytest.raises(UsageError, match=f"the tokenizer does not fit: its ids go to 767.* {vocabulary:,} rows"):
            tokens(calibration, "testbed:dense", DENSE, vocabulary)
    assert len(tokens(calibration, "testbed:dense", DENSE, 1024).ids) == 4


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    shutil.copy(DENSE / "config.json", tmp_path)
    with pytest.raises(UsageError, match="has no tokenizer; put"):
        tokens(Calibration(None, 4, 64, 0), "testbed:dense", tmp_path, VOCABULARY)


def test_a_tokenizer_or_template_that_fails_is_an_error_of_a_line(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DENSE / name, tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "Why?"}\n')
    (tmp_path / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    calibration = Calibration(str(text), 4, 64, 0)
    with pytest.raises(UsageError, match="the chat template refuses the messages: division by zero"):
        tokens(calibration, "testbed:dense", tmp_path, VOCABULARY)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UsageError, match="cannot load the tokenizer"):
        tokens(calibration, "testbed:dense", tmp_path, VOCABULARY)


def test_options_are_checked_against_the_algorithms_own() -> None:
    for algorithm in ALGORITHMS:
        assert check_options(algorithm, {}, "recipe r") == OPTIONS[algorithm]
    assert check_options("gptq", {"damp_percent": 0.02, "desc_act": False}, "r")["damp_percent"] == 0.02
    for algorithm, options, complaint in (
        ("gptaq", {}, "r: there is no algorithm 'gptaq'; use one of gptq, awq, smoothquant"),
        ("awq", {"alpha": 0.5}, "r: awq has no option 'alpha'; it has none"),
        ("gptq", {"block_size": True}, "r: block_size is True; give a whole number"),
        ("gptq", {"desc_act": 1}, "r: desc_act is 1; give true or false"),
        ("smoothquant", {"alpha": 1.5}, "r: alpha is 1.5; give a number between 0 and 1"),
    ):
        with pytest.raises(UsageError) as caught:
            check_options(algorithm, options, "r")
        assert str(caught.value).startswith(complaint)
