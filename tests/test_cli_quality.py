"""`mxq eval --quality` as a user runs it: its numbers, what it writes, shows again, continues, and each mistake."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from decoding import reference, reference_logits
from tiny import write_target
from torch.nn import functional as F

from mxq.cli import main
from mxq.convert import dequantize, dequantize_run
from mxq.errors import MxqError
from mxq.evaluate import Request, read_run
from mxq.quality import Recorded, measure_and_judge, read_qualities
from mxq.workloads import ChatTemplate

PROMPTS = ["Ann has 3 apples and buys 4 more. How many?", "Write a function.", "Tell me a story.", "Write a function."]
BOOK = "It was a dark and stormy night; the rain fell in torrents. " * 6


def mxq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="mxq")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_target(path / "target")
    assert mxq("quantize", path / "target", path / "mxfp4", "--recipe", "mxfp4-weight-only").exit_code == 0
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (path / "book.txt").write_text(BOOK)
    lines = [BOOK[:100], BOOK[100:250], BOOK[:100]]
    (path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return path


def arguments(models: Path, out: Path, *more: object) -> list[object]:
    return [
        *("eval", "--bf16", models / "target", "--mxfp4", models / "mxfp4", "--spec", "ar", "--dtype", "float32"),
        *("--workload", models / "prompts.jsonl", "--max-tokens", 12, "--out", out, *more),
    ]


def with_texts(models: Path, window: int = 50) -> list[object]:
    texts = ("--quality-text", models / "book.txt", "--quality-text", models / "lines.jsonl")
    return ["--quality", *texts, "--quality-window", window]


@pytest.fixture(scope="module")
def judged(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, mxq(*arguments(models, out, *with_texts(models)))


@pytest.fixture
def copy(judged: tuple[Path, Result], tmp_path: Path) -> Path:
    return Path(shutil.copytree(judged[0], tmp_path / "copy"))


def qualities(out: Path) -> dict[str, Recorded]:
    return {one.name: one for one in read_qualities(out, read_run(out).info["definition"])}


def test_it_is_measured_after_the_run_and_shown(judged: tuple[Path, Result]) -> None:
    out, result = judged
    assert result.exit_code == 0, result.output
    found = sorted(path.name for path in (out / "quality").iterdir())
    assert found == ["answers-prompts.json", "text-book.json", "text-lines.json"]
    assert "Quality on the bf16 target's own greedy answers" in result.stdout
    assert "Quality on texts that were given" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "answers and windows in" in result.stderr


def test_numbers_are_those_of_transformers_and_torch(judged: tuple[Path, Result], models: Path, tmp_path: Path) -> None:
    """Log-probabilities and divergence in float64 on transformers' own logits of the same tokens."""
    dequantize_run.run(dequantize.plan(models / "mxfp4"), tmp_path / "simulation", "mxfp4")
    both = [reference(models / "target"), reference(tmp_path / "simulation")]
    out = judged[0]
    (plain,) = [cell for cell in read_run(out).cells if cell.arm.label == "bf16 ar"]
    template = ChatTemplate(models / "target", thinking=False)
    book, found = template.tokens(BOOK), qualities(out)
    texts = [
        (template.encode([("user", prompt)]), list(r.token_ids))
        for prompt, r in zip(PROMPTS, plain.records, strict=True)
    ]
    windows = [(book[begin : begin + 1], book[begin + 1 : begin + 50]) for begin in range(0, len(book), 50)]
    assert len(windows) > 2
    for name, expected in (("prompts", texts), ("book", windows)):
        assert len(found[name].read) == len(expected)
        for one, (before, told) in zip(found[name].read, expected, strict=True):
            logits = [reference_logits(model, [*before, *told])[len(before) - 1 : -1].double() for model in both]
            nlls = [F.cross_entropy(each, torch.tensor(told), reduction="none") for each in logits]
            log_p, log_q = (each.log_softmax(-1) for each in logits)
            kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
            assert one.bf16_nll == pytest.approx(nlls[0].tolist(), rel=1e-3, abs=1e-4)
            assert one.mxfp4_nll == pytest.approx(nlls[1].tolist(), rel=1e-3, abs=1e-4)
            assert one.divergence == pytest.approx(kl.tolist(), rel=1e-2, abs=1e-5)
            unlike = [i for i, (a, b) in enumerate(zip(*logits, strict=True)) if a.argmax() != b.argmax()]
            assert list(one.unlike) == unlike
    assert found["prompts"].read[0].divergence != pytest.approx(found["prompts"].read[0].divergence[::-1], rel=1e-2)
    assert max(map(max, (one.divergence for one in found["book"].read))) > 1e-3


