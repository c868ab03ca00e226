"""lm-eval's tasks through servers, as a user runs them: the real lm-eval, and stand-ins of vLLM's servers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from decoding import Models, write_mxfp4
from lm_tasks import SAMPLES, write_tasks
from on_servers import Fakes
from test_cli_eval_servers import running
from transformers import AutoTokenizer

from mxq.analysis.tasks import task_scores
from mxq.cli import main
from mxq.engines.server import serving
from mxq.errors import MxqError
from mxq.evaluate import read_run
from mxq.evaluate import tasks as evaluate_tasks
from mxq.evaluate.tasks import Asked, load_tasks

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

Eval = Callable[..., Result]


def mxq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="mxq")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("lm-eval") / "tasks")


@pytest.fixture(scope="module")
def mxfp4(dense_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mxfp4(dense_models.target, tmp_path_factory.mktemp("converted") / "mxfp4", weight_only=False)


@pytest.fixture
def evaluate(fakes: Fakes, dense_models: Models, mxfp4: Path, tasks: Path, tmp_path: Path) -> Eval:
    """`mxq eval` of the bf16 target, or of both, on one prompt, into tmp_path/run; more options follow."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "prompt": "Hello"}) + "\n")
    always = ("--bf16", dense_models.target, "--workload", prompts, "--max-tokens", 4, "--out", tmp_path / "run")

    def call(*more: object, both: bool = False) -> Result:
        include = ("--lm-eval-include", tasks) if "--lm-eval" in more else ()
        started = () if "--base-url" in more else ("--hardware", "h200", "--spec", "ar")
        second = ("--mxfp4", mxfp4) if both else ()
        return mxq("eval", "--engine", "vllm", *always, *started, *second, *include, *more)

    return call


def asked(fakes: Fakes) -> list[dict[str, Any]]:
    """What lm-eval sent since servers were last told how to behave."""
    path = fakes.directory / "asked.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def samples(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_targets_are_asked_once_and_compared_sample_by_sample(
    evaluate: Eval, fakes: Fakes, tmp_path: Path, dense_models: Models
) -> None:
    result = evaluate("--lm-eval", "toy,toy_text", "--concurrency", 3, "--json", both=True)
    assert result.exit_code == 0, result.stderr
    assert "mxfp4 ar: asking toy_text" in result.stderr
    assert "lm-eval: 100% (16/16 requests)" in result.stderr
    assert "Requesting API" not in result.stderr
    scores = {(score["task"], score["metric"]): score for score in json.loads(result.stdout)["lm_eval"]}
    run = tmp_path / "run" / "lm-eval"
    for task, metric, files in (
        ("toy", "acc", ("toy/samples_toy_choice.jsonl", "toy/samples_toy_half.jsonl")),
        ("toy_half", "acc", ("toy/samples_toy_half.jsonl",)),
        ("toy_text", "exact_match", ("toy_text/samples_toy_text.jsonl",)),
    ):
        mine = scores[task, metric]
        values = {}
        for role in ("bf16", "mxfp4"):
            values[role] = [sample[metric] for file in files for sample in samples(run / role / file)]
            assert mine["scores"][role]["value"] == pytest.approx(sum(values[role]) / len(values[role]), abs=1e-12)
            assert mine["scores"][role]["samples"] == len(values[role])
        differences = [new - base for base, new in zip(values["bf16"], values["mxfp4"], strict=True)]
        assert any(differences), "the stand-ins answer alike: this shows nothing"
        assert mine["change"]["estimate"] == pytest.approx(sum(differences) / len(differences), abs=1e-12)
        assert mine["change"]["lower"] < mine["change"]["estimate"] < mine["change"]["upper"]
        assert mine["change"]["prompts"] == len(differences)
    assert scores["toy", "acc"]["group"]
    assert scores["toy_half", "acc"]["part_of"] == "toy"
    stderr = json.loads((run / "bf16/toy_text/results.json").read_text())["lm_eval"]["results"]["toy_text"]
    assert scores["toy_text", "exact_match"]["scores"]["bf16"]["stderr"] == stderr["exact_match_stderr,none"] > 0
    brier = scores["toy_half", "brier_score"]
    assert (brier["change"], brier["why_not"]) == (None, "no mean of its samples")

    # What was sent: token ids of the target's own tokenizer, greedy, and nothing of generation_config.json's.
    encode = AutoTokenizer.from_pretrained(dense_models.target)
    sent = asked(fakes)
    texts = [body for body in sent if not body.get("echo")]
    questions = [sample["arguments"][0][0] for sample in samples(run / "bf16/toy_text/samples_toy_text.jsonl")]
    ids = [encode(question, add_special_tokens=False)["input_ids"] for question in questions]
    assert sorted(body["prompt"][0] for body in texts) == sorted(ids * 2)
    assert all((body["temperature"], body["repetition_penalty"], body["max_tokens"]) == (0, 1.0, 12) for body in texts)
    assert all(body["logprobs"] == 1 for body in sent if body.get("echo"))

    # The same command finds everything done; one more task is all that another one asks.
    fakes.do("")
    again = evaluate("--lm-eval", "toy,toy_text", "--concurrency", 3, both=True)
    assert again.exit_code == 0, again.stderr
    assert fakes.starts == []
    shown = mxq("eval", "--show", tmp_path / "run")
    assert "lm-eval's tasks, asked of plain decoding" in shown.stdout
    assert "brier_score" not in shown.stdout, "parts of a group are in JSON only"
    more = evaluate("--lm-eval", "toy_half", "--concurrency", 3, both=True)
    assert more.exit_code == 0, more.stderr
    assert len(fakes.starts) == 2
    assert "no mean of its" in more.stdout
    other = evaluate("--lm-eval", "toy_text", "--concurrency", 3, "--lm-eval-limit", 2, both=True)
    assert other.exit_code == 2
    assert "was asked with another limit" in other.stderr


