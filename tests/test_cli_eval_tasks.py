"""`mxq eval --lm-eval` used wrongly, or without lm-eval: no lm-eval is needed to say so."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from on_servers import Fakes

from mxq.cli import main


@pytest.mark.parametrize(
    ("given", "said", "hint"),
    [
        (("--lm-eval", "x", "--engine", "in-process"), "--lm-eval without --engine vllm", "give --engine vllm"),
        (("--lm-eval", "x,"), "--lm-eval 'x,' has an empty name", "write --lm-eval TASK,TASK"),
        (("--lm-eval-limit", "3"), "--lm-eval-limit without --lm-eval", "give --lm-eval TASK"),
        (("--lm-eval-chat",), "--lm-eval-chat without --lm-eval", "give --lm-eval TASK"),
        (("--lm-eval", "x"), "lm-eval, which is not installed", "pip install 'mxq[lm-eval]'"),
    ],
)
def test_wrong_usage_is_a_line_and_makes_nothing(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], said: str, hint: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": "Hello"}) + "\n")
    run = ("--bf16", "testbed:dense", "--spec", "ar", "--workload", str(prompts), "--out", str(tmp_path / "run"))
    engine = () if "--engine" in given else ("--engine", "vllm", "--hardware", "h200")
    result = CliRunner().invoke(main, ["eval", *run, *engine, *given], prog_name="mxq")
    assert result.exit_code == 2, result.output
    first, second = result.stderr.splitlines()
    assert said in first
    assert hint in second
    assert not (tmp_path / "run").exists()
    assert fakes.starts == []