def test_show_shows_it_again(judged: tuple[Path, Result]) -> None:
    out, result = judged
    for words in ((), ("--quality",)):
        shown = mxq("eval", "--show", out, *words)
        assert shown.exit_code == 0
        assert shown.stdout == result.stdout
    value = json.loads(mxq("eval", "--show", out, "--json").stdout)["quality"]
    assert [(part["kind"], part["name"], part["window"]) for part in value["parts"]] == [
        ("answers", "prompts", None),
        ("text", "book", 50),
        ("text", "lines", 50),
    ]
    for part, one in zip(value["parts"], qualities(out).values(), strict=True):
        nats = [n for read in one.read for n in read.mxfp4_nll]
        assert part["mxfp4_perplexity"]["estimate"] == pytest.approx(math.exp(sum(nats) / len(nats)))
        assert part["tokens"] == len(nats)
    answers, book, lines = value["parts"]
    assert answers["ratio"]["prompts"] == 3  # two of the four prompts say the same
    assert book["ratio"]["prompts"] == book["read"]  # windows of a single text
    assert lines["ratio"]["prompts"] == 2  # texts, of which one is there twice


def test_what_is_there_is_not_made_again(models: Path, copy: Path) -> None:
    kept = (copy / "quality/text-book.json").stat().st_mtime_ns
    before = json.loads((copy / "quality/answers-prompts.json").read_text())
    (copy / "quality/answers-prompts.json").unlink()
    result = mxq(*arguments(models, copy, *with_texts(models)))
    assert result.exit_code == 0, result.output
    assert "measuring quality, prompts: 100% (4/4 answers and windows)" in result.stderr
    assert (copy / "quality/text-book.json").stat().st_mtime_ns == kept
    remade = json.loads((copy / "quality/answers-prompts.json").read_text())
    assert (remade["read"], remade["definition"]) == (before["read"], before["definition"])
    assert "loading" not in mxq(*arguments(models, copy, *with_texts(models))).stderr