def test_prompts_through_the_chat_template(evaluate: Eval, tmp_path: Path) -> None:
    result = evaluate("--lm-eval", "toy_text", "--lm-eval-chat", "--lm-eval-limit", 2)
    assert result.exit_code == 0, result.stderr
    results = tmp_path / "run/lm-eval/bf16/toy_text"
    (first, second) = samples(results / "samples_toy_text.jsonl")
    assert first["arguments"][0][0].startswith("<|im_start|>user\nAnn has 0 apples")
    assert second["arguments"][0][0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert json.loads((results / "results.json").read_text())["definition"]["chat_template"]["thinking"] is False


def test_a_server_that_runs_already_is_asked(
    evaluate: Eval, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-this-server")
    (plain, at), (mtp, there) = running(""), running("", method="mtp")
    with (
        serving(plain, "some-name", tmp_path / "log", ready_s=60),
        serving(mtp, "some-name", tmp_path / "log2", ready_s=60),
    ):
        how = ("--lm-eval", "toy_text", "--lm-eval-limit", 3, "--served-as", "some-name", "--base-url")
        wrong = evaluate(*how, f"bf16 mtp-3={there}")
        assert wrong.exit_code == 2, wrong.stderr
        assert wrong.stderr.splitlines() == [
            "error: --lm-eval without a server that decodes plainly from bf16",
            "  -> give --base-url 'bf16 ar=URL'",
        ]
        result = evaluate(*how, f"bf16 ar={at}")
        assert result.exit_code == 0, result.stderr
    (score,) = task_scores(read_run(tmp_path / "run"))
    assert (score.scores["bf16"].samples, score.change, score.why_not) == (3, None, "one target")


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("no-echo", 1, r"does not say how likely the tokens of a prompt are (echo with logprobs)"),
        ("no-harness", 1, "answers 500"),
        ("short", 1, "lm-eval's task toy_choice: a sample has "),
    ],
)
def test_a_server_that_cannot_answer(
    evaluate: Eval, fakes: Fakes, tmp_path: Path, how: str, code: int, reason: str
) -> None:
    fakes.do(how)
    result = evaluate("--lm-eval", "toy_choice")
    assert result.exit_code == code
    assert reason in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "run").glob("lm-eval/*/*/results.json"))
    if how == "no-echo":  # which generating needs not
        assert evaluate("--lm-eval", "toy_text").exit_code == 0
    fakes.do("")
    assert evaluate("--lm-eval", "toy_choice").exit_code == 0


