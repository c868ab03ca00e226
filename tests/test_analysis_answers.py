"""Right answers: final numbers, code that must pass its tests, and code that must not get away."""

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripted import ScriptedEngine, decode, small_plan

from mxq.analysis import summarise
from mxq.analysis.answers import right
from mxq.cli import main
from mxq.evaluate import read_run, run
from mxq.workloads import Prompt


def asks(*, answer: str | None = None, tests: str | None = None) -> Prompt:
    return Prompt("p", (("user", "?"),), answer=answer, tests=tests)


@pytest.mark.parametrize(
    ("answer", "reply", "verdict"),
    [
        ("12", "That makes 5 + 7 = 12 apples.", True),
        ("12", "That makes 12 apples, 5 of them red.", False),
        ("12", "The answer is 12. It took 3 steps.", True),
        ("12", "First, the answer is 11. No, the answer is 12.", True),
        ("12", "so \\boxed{12}, after 3 steps", True),
        ("12", "#### 12", True),
        ("1200", "The answer is: $1,200.00.", True),
        ("-3", "x = -3", True),
        ("3", "x = -3", False),
        ("12", "I do not know.", False),
        ("x + 1", "So f(x) = x + 1.", True),
        ("x + 1", "So x + 1 is not it.", False),
    ],
)
def test_final_answers(answer: str, reply: str, verdict: bool) -> None:
    assert right(asks(answer=answer), reply) is verdict


def test_open_conversation_has_no_right_answer() -> None:
    assert right(asks(), "anything") is None


GOOD = "def double(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (f"Here it is.\n\n```python\n{GOOD}```\n\nDone.", True),
        (GOOD, True),
        (f"```\n{GOOD}```", True),
        (f"```python\n{GOOD}", True),
        ("```python\ndef double(x):\n    return x\n```", False),
        ("```python\ndef double(x) return 2\n```", False),
        (f"```python\n{GOOD}\nraise SystemExit(0)\n```", False),
        (f"```python\n{GOOD}\nimport os; os._exit(0)\n```", False),
        (f"```python\n{GOOD}\nx = bytearray(4 << 30)\n```", False),
        (f"```python\n{GOOD}\nopen('written', 'w').write('x')\nopen('written').read()[0]\n```", False),
        ("", False),
    ],
)
def test_code_must_pass_its_tests(reply: str, verdict: bool) -> None:
    assert right(asks(tests="assert double(2) == 4\nassert double(0) == 0"), reply) is verdict


def test_code_that_never_ends_is_ended_with_all_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mxq.analysis.answers._SECONDS", 1)
    token = f"left-behind-{time.monotonic_ns()}"
    loop = "import time\nwhile True: time.sleep(1)"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {loop!r}, {token!r}])\n{loop}"
    assert right(asks(tests="pass"), f"```python\n{code}\n```") is False
    deadline = time.monotonic() + 10
    while any(token.encode() in _command(path) for path in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


def _command(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_right_answers_are_counted_on_request(tmp_path: Path) -> None:
    from dataclasses import replace

    plan = small_plan(prompts=3, names=["sums"])
    (workload,) = plan.workloads
    run(plan, tmp_path / "first", ScriptedEngine(), decode)
    cell = read_run(tmp_path / "first").cells[0]
    # The scripted answers are numbers: make the first one right, the second wrong, and the third open.
    answers = [cell.records[0].text.split()[-1], "100", None]
    prompts = tuple(replace(p, answer=a) for p, a in zip(workload.workload.prompts, answers, strict=True))
    answered = replace(workload, workload=replace(workload.workload, prompts=prompts))
    run(replace(plan, workloads=(answered,)), tmp_path / "run", ScriptedEngine(), decode)
    recorded = read_run(tmp_path / "run")
    assert all(not c.checked for c in summarise(recorded).cells)
    summary = summarise(recorded, check_answers=True)
    plain = summary.cell("bf16", "ar", "sums")
    assert plain
    assert (plain.right, plain.checked) == (1, 2)
    assert json.loads(json.dumps(summary.as_json()))["cells"][0]["right"] == 1
    shown = CliRunner().invoke(main, ["eval", "--show", str(tmp_path / "run"), "--check-answers"], prog_name="mxq")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"sums +ar +1/2 \(50%\)", shown.stdout)