def test_an_interrupted_measurement_goes_on(models: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(copy / "quality")
    calls = []

    def interrupt(*given: Any) -> Any:
        calls.append(given)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return compare_on(*given)

    from mxq.decode.divergence import compare_on

    monkeypatch.setattr("mxq.quality.measure.compare_on", interrupt)
    result = mxq(*arguments(models, copy, *with_texts(models)))
    assert result.exit_code == 4
    assert "interrupted; 1 of 3 parts of the quality were measured" in result.stderr
    assert [path.name for path in (copy / "quality").iterdir()] == ["answers-prompts.json"]
    monkeypatch.undo()
    assert mxq(*arguments(models, copy, *with_texts(models))).exit_code == 0


def test_other_windows_and_other_texts_are_refused_at_once(models: Path, copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(next(copy.glob("cells/mxfp4-ar-*")))  # something to measure, were it not refused before
    result = mxq(*arguments(models, copy, *with_texts(models, window=40)))
    assert result.exit_code == 2
    assert "text-book.json was made with --quality-window 50, not 40" in result.stderr
    (tmp_path / "book.txt").write_text("Another one.")
    words = ("--quality", "--quality-text", tmp_path / "book.txt", "--quality-window", 50)
    result = mxq(*arguments(models, copy, *words))
    assert result.exit_code == 2
    assert "text-book.json was made of another text" in result.stderr
    assert not list(copy.glob("cells/mxfp4-ar-*"))


def test_another_run_is_refused_as_such(models: Path, copy: Path) -> None:
    result = mxq(*arguments(models, copy, "--quality", "--max-tokens", 11))
    assert result.exit_code == 2
    assert "holds another run: max_tokens is 12 there, 11 now" in result.stderr


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda value: value["read"][0]["divergence"].pop(), "11 divergences, 12 and 12 log-probabilities"),
        (lambda value: value["read"][1]["bf16_nll"].__setitem__(0, "0"), "not a list of nats"),
        (lambda value: value["read"][1]["bf16_nll"].__setitem__(0, -0.1), "not a list of nats"),
        (lambda value: value["read"][1]["divergence"].__setitem__(0, math.nan), "not a list of nats"),
        (lambda value: value["read"][1]["mxfp4_nll"].__setitem__(0, math.inf), "not a list of nats"),
        (lambda value: value["read"][0].__setitem__("unlike", [3, 3]), "tokens that are not there, in order"),
        (lambda value: value["read"][0].__setitem__("unlike", [12]), "tokens that are not there, in order"),
        (lambda value: value["read"][0].__setitem__("unlike", [True]), "tokens that are not there, in order"),
        (lambda value: value["read"][0].__setitem__("unlike", 3), "is not what measuring quality writes"),
        (lambda value: value["read"][0].__setitem__("cluster", ["x"]), "an id that is no text"),
        (lambda value: value["read"][0].__setitem__("id", value["read"][1]["id"]), "or one twice"),
        (lambda value: value["read"].clear(), "no answer or window"),
        (lambda value: value["read"].pop(), "3 answers to 4 prompts"),
        (lambda value: value["read"][0].update(bf16_nll=[1e308] * 12), "not a list of nats"),
        (lambda value: value["made"].__setitem__("seconds", "1"), "is not what measuring quality writes"),
        (lambda value: value["made"].__setitem__("seconds", math.inf), "no time that it took"),
        (lambda value: value.__setitem__("definition", []), "is not what measuring quality writes"),
        (lambda value: value.__setitem__("read", {"a": 1}), "is not what measuring quality writes"),
        (lambda value: value.__setitem__("format", 9), "has format 9"),
        (lambda value: value["definition"].__setitem__("quality", 9), "it has another quality"),
        (lambda value: value["definition"].__setitem__("dtype", "bfloat16"), "it has another dtype"),
        (lambda value: value["definition"].__setitem__("kind", "text"), "is not what measuring quality writes"),
        (lambda value: value["definition"]["targets"].pop("bf16"), "it has another targets"),
        (lambda value: value["definition"]["workload"].__setitem__("sha256", "0"), "it has another workload"),
    ],
)
def test_a_file_that_cannot_be_is_one_line(copy: Path, damage: Any, said: str) -> None:
    path = copy / "quality/answers-prompts.json"
    value = json.loads(path.read_text())
    damage(value)
    path.write_text(json.dumps(value))
    result = mxq("eval", "--show", copy)
    assert result.exit_code in (1, 2)
    assert str(path) in result.stderr
    assert said in result.stderr
    assert "remove the file" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda about: about.__setitem__("window", 1), "texts in windows of 1 tokens"),
        (lambda about: about.__setitem__("window", "50"), "not what there is to say of a text"),
        (lambda about: about.pop("sha256"), "not what there is to say of a text"),
        (lambda about: about.__setitem__("name", "other"), "it has another name"),
    ],
)
def test_a_text_that_cannot_be_is_one_line(copy: Path, damage: Any, said: str) -> None:
    path = copy / "quality/text-book.json"
    value = json.loads(path.read_text())
    damage(value["definition"]["text"])
    path.write_text(json.dumps(value))
    with pytest.raises(MxqError, match=said):
        qualities(copy)


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00"])
def test_a_torn_file_is_one_line(copy: Path, text: str) -> None:
    (copy / "quality/text-book.json").write_text(text)
    with pytest.raises(MxqError, match="remove the file"):
        qualities(copy)


