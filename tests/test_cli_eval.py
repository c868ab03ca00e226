"""`mxq eval` as a user runs it: tables, JSON, resuming, and what each mistake says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from decoding import rewrite
from tiny import write_drafter, write_target
from torch import Tensor

from mxq import testbed
from mxq.cli import main

PROMPTS = ["Ann has 3 apples and buys 4 more. How many?", "Write a function.", "Tell me a story."]


def mxq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="mxq")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_target(path / "target")
    write_drafter(path / "drafter", path / "target")
    assert mxq("quantize", path / "target", path / "mxfp4").exit_code == 0
    write_target(path / "deep", layers=8)
    write_drafter(path / "deep-drafter", path / "deep")
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def arguments(models: Path, out: Path, *more: object) -> list[object]:
    return [
        *("eval", "--bf16", models / "target", "--drafter", models / "drafter", "--workload", models / "prompts.jsonl"),
        *("-k", 3, "--max-tokens", 12, "--out", out, *more),
    ]


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, mxq(*arguments(models, out, "--spec", "dflash", "--spec", "mtp"))


def test_tables_go_to_stdout_and_progress_to_stderr(finished: tuple[Path, Result]) -> None:
    _, result = finished
    assert result.exit_code == 0, result.output
    for words in ("Acceptance length, pooled", "Survival, dflash-3", "Survival, mtp-3", "tokens per second", "speedup"):
        assert words in result.stdout
    assert "without intervals" in result.stdout
    assert "9/9 requests" in result.stderr
    assert "requests" not in result.stdout
    assert "preserved" not in result.output
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_drafter_that_does_nothing_is_said_plainly(models: Path, tmp_path: Path) -> None:
    def silence(tensors: dict[str, Tensor]) -> None:
        """Both drafters propose token 0 (all logits are zero), which the target never emits (another is positive)."""
        for name, value in (("lm_head.weight", 0), ("mtp.norm.weight", -1), ("norm.weight", 0)):
            if name in tensors:
                (tensors[name][0] if name == "lm_head.weight" else tensors[name]).fill_(value)

    rewrite(models / "target", tmp_path / "target", silence)
    rewrite(models / "drafter", tmp_path / "drafter", silence)
    shutil.copy(models / "prompts.jsonl", tmp_path)
    out = tmp_path / "run"
    result = mxq(*arguments(tmp_path, out, "--spec", "dflash", "--spec", "mtp"))
    assert result.exit_code == 0, result.output  # it was measured, and measured right
    said = " ".join(result.stdout.split())
    assert "WARNING: acceptance length is exactly 1.000 for bf16 dflash-3 on prompts: not one draft" in said
    assert "target_layer_ids and mask_token_id" in said
    assert "config excludes (or ignores) them" in said
    assert len(json.loads(mxq("eval", "--show", out, "--json").stdout)["warnings"]) == 2


def test_show_prints_the_same_again_and_changes_nothing(finished: tuple[Path, Result]) -> None:
    out, result = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = mxq("eval", "--show", out)
    assert again.exit_code == 0
    assert again.stdout == result.stdout
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_json(finished: tuple[Path, Result]) -> None:
    value = json.loads(mxq("eval", "--show", finished[0], "--json").stdout)
    assert value["finished"] is True
    assert value["prompts"] == {"prompts": {"used": 3, "of": 3}}
    cells = {cell["label"]: cell for cell in value["cells"]}
    assert cells.keys() == {"bf16 ar", "bf16 mtp-3", "bf16 dflash-3"}
    plain, dflash = cells["bf16 ar"], cells["bf16 dflash-3"]
    assert plain["acceptance"] is None
    assert plain["speed"]["speedup_same_precision"] == {"repeats": 1, "median": 1.0, "lowest": 1.0, "highest": 1.0}
    acceptance = dflash["acceptance"]
    assert acceptance["pooled"] == pytest.approx(1 + sum(acceptance["survival"]))
    assert dflash["speed"]["tokens_per_s"]["median"] > 0
    assert dflash["throughput_withheld"] is None
    assert dflash["output_tokens"] == sum(
        json.loads(line)["output_tokens"]
        for line in next(finished[0].glob("cells/bf16-dflash-3-*/records.jsonl")).read_text().splitlines()
    )
    assert dflash["identity"]["requests"] == 3
    assert {check["name"] for check in value["checks"] if check["ok"] is False} <= {"drafts are accepted"}


def test_a_run_says_which_model_it_was(models: Path, finished: tuple[Path, Result]) -> None:
    config = json.loads((models / "target" / "config.json").read_text())["text_config"]
    told = json.loads((finished[0] / "run.json").read_text())["architecture"]
    assert told["model_type"] == config["model_type"]
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        assert told[name] == config[name]


def test_in_float32_speculation_changes_no_token(models: Path, tmp_path: Path) -> None:
    result = mxq(*arguments(models, tmp_path / "run", "--dtype", "float32", "--json"))
    assert result.exit_code == 0, result.output
    cells = {cell["label"]: cell for cell in json.loads(result.stdout)["cells"]}
    assert cells["bf16 dflash-3"]["identity"] == {"requests": 3, "identical": 3, "first_differences": []}


def test_bf16_and_mxfp4_side_by_side(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = mxq(*arguments(models, out, "--mxfp4", models / "mxfp4"))
    assert result.exit_code == 0, result.output
    assert "difference" in result.stdout
    assert "mxfp4 over" in " ".join(result.stdout.split())  # a heading that is folded
    assert "MXFP4 is emulated here" in " ".join(result.stdout.split())
    assert re.search(r"prompts +ar +[\d.]+ +emulated +1\.00x +- +-", result.stdout)
    compared = mxq("compare", out)
    # A random drafter: whether the target accepts any of its drafts is chance. Three prompts decide nothing either way.
    code, verdict = (1, "NONE") if "no draft was accepted on either side" in compared.stdout else (0, "UNDECIDED")
    assert compared.exit_code == code, compared.output
    assert f"Verdict: {verdict}, mxfp4 against bf16" in compared.stdout
    assert "not compared: MXFP4 is emulated here" in " ".join(compared.stdout.split())
    outputs = {}
    for target in ("bf16", "mxfp4"):
        lines = next(out.glob(f"cells/{target}-ar-*/records.jsonl")).read_text().splitlines()
        outputs[target] = [json.loads(line)["token_ids"] for line in lines]
    assert outputs["bf16"] != outputs["mxfp4"]  # the second target was really loaded
    alone = mxq("eval", "--mxfp4", models / "mxfp4", *arguments(models, tmp_path / "alone")[3:], "--json")
    assert alone.exit_code == 0, alone.output
    cells = json.loads(alone.stdout)["cells"]
    assert {cell["label"] for cell in cells} == {"mxfp4 ar", "mxfp4 dflash-3"}
    assert all(cell["speed"] is None and cell["throughput_withheld"] == "emulated" for cell in cells)


def test_answers_to_earlier_turns_need_room_too(models: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"id": "t", "turns": ["Hello.", "Bye."]}\n')
    result = mxq(*arguments(models, tmp_path / "run", "--workload", talk, "--max-tokens", 1024))
    assert result.exit_code == 2
    assert "talk, prompt t, turn 2: " in result.stderr
    assert "2 answers of up to 1024 exceed the model's 2048 positions" in result.stderr


def test_targets_with_other_tokens_are_refused(models: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(models / "mxfp4", other)
    (other / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    result = mxq(*arguments(models, tmp_path / "run", "--mxfp4", other))
    assert result.exit_code == 2
    assert "prompts, prompt prompts-0001: the two targets do not see the same tokens" in result.stderr
    # A template can make something else of the model's answers alone.
    template = (models / "mxfp4/chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template.replace("</think>", "</thought>", 1))
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"id": "t", "turns": ["Hello.", "Bye."]}\n')
    result = mxq(*arguments(models, tmp_path / "run", "--mxfp4", other, "--workload", talk))
    assert result.exit_code == 2
    assert "talk, prompt t, turn 2: the two targets do not see the same tokens" in result.stderr

    (other / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    result = mxq("eval", "--mxfp4", other, *arguments(models, tmp_path / "run")[3:])
    assert result.exit_code == 2
    assert "prompt prompts-0001: the chat template refuses the messages: no such role" in result.stderr
    (other / "chat_template.jinja").unlink()
    result = mxq("eval", "--mxfp4", other, *arguments(models, tmp_path / "run")[3:])
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr
    assert not (tmp_path / "run").exists()


# How Qwen3.5's own template treats the mode.
THINKING = """{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{{- 'assistant: ' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""


def test_thinking_is_part_of_what_is_measured(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "target", tmp_path / "target")
    (tmp_path / "target/chat_template.jinja").write_text(THINKING)
    words = arguments(models, tmp_path / "off")
    words[2] = tmp_path / "target"
    assert mxq(*words).exit_code == 0
    refused = mxq(*words, "--thinking")
    assert refused.exit_code == 2
    assert "thinking is False there, True now" in refused.stderr
    words[words.index(tmp_path / "off")] = tmp_path / "on"
    assert mxq(*words, "--thinking").exit_code == 0
    runs = [json.loads((tmp_path / name / "run.json").read_text())["definition"] for name in ("off", "on")]
    assert [run["thinking"] for run in runs] == [False, True]
    assert runs[0]["template_sha256"] == runs[1]["template_sha256"]
    assert runs[0]["workloads"][0]["sha256"] == runs[1]["workloads"][0]["sha256"]
    assert runs[0]["workloads"][0]["tokens_sha256"] != runs[1]["workloads"][0]["tokens_sha256"]


def test_a_model_that_cannot_think_says_so(models: Path, tmp_path: Path) -> None:
    result = mxq(*arguments(models, tmp_path / "run", "--thinking"))
    assert result.exit_code == 2
    assert "the chat template refuses the messages: this model cannot think" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_budget_beyond_the_drafters_block_is_warned_about(models: Path, tmp_path: Path) -> None:
    result = mxq(*arguments(models, tmp_path / "run", "-k", 20))
    assert result.exit_code == 0, result.output
    assert "warning: 20 speculative tokens" in result.stderr
    assert "trained to draft 15" in result.stderr
    again = mxq("eval", "--show", tmp_path / "run")
    assert "WARNING: -k 20 is more than" in " ".join(again.stdout.split())
    warnings = json.loads(mxq("eval", "--show", tmp_path / "run", "--json").stdout)["warnings"]
    assert sum("was trained to draft, 15 (block_size 16)" in warning for warning in warnings) == 1


def test_a_conversion_of_another_model_is_warned_about(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "target", tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"transformers_version": "99"}))
    said = "was converted from another model"
    words = ("--spec", "ar", "--mxfp4", models / "mxfp4", "--limit", 1)
    own = mxq(*arguments(models, tmp_path / "own", *words))
    assert own.exit_code == 0, own.output
    assert said not in own.output
    other = mxq(*arguments(models, tmp_path / "run", *words, "--bf16", tmp_path / "other"))
    assert other.exit_code == 0, other.output
    assert f"warning: {models}/mxfp4 {said}" in other.stderr
    warnings = json.loads(mxq("eval", "--show", tmp_path / "run", "--json").stdout)["warnings"]
    assert [said in warning for warning in warnings] == [True]


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"source": 1}', '{"source": {"fingerprint": 1}}', "{"])
def test_a_conversion_that_cannot_say_its_source_is_warned_about(models: Path, tmp_path: Path, manifest: str) -> None:
    shutil.copytree(models / "mxfp4", tmp_path / "mxfp4")
    words = ("--spec", "ar", "--mxfp4", tmp_path / "mxfp4", "--limit", 1, "--max-tokens", 1)
    (tmp_path / "mxfp4/mxq_manifest.json").write_text(manifest)
    result = mxq(*arguments(models, tmp_path / "run", *words))
    assert result.exit_code == 0, result.output
    assert "mxq_manifest.json" in result.stderr
    (tmp_path / "mxfp4/mxq_manifest.json").unlink()
    result = mxq(*arguments(models, tmp_path / "none", *words))
    assert result.exit_code == 0, result.output
    assert "warning" not in result.output.lower()