def test_wrong_usage_is_a_line_and_makes_nothing(evaluate: Eval, fakes: Fakes, tasks: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tasks, broken)
    (broken / "toy_text.jsonl").unlink()
    text = (broken / "toy_text.yaml").read_text()
    (broken / "toy_text.yaml").write_text(text.replace(str(tasks), str(broken)))
    (broken / "unsafe.yaml").write_text((broken / "toy_choice.yaml").read_text() + "unsafe_code: true\n")
    (broken / "unsafe.yaml").write_text((broken / "unsafe.yaml").read_text().replace("toy_choice\n", "unsafe\n"))
    for more, code, reason in (
        (("--lm-eval", "toy", "--lm-eval-include", tmp_path / "none"), 2, "none is no directory"),
        (("--lm-eval", "toy_text", "--lm-eval-include", broken), 1, "lm-eval's task toy_text cannot be loaded: "),
        (("--lm-eval", "unsafe", "--lm-eval-include", broken), 2, "unsafe runs code that the model writes"),
    ):
        result = evaluate(*more)
        assert (result.exit_code, reason in result.stderr) == (code, True), result.stderr
        assert len(result.stderr.splitlines()) == 2
        assert not (tmp_path / "run").exists()
    assert fakes.starts == []


def test_an_unknown_task_and_data_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    known = evaluate_tasks._manager(Asked(("arc_easy",)))  # once: it reads 14,000 files
    monkeypatch.setattr(evaluate_tasks, "_manager", lambda asked: known)
    with pytest.raises(MxqError, match="has no task 'helaswag'") as unknown:
        load_tasks(Asked(("helaswag",)))
    assert (unknown.value.exit_code, "hellaswag" in str(unknown.value.hint)) == (2, True)
    with pytest.raises(MxqError, match="arc_easy cannot be loaded: Couldn't reach 'allenai/ai2_arc'") as missing:
        load_tasks(Asked(("arc_easy",)))
    assert missing.value.exit_code == 1


def test_what_was_changed_or_is_of_something_else_is_refused(evaluate: Eval, tmp_path: Path) -> None:
    assert evaluate("--lm-eval", "toy_choice", both=True).exit_code == 0
    run, found = read_run(tmp_path / "run"), tmp_path / "run/lm-eval/mxfp4/toy_choice"
    assert task_scores(run)[0].change is not None
    results = json.loads((found / "results.json").read_text())

    def changed(change: Callable[[dict[str, Any]], object]) -> None:
        value = json.loads(json.dumps(results))
        change(value)
        (found / "results.json").write_text(json.dumps(value))

    changed(lambda value: value["lm_eval"]["configs"]["toy_choice"].update(num_fewshot=5))
    assert task_scores(run)[0].why_not == "the task was another one"
    changed(lambda value: value["lm_eval"]["results"]["toy_choice"].update({"acc,none": 0.9}))
    assert task_scores(run)[0].why_not == "no mean of its samples"
    changed(lambda value: value["definition"].update(target={}))
    with pytest.raises(MxqError, match="is of another target than its run"):
        task_scores(run)
    changed(lambda value: value.pop("lm_eval"))
    with pytest.raises(MxqError, match="is not what lm-eval gives"):
        task_scores(run)
    changed(lambda value: None)
    lines = found / "samples_toy_choice.jsonl"
    lines.write_text(lines.read_text().replace('"acc": 0.0', '"acc": 1.0'))
    with pytest.raises(MxqError, match="is not what lm-eval's results are of"):
        task_scores(run)
    assert len(samples(lines)) == SAMPLES
