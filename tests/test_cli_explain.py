"""`mxq eval --explain` as a user runs it: what it writes, shows again, continues, and what each mistake says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tiny import write_drafter, write_target

from mxq import testbed
from mxq.cli import main
from mxq.errors import MxqError
from mxq.evaluate import read_run
from mxq.explain import read_explanations

PROMPTS = ["Ann has 3 apples and buys 4 more. How many?", "Write a function.", "Tell me a story."]


def mxq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="mxq")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_target(path / "target")
    write_drafter(path / "drafter", path / "target")
    assert mxq("quantize", path / "target", path / "mxfp4").exit_code == 0
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def arguments(models: Path, out: Path, *more: object) -> list[object]:
    return [
        *("eval", "--bf16", models / "target", "--mxfp4", models / "mxfp4", "--drafter", models / "drafter"),
        *("--workload", models / "prompts.jsonl", "-k", 3, "--max-tokens", 12, "--out", out, *more),
    ]


@pytest.fixture(scope="module")
def explained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "run"
    methods = ("--spec", "dflash", "--spec", "mtp", "-k", 2)
    return out, mxq(*arguments(models, out, *methods, "--explain", "--explain-every", 2))


def again(models: Path, out: Path, *more: object) -> Result:
    return mxq(*arguments(models, out, "--spec", "dflash", "--spec", "mtp", "-k", 2, *more))


@pytest.fixture
def copy(explained: tuple[Path, Result], tmp_path: Path) -> Path:
    return Path(shutil.copytree(explained[0], tmp_path / "copy"))


def test_a_run_is_explained_after_it_is_measured(explained: tuple[Path, Result]) -> None:
    out, result = explained
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (out / "explain").iterdir()) == [
        "dflash-3-prompts.json",  # the largest budget of each method
        "mtp-3-prompts.json",
    ]
    assert "Why it changed" in result.stdout
    assert result.stdout.index("Acceptance length") < result.stdout.index("Why it changed")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "explaining dflash-3, prompts: 100% (6/6 prompts)" in result.stderr
    run = read_run(out)
    (plain,) = [cell for cell in run.cells if cell.arm.label == "bf16 ar"]
    for one in read_explanations(out, run.info["definition"]):
        assert [prompt.prompt_id for prompt in one.prompts] == [record.prompt_id for record in plain.records]
        assert [prompt.answer_tokens for prompt in one.prompts] == [record.output_tokens for record in plain.records]
        # Every second token, beginning with another one in every other prompt, and never the last.
        assert [prompt.places for prompt in one.prompts] == [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9), (0, 2, 4, 6, 8, 10)]
        assert one.read == (("final norm",) if one.method == "mtp" else ("layer 2", "layer 3"))


def test_show_shows_it_again(explained: tuple[Path, Result]) -> None:
    out, result = explained
    for words in ((), ("--explain",)):
        shown = mxq("eval", "--show", out, *words)
        assert shown.exit_code == 0
        assert shown.stdout == result.stdout
    value = json.loads(mxq("eval", "--show", out, "--json").stdout)["explain"]
    assert [(part["method"], part["num_speculative_tokens"]) for part in value["parts"]] == [("dflash", 3), ("mtp", 3)]
    for part in value["parts"]:
        effects = part["effects"]
        total = effects["features"]["estimate"] + effects["logits"]["estimate"]
        assert effects["total"]["estimate"] == pytest.approx(total)
        assert (part["prompts"], part["places"], part["every"]) == (3, 17, 2)
    assert value["all_workloads"].keys() == {"dflash-3", "mtp-3"}


def test_what_is_there_is_not_made_again(models: Path, copy: Path) -> None:
    kept = (copy / "explain/mtp-3-prompts.json").stat().st_mtime_ns
    before = (copy / "explain/dflash-3-prompts.json").read_text()
    (copy / "explain/dflash-3-prompts.json").unlink()
    result = again(models, copy, "--explain", "--explain-every", 2)
    assert result.exit_code == 0, result.output
    assert "explaining dflash-3, prompts: 100% (3/3 prompts)" in result.stderr
    assert (copy / "explain/mtp-3-prompts.json").stat().st_mtime_ns == kept
    remade = json.loads((copy / "explain/dflash-3-prompts.json").read_text())
    assert remade["prompts"] == json.loads(before)["prompts"]
    assert remade["definition"] == json.loads(before)["definition"]
    result = again(models, copy, "--explain", "--explain-every", 2)
    assert "loading" not in result.stderr


def test_an_interrupted_explanation_goes_on(models: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(copy / "explain")
    calls = []

    def interrupt(*given: Any, **options: Any) -> Any:
        calls.append(given)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return factorial(*given, **options)

    from mxq.decode.factorial import factorial

    monkeypatch.setattr("mxq.explain.measure.factorial", interrupt)
    result = again(models, copy, "--explain", "--explain-every", 2)
    assert result.exit_code == 4
    assert "interrupted; 1 of 2 parts of the explanation were made" in result.stderr
    assert len(list((copy / "explain").iterdir())) == 1
    monkeypatch.undo()
    assert again(models, copy, "--explain", "--explain-every", 2).exit_code == 0


def test_explaining_with_another_stride_is_refused_at_once(models: Path, copy: Path) -> None:
    shutil.rmtree(next(copy.glob("cells/mxfp4-ar-*")))  # something to measure, were it not refused before
    result = again(models, copy, "--explain")
    assert result.exit_code == 2
    assert "-3-prompts.json was made with --explain-every 2, not 4" in result.stderr
    assert "give that, or remove the file" in result.stderr
    assert not list(copy.glob("cells/mxfp4-ar-*"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda value: value["prompts"][0]["accepted"][2].__setitem__(0, 4), "accepted 4 of 3 drafts"),
        (lambda value: value["prompts"][0]["divergence"].pop(), "12 tokens, 11 divergences"),
        (lambda value: value["prompts"][1]["divergence"].__setitem__(0, "0"), "not a list of float numbers"),
        (lambda value: value["prompts"][0]["places"].__setitem__(0, 1000), "places that are not in the answer"),
        (lambda value: value["prompts"][0]["places"].__setitem__(0, 10**400), "too large"),
        (lambda value: value["prompts"][0]["drift"].__setitem__(0, []), "drift that is not over the prompt and "),
        (lambda value: value["prompts"][0].pop("flips"), "flips"),
        (lambda value: value["prompts"][0]["drift"].pop(), "drift is not that of 2 layers"),
        (lambda value: value["prompts"].clear(), "drift is not that of"),
        (lambda value: value.__setitem__("definition", []), "is not what explaining writes"),
        (lambda value: value.__setitem__("format", 9), "has format 9"),
        (lambda value: value["definition"].__setitem__("explaining", 9), "it has another explaining"),
        (lambda value: value["definition"].__setitem__("dtype", "float32"), "it has another dtype"),
        (lambda value: value["definition"]["targets"].pop("bf16"), "it has another targets"),
        (lambda value: value["definition"].__setitem__("num_speculative_tokens", 5), "it has another name"),
    ],
)
def test_a_file_that_cannot_be_is_one_line(copy: Path, damage: Any, said: str) -> None:
    path = copy / "explain/dflash-3-prompts.json"
    value = json.loads(path.read_text())
    damage(value)
    path.write_text(json.dumps(value))
    result = mxq("eval", "--show", copy)
    assert result.exit_code in (1, 2)
    assert str(path) in result.stderr
    assert said in result.stderr
    assert "remove the file" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00"])
def test_a_torn_file_is_one_line(copy: Path, text: str) -> None:
    path = copy / "explain/dflash-3-prompts.json"
    path.write_text(text)
    with pytest.raises(MxqError, match="remove the file"):
        read_explanations(copy, read_run(copy).info["definition"])


def test_of_a_sampled_run_greedy_answers_are_explained(
    models: Path, explained: tuple[Path, Result], tmp_path: Path
) -> None:
    words = ("--temperature", 1, "--explain", "--explain-every", 2)
    result = mxq(*arguments(models, tmp_path / "run", *words))
    assert result.exit_code == 0, result.output
    sampled, greedy = read_run(tmp_path / "run"), read_run(explained[0])
    said = [{c.arm.label: c for c in run.cells}["bf16 ar"].records[0].token_ids for run in (sampled, greedy)]
    assert said[0] != said[1]
    (one,) = read_explanations(sampled.path, sampled.info["definition"])
    assert one.prompts == read_explanations(greedy.path, greedy.info["definition"])[0].prompts


def test_later_turns_belong_to_their_conversation(models: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"id": "t", "turns": ["Hello.", "Bye."]}\n{"id": "u", "turns": ["Good day.", "Bye."]}\n')
    words = arguments(models, tmp_path / "run", "--explain", "--json")
    words[words.index(models / "prompts.jsonl")] = talk
    result = mxq(*words)
    assert result.exit_code == 0, result.output
    (part,) = json.loads(result.stdout)["explain"]["parts"]
    assert (part["prompts"], part["conversations"]) == (4, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--explain", "--spec", "ar"], "--explain with --spec ar alone"),
        (["--explain-every", "2"], "--explain-every without --explain"),
        (["--explain", "--engine", "vllm", "--hardware", "h200"], "--explain with --engine vllm"),
        (["--explain", "--explain-every", "0"], "0 is not in the range"),
    ],
)
def test_mistakes(models: Path, tmp_path: Path, words: list[str], message: str) -> None:
    result = mxq(*arguments(models, tmp_path / "run", *words))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", ["bf16", "mxfp4"])
def test_both_targets_are_needed(models: Path, tmp_path: Path, missing: str) -> None:
    words = arguments(models, tmp_path / "run", "--explain")
    del words[words.index(f"--{missing}") : words.index(f"--{missing}") + 2]
    result = mxq(*words)
    assert result.exit_code == 2
    assert f"--explain without --{missing}" in result.stderr
    assert not (tmp_path / "run").exists()


def test_what_is_not_explained_cannot_be_shown(models: Path, copy: Path) -> None:
    shutil.rmtree(copy / "explain")
    assert mxq("eval", "--show", copy).exit_code == 0
    result = mxq("eval", "--show", copy, "--explain")
    assert result.exit_code == 2
    assert "explains nothing" in result.stderr


def test_targets_that_do_not_fit_together_are_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxq.engines.inprocess import InProcessEngine

    monkeypatch.setattr(InProcessEngine, "free_bytes", lambda self: 1 << 20)
    result = mxq(*arguments(models, tmp_path / "run", "--explain"))
    assert result.exit_code == 1
    assert "--explain needs both targets in memory at once" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", testbed.NAMES)
def test_the_testbed_loses_what_its_arms_lose(kind: str, tmp_path: Path) -> None:
    """Both corners that decoding has are near what it measured, though at other places of the answers."""
    assert mxq("quantize", f"testbed:{kind}", tmp_path / "mxfp4").exit_code == 0
    models = ("--bf16", f"testbed:{kind}", "--mxfp4", tmp_path / "mxfp4", "--workload", "functions", "-k", 7)
    result = mxq("eval", *models, "--limit", 2, "--explain", "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    (part,) = value["explain"]["parts"]
    pooled = {cell["label"]: cell["acceptance"]["pooled"] for cell in value["cells"] if cell["acceptance"]}
    lengths = [corner["estimate"] for corner in part["lengths"].values()]
    assert lengths[0] == pytest.approx(pooled["bf16 dflash-7"], abs=1)
    assert lengths[3] == pytest.approx(pooled["mxfp4 dflash-7"], abs=1.5)
    assert 0 < part["divergence"]["mean"]["estimate"] < 1
    assert all(0.5 < read["answers"]["cosine"] < 1 for read in part["drift"])