def test_a_pipe_is_not_waited_for(copy: Path) -> None:
    (copy / "quality/text-book.json").unlink()
    os.mkfifo(copy / "quality/text-book.json")
    with pytest.raises(MxqError, match=r"text-book\.json is not a file; remove the file"):
        qualities(copy)


def test_of_a_sampled_run_greedy_answers_are_read(models: Path, copy: Path, tmp_path: Path) -> None:
    result = mxq(*arguments(models, tmp_path / "run", "--temperature", 1, "--quality"))
    assert result.exit_code == 0, result.output
    said = [
        {c.arm.label: c for c in read_run(path).cells}["bf16 ar"].records[0].token_ids
        for path in (tmp_path / "run", copy)
    ]
    assert said[0] != said[1]
    assert qualities(tmp_path / "run")["prompts"].read == qualities(copy)["prompts"].read


def test_later_turns_belong_to_their_conversation(models: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    talk.write_text('{"id": "t", "turns": ["Hello.", "Bye."]}\n{"id": "u", "turns": ["Good day.", "Bye."]}\n')
    words = arguments(models, tmp_path / "run", "--quality", "--json")
    words[words.index(models / "prompts.jsonl")] = talk
    (part,) = json.loads(mxq(*words).stdout)["quality"]["parts"]
    assert (part["read"], part["ratio"]["prompts"]) == (4, 2)


def test_of_weights_that_mxfp4_holds_nothing_changes(models: Path, tmp_path: Path) -> None:
    """What was rounded once is rounded to itself: nothing that is computed with it may differ in a single bit."""
    dequantize_run.run(dequantize.plan(models / "mxfp4"), tmp_path / "target", "mxfp4")
    assert mxq("quantize", tmp_path / "target", tmp_path / "mxfp4", "--recipe", "mxfp4-weight-only").exit_code == 0
    request = Request(
        targets={"bf16": str(tmp_path / "target"), "mxfp4": str(tmp_path / "mxfp4")},
        methods=["ar"],
        budgets=[],
        workloads=[str(models / "prompts.jsonl")],
        max_tokens=12,
    )
    quality = measure_and_judge(request, tmp_path / "run", texts=[models / "book.txt"], window=64)
    assert [part.kind for part in quality.parts] == ["answers", "text"]
    for part in quality.parts:
        assert (part.largest, part.unlike) == (0, 0)
        assert (part.means.ratio.lower, part.means.ratio.upper) == (1, 1)
        assert part.means.agreement.estimate == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quality-text", "x.txt"], "--quality-text without --quality"),
        (["--quality", "--quality-window", "5"], "--quality-window without --quality-text"),
        (["--quality", "--quality-text", "x.txt", "--quality-window", "1"], "1 is not in the range"),
        (["--quality", "--engine", "vllm", "--hardware", "h200"], "--quality with --engine vllm"),
    ],
)
def test_mistakes(models: Path, tmp_path: Path, words: list[str], message: str) -> None:
    rest = arguments(models, tmp_path / "run", *words)
    at = rest.index("--dtype")  # which servers do not take
    result = mxq(*rest[:at], *rest[at + 2 :])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "none.txt is not there"),
        ("empty.txt", b"", "empty.txt: no text"),
        ("blank.txt", b" \n ", "blank.txt: no text"),
        ("short.txt", b"a", "holds no text of two tokens or more"),
        ("latin.txt", b"caf\xe9", "latin.txt"),
        ("rows.jsonl", b'{"prompt": "x"}\n', "rows.jsonl, line 1: no text"),
        ("rows.jsonl", b'{"text": "fine"}\n{"text": 7}\n', "rows.jsonl, line 2: no text"),
        ("rows.jsonl", b"[1]\n", "rows.jsonl, line 1: list instead of an object"),
        ("rows.jsonl", b'{"text": "\\ud800"}\n', "rows.jsonl, line 1: half a character"),
        ("rows.jsonl", b"", "holds no text of two tokens or more"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_line(
    models: Path, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = mxq(*arguments(models, tmp_path / "run", "--quality", "--quality-text", tmp_path / name))
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3
    assert not (tmp_path / "run").exists()


def test_texts_of_one_name_and_windows_too_long_are_refused(models: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK)
    more = ("--quality-text", tmp_path / "book.txt")
    result = mxq(*arguments(models, tmp_path / "run", *with_texts(models), *more))
    assert result.exit_code == 2
    assert "two texts are called 'book'" in result.stderr
    result = mxq(*arguments(models, tmp_path / "run", *with_texts(models, window=10**6)))
    assert result.exit_code == 2
    assert "--quality-window 1000000 is longer than the model's" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", ["bf16", "mxfp4"])
def test_both_targets_are_needed(models: Path, tmp_path: Path, missing: str) -> None:
    words = arguments(models, tmp_path / "run", "--quality")
    del words[words.index(f"--{missing}") : words.index(f"--{missing}") + 2]
    result = mxq(*words)
    assert result.exit_code == 2
    assert f"--quality without --{missing}" in result.stderr


def test_what_was_not_measured_cannot_be_shown(copy: Path) -> None:
    shutil.rmtree(copy / "quality")
    assert "Quality" not in mxq("eval", "--show", copy).stdout
    result = mxq("eval", "--show", copy, "--quality")
    assert result.exit_code == 2
    assert "has no quality" in result.stderr


def test_targets_that_do_not_fit_together_are_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxq.engines.inprocess import InProcessEngine

    monkeypatch.setattr(InProcessEngine, "free_bytes", lambda self: 1 << 20)
    result = mxq(*arguments(models, tmp_path / "run", "--quality"))
    assert result.exit_code == 1
    assert "--quality needs both targets in memory at once" in result.stderr
    assert not (tmp_path / "run").exists()


def test_logits_that_are_not_finite_are_refused(models: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint whose activations overflow gives them."""
    from mxq.decode.target import Target

    real = Target.logits

    def logits(self: Target, hidden: torch.Tensor) -> torch.Tensor:
        found = real(self, hidden)
        return found.index_fill(-1, torch.tensor([7]), math.nan) if self.path.name == "mxfp4" else found

    shutil.rmtree(copy / "quality")
    monkeypatch.setattr(Target, "logits", logits)
    result = mxq(*arguments(models, copy, "--quality"))
    assert result.exit_code == 1
    assert "mxfp4 gives logits that are not finite on prompts-0001" in result.stderr
    assert not list(copy.glob("quality/*"))


@pytest.mark.slow
def test_the_testbed_becomes_worse_and_more_so_with_rounded_activations(tmp_path: Path) -> None:
    found = {}
    for recipe in ("mxfp4", "mxfp4-weight-only"):
        assert mxq("quantize", "testbed:dense", tmp_path / recipe, "--recipe", recipe).exit_code == 0
        request = Request(
            targets={"bf16": "testbed:dense", "mxfp4": str(tmp_path / recipe)},
            methods=["ar"],
            budgets=[],
            workloads=["chat"],
            limit=3,
            max_tokens=48,
        )
        found[recipe] = measure_and_judge(request, tmp_path / f"run-{recipe}").parts[0].means
        assert 1 < found[recipe].bf16_perplexity.estimate < 1.5
        assert 0.9 < found[recipe].agreement.estimate <= 1
    assert 0 < found["mxfp4-weight-only"].divergence.estimate < found["mxfp4"].divergence.estimate < 0.1