def test_a_run_with_other_budgets_says_which(models: Path, finished: tuple[Path, Result]) -> None:
    result = mxq(*arguments(models, finished[0], "-k", 5))
    assert result.exit_code == 2
    assert "holds another run: --spec ar mtp dflash there, ar dflash now; -k 3 there, 3 5 now\n" in result.stderr


def test_a_finished_run_is_only_shown_again(models: Path, finished: tuple[Path, Result]) -> None:
    out, first = finished
    again = mxq(*arguments(models, out, "--spec", "dflash", "--spec", "mtp"))
    assert again.exit_code == 0
    assert again.stdout == first.stdout
    assert "loading" not in again.stderr


def test_sampled_runs_are_repeatable_and_have_no_identity(models: Path, tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        sampling = ("--temperature", 0.8, "--top-p", 0.9, "--top-k", 20, "--seed", 7)
        result = mxq(*arguments(models, tmp_path / name, *sampling))
        assert result.exit_code == 0, result.output
        assert "identical" not in result.stdout
        lines = next((tmp_path / name).glob("cells/bf16-dflash-3-*/records.jsonl")).read_text().splitlines()
        texts.append([json.loads(line)["token_ids"] for line in lines])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (["--drafter", "{models}/deep-drafter"], 2, "num_target_layers is 8, the target's layers 4"),
        (["--drafter", "{models}/nowhere"], 2, "nowhere"),
        (["--workload", "gsm9k"], 2, "'gsm9k' is neither one of mxq's own nor a file"),
        (["--workload", "{models}/empty.jsonl"], 2, "empty.jsonl holds no prompts"),
        (["--workload", "{models}/broken.jsonl"], 2, "broken.jsonl, line 2: not JSON"),
        (["--workload", "{models}/prompts.jsonl"], 2, "two workloads are called 'prompts'"),
        (["--workload", "{models}/long.jsonl"], 2, "long, prompt long-0001: "),
        (["--max-tokens", "2048"], 2, "exceed the model's 2048 positions"),
        (["--mxfp4", "{models}/target"], 2, "is not quantized, so it is not the MXFP4 target"),
        (["--bf16", "{models}/mxfp4"], 2, "is quantized, so it is not the bf16 target"),
        (["--bf16", "{models}/deep", "--mxfp4", "{models}/mxfp4"], 2, "num_hidden_layers is 8 and 4"),
        (["--temperature", "-1"], 2, "temperature -1.0"),
        (["--temperature", "nan"], 2, "temperature nan"),
        (["--temperature", "inf"], 2, "temperature inf"),
        (["--top-p", "0"], 2, "top-p 0.0"),
        (["--top-p", "nan"], 2, "top-p nan"),
        (["--workload", "{models}/half.jsonl"], 2, "half.jsonl, line 2: prompt has half a character, "),
        (["--device", "abacus"], 2, "abacus"),
        (["--out", "{models}"], 2, "is not empty and holds no run"),
        (["--out", "{models}/prompts.jsonl"], 2, "is a file"),
        (["--show", "{models}"], 2, "give either --out or --show"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(models: Path, tmp_path: Path, change: list[str], code: int, message: str) -> None:
    (models / "empty.jsonl").write_text("\n")
    (models / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt": x}\n')
    (models / "long.jsonl").write_text(json.dumps({"prompt": "apple " * 3000}) + "\n")
    (models / "half.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y \\ud800"}\n')
    before = sorted(models.rglob("*"))
    out = tmp_path / "run"
    result = mxq(*arguments(models, out, *(word.format(models=models) for word in change)))
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout
    assert not out.exists()
    assert sorted(models.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --out or --show"),
        (["--out", "run"], "no target"),
        (["--out", "run", "--bf16", "x"], "no workload"),
        (["--out", "run", "--workload", "chat"], "no target"),
        (["--show", "nowhere"], "holds no run"),
        (["--out", "run", "--bf16", "x", "-k", "0"], "0 is not in the range"),
        (["--out", "run", "--bf16", "x", "--spec", "eagle"], "'eagle' is not one of"),
    ],
    ids=" ".join,
)
def test_incomplete_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = mxq("eval", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("hidden_size", 128, 2),
        ("vocab_size", 7, 1),
        ("num_target_layers", 9, 2),
        ("num_target_layers", "4", 1),
        ("num_hidden_layers", 10**12, 1),
        ("num_attention_heads", 3, 1),
        ("rope_theta", "x", 1),
        ("rms_norm_eps", None, 1),
        ("layer_types", 5, 1),
        ("dflash_config", [1], 1),
        ("dflash_config.mask_token_id", "767", 1),
        ("dflash_config.target_layer_ids", [1, 4], 2),
        ("dflash_config.target_layer_ids", 3, 1),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_any_weights_are_loaded(
    models: Path, tmp_path: Path, key: str, value: object, code: int
) -> None:
    shutil.copytree(models / "drafter", tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    outer, _, inner = key.rpartition(".")
    (config[outer] if outer else config)[inner] = value
    (tmp_path / "drafter/config.json").write_text(json.dumps(config))
    result = mxq(*arguments(models, tmp_path / "run", "--drafter", tmp_path / "drafter"))
    assert result.exit_code == code, result.output
    said = result.stderr.splitlines()
    assert said[0].startswith(f"error: {tmp_path}/drafter/config.json: ")
    assert inner in said[0] or (key, value) == ("vocab_size", 7)  # which the mask token is then outside of
    assert len(said) == 2
    assert not (tmp_path / "run").exists()


def test_a_target_without_its_own_drafter_needs_one(models: Path, tmp_path: Path) -> None:
    words = ("--bf16", models / "target", "--workload", models / "prompts.jsonl", "--out", tmp_path / "run")
    result = mxq("eval", *words)
    assert result.exit_code == 2
    assert "DFlash needs a drafter" in result.stderr
    assert "--drafter MODEL" in result.stderr


def test_help_has_examples() -> None:
    result = mxq("eval", "--help")
    assert result.exit_code == 0
    assert "mxq eval --bf16 testbed:dense --mxfp4 ./dense-mxfp4 --limit 8 --out ./run" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def start(words: list[object]) -> "subprocess.Popen[str]":
    code = "import sys; from mxq.cli import main; main(sys.argv[1:])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_records(path: Path, count: int) -> None:
    deadline = time.monotonic() + 600  # loading alone takes minutes on a busy machine
    while sum(len(p.read_bytes().splitlines()) for p in path.glob("cells/*/records.jsonl")) < count:
        assert time.monotonic() < deadline, "no records"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("kill", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 4)])
def test_stopped_and_continued_gives_the_same_answers(
    models: Path, tmp_path: Path, kill: signal.Signals, code: int
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"prompt": f"{prompt} ({i})"}) + "\n" for i in range(8) for prompt in PROMPTS))

    def words(out: Path) -> list[object]:
        return [*arguments(models, out)[:5], "--workload", many, "-k", 3, "--max-tokens", 12, "--out", out]

    with start(words(tmp_path / "stopped")) as process:
        wait_for_records(tmp_path / "stopped", 5)
        process.send_signal(kill)
        said = process.communicate()[1]
    assert process.returncode == code
    if kill == signal.SIGINT:
        assert "interrupted; " in said
        assert "run the same command again to continue" in said
        assert "Traceback" not in said
    for name in ("stopped", "whole"):
        with start(words(tmp_path / name)) as process:
            said = process.communicate()[1]
        assert process.returncode == 0, said
    for whole in (tmp_path / "whole/cells").iterdir():
        ours = [json.loads(line) for line in (whole / "records.jsonl").read_text().splitlines()]
        again = (tmp_path / "stopped/cells" / whole.name / "records.jsonl").read_text().splitlines()
        assert len(ours) == len(again) == 24
        for record, line in zip(ours, again, strict=True):
            other = json.loads(line)
            assert [record[name] for name in ("prompt_id", "token_ids", "accepted")] == [
                other[name] for name in ("prompt_id", "token_ids", "accepted")
            ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", testbed.NAMES)
def test_the_testbed_with_defaults(kind: str, tmp_path: Path) -> None:
    """All five workloads, the testbed's own drafter, trained weights: drafts are really accepted, on both targets."""
    assert mxq("quantize", f"testbed:{kind}", tmp_path / "mxfp4").exit_code == 0
    models = ("--bf16", f"testbed:{kind}", "--mxfp4", tmp_path / "mxfp4")
    methods = ("--spec", "mtp", "--spec", "dflash", "--check-answers")
    result = mxq("eval", *models, *methods, "--limit", 1, "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert not value["warnings"]
    assert value["prompts"].keys() == {"arithmetic", "maths", "functions", "programs", "chat"}
    speculative = [cell for cell in value["cells"] if cell["acceptance"]]
    assert len(speculative) == 20
    assert all(cell["acceptance"]["pooled"] > 2 for cell in speculative)
    assert sum(cell["cut_by_length"] for cell in value["cells"]) == 0
    assert sum(cell["checked"] for cell in value["cells"]) == 6 * 4
