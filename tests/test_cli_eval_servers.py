"""`mxq eval --engine vllm` as a user runs it: started servers and attached ones, stopped, killed, and used wrongly."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_vllm
import pytest
from click.testing import CliRunner, Result
from decoding import Models
from on_servers import Fakes, answers, environment, measure, request, workloads
from test_engines_server import all_gone, family

from mxq import testbed
from mxq.cli import main
from mxq.engines.builds import measurable
from mxq.engines.launch import Launch, Served, launch
from mxq.engines.process import free_port
from mxq.engines.server import serving
from mxq.evaluate import read_run


def mxq(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="mxq")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return workloads(tmp_path_factory.mktemp("prompts"))


def words(target: Path, prompts: list[str], out: Path, *more: object) -> list[object]:
    return [
        *("eval", "--engine", "vllm", "--bf16", target, "--max-tokens", 24, "--out", out),
        *(word for prompt in prompts for word in ("--workload", prompt)),
        *more,
    ]


STARTED = ("--hardware", "h200", "--spec", "mtp", "-k", 3, "--concurrency", 3, "--concurrency", 1)


def test_servers_are_started_and_what_they_gave_is_shown(
    fakes: Fakes, dense_models: Models, prompts: list[str], tmp_path: Path
) -> None:
    result = mxq(*words(dense_models.target, prompts, tmp_path / "run", *STARTED))
    assert result.exit_code == 0, result.output
    assert "starting a server for bf16 mtp-3" in result.stderr
    assert "cell 8/8: bf16 mtp-3, talks, 3 in flight: 100% (48/48 requests)" in result.stderr
    assert "mtp-3" in result.stdout
    run = read_run(tmp_path / "run")
    assert run.finished
    assert answers(run) == answers(measure(request(dense_models.target, prompts), tmp_path / "same"))
    other = mxq(*words(dense_models.target, prompts, tmp_path / "run", *STARTED[:-2]))
    assert other.exit_code == 2
    assert "holds another run: --concurrency 1 3 there, 3 now" in other.stderr


def running(how: str, *, method: str = "ar", name: str = "some-name", model: str = "elsewhere") -> tuple[Launch, str]:
    """What starts a stand-in that serves under a name, and its address."""
    made = launch("h200", Served(model), method, 3, port=free_port(), env={"FAKE_VLLM": f"answers {how}"})  # type: ignore[arg-type]
    made = measurable(made, "0.32.0")
    port = made.argv[made.argv.index("--port") + 1]
    argv = (fake_vllm.__file__, *made.argv[1:], "--served-model-name", name)
    return Launch(argv, made.env), f"http://127.0.0.1:{port}"


def test_servers_that_run_already_are_measured(
    fakes: Fakes, dense_models: Models, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    (plain, at), (mtp, there), (busy, elsewhere) = running(""), running("", method="mtp"), running("busy")
    another, yonder = running("", model=str(testbed.path("testbed:dense")))
    name = "some-name"
    with (
        serving(plain, name, tmp_path / "log", ready_s=60),
        serving(mtp, name, tmp_path / "log2", ready_s=60),
        serving(busy, name, tmp_path / "log3", ready_s=60),
        serving(another, name, tmp_path / "log4", ready_s=60),
    ):
        both = ("--base-url", f"bf16 ar={at}", "--base-url", f"bf16 mtp-3={there}/v1/")
        asked = words(dense_models.target, prompts[:1], tmp_path / "run", "--concurrency", 2, "--served-as", name)
        result = mxq(*asked, *both)
        assert result.exit_code == 0, result.output
        run = read_run(tmp_path / "run")
        assert [cell.arm.label for cell in run.cells] == ["bf16 ar", "bf16 mtp-3"]
        assert [cell.facts["server"]["url"] for cell in run.cells] == [at, there]
        assert run.info["definition"]["device"] == "attached"
        assert run.info["environment"]["engine"]["servers"] == {"bf16 ar": "0.32.0", "bf16 mtp-3": "0.32.0"}
        assert all(check["ok"] for cell in run.cells for check in cell.facts["checks"])
        assert "secret" not in "".join(path.read_text() for path in (tmp_path / "run").rglob("*.json*"))
        wrong_ones: list[tuple[tuple[object, ...], int, str]] = [
            (("--base-url", f"bf16 mtp-3={at}"), 1, "decodes plainly: it is not bf16 mtp-3"),
            (("--base-url", f"bf16 mtp-7={there}"), 1, "drafts 3 tokens a pass: it is not bf16 mtp-7"),
            (("--base-url", f"bf16 ar={at}", "--served-as", "other"), 2, "bf16 ar: .* serves some-name, not other"),
            (("--base-url", f"mxfp4 ar={at}"), 2, "mxfp4 ar is to be measured, and there is no --mxfp4"),
            (("--base-url", f"bf16 ar={elsewhere}"), 1, "the server is not idle: 1 requests that are not ours"),
            ((*both, "--base-url", f"bf16 mtp-7={at}/v1"), 2, "bf16 ar and bf16 mtp-7 have one server, "),
            (("--base-url", f"bf16 ar={yonder}"), 2, "bf16 ar: .* serves what is in .*dense, which is not "),
            (
                ("--base-url", "bf16 ar=localhost:80"),
                2,
                r"is no address of a server\n  -> write it as http://HOST:PORT",
            ),
        ]
        for number, (more, code, reason) in enumerate(wrong_ones):
            monkeypatch.setattr("mxq.evaluate.served_cell._IDLE_S", 0.1)
            asked[asked.index("--out") + 1] = tmp_path / f"run-{number}"
            wrong = mxq(*asked, *more)
            assert wrong.exit_code == code, wrong.output
            assert re.search(reason, wrong.stderr), wrong.stderr
            assert len(wrong.stderr.splitlines()[-2:]) == 2
        monkeypatch.setenv("VLLM_API_KEY", "wrong")
        assert "401" in mxq(*asked, *both).stderr
    gone = mxq(*asked, *both)
    assert gone.exit_code == 1
    assert "nothing answers at" in gone.stderr


def test_a_server_that_was_attached_to_and_is_lost_ends_the_run(
    fakes: Fakes, dense_models: Models, prompts: list[str], tmp_path: Path
) -> None:
    made, at = running("dies@3")
    with serving(made, "some-name", tmp_path / "log", ready_s=60):
        asked = words(dense_models.target, prompts, tmp_path / "run", "--served-as", "some-name")
        result = mxq(*asked, "--base-url", f"bf16 ar={at}")
    assert result.exit_code == 1
    assert "cell 1/2: bf16 ar, sums, 1 in flight: " in result.stderr
    assert not any(cell.records for cell in read_run(tmp_path / "run").cells)


CHILD = "import sys; from on_servers import pretend; pretend(); from mxq.cli import main; main(sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 4), (signal.SIGTERM, 143)]
)
def test_stopped_in_a_cell_leaves_no_server_and_no_part_of_it(
    fakes: Fakes, dense_models: Models, prompts: list[str], tmp_path: Path, kill: signal.Signals, code: int
) -> None:
    whole = answers(measure(request(dense_models.target, prompts), tmp_path / "whole"))
    fakes.do("family stalls@14#2")
    out = tmp_path / "run"
    asked = [str(word) for word in words(dense_models.target, prompts, out, *STARTED)]
    command = [sys.executable, "-c", CHILD, *asked]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (len(fakes.starts) == 2 and sum(sent["start"] == 2 for sent in fakes.requests) >= 14):
            assert time.monotonic() < deadline, "it does not get there"
            assert process.poll() is None
            time.sleep(0.02)
        pids = [pid for log in out.glob("servers/*.log") for pid in family(log)]
        assert len(pids) == 6
        second = mxq(*asked)
        assert second.exit_code == 2
        assert f"another process ({process.pid}) is running in" in second.stderr
        process.send_signal(kill)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == code, said
    assert all_gone(pids, 30)
    if kill != signal.SIGKILL:
        assert "interrupted; 5 of 8 cells are recorded" in said
        assert "run the same command again to continue" in said
        assert "Traceback" not in said
    kept = read_run(out)
    assert answers(kept) == {place: whole[place] for place in answers(kept)}
    assert len(answers(kept)) == 5
    fakes.do("")
    assert answers(measure(request(dense_models.target, prompts), out)) == whole
    assert len(fakes.starts) == 1


@pytest.mark.slow
def test_stopped_while_servers_start_side_by_side(
    fakes: Fakes, dense_models: Models, prompts: list[str], tmp_path: Path
) -> None:
    fakes.do("family slow")
    asked = [str(word) for word in words(dense_models.target, prompts, tmp_path / "run", *STARTED, "--gpus", "0,1")]
    command = [sys.executable, "-c", CHILD, *asked]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while len(fakes.starts) < 2:
            assert time.monotonic() < deadline, "it does not get there"
            time.sleep(0.02)
        pids = [pid for log in (tmp_path / "run").glob("servers/*.log") for pid in family(log)]
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 4, said
    assert "interrupted; 0 of 8 cells are recorded" in said
    assert len(pids) == 6
    assert all_gone(pids, 30)


URL = "bf16 ar=http://host:8000"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--engine", "vllm"), "--engine vllm without --hardware"),
        (("--concurrency", 4), "--concurrency without --engine vllm"),
        (("--hardware", "cpu"), "--hardware without --engine vllm"),
        (("--gpus", "0"), "--gpus without --engine vllm"),
        (("--base-url", URL), "--base-url without --engine vllm"),
        (("--engine", "vllm", "--hardware", "cpu", "--device", "cuda"), "--device with --engine vllm"),
        (("--engine", "vllm", "--hardware", "cpu", "--dtype", "float32"), "--dtype with --engine vllm"),
        (("--engine", "vllm", "--hardware", "cpu", "--served-as", "x"), "--served-as without --base-url"),
        (("--engine", "vllm", "--hardware", "h200", "--gpus", "0,0"), "--gpus '0,0'"),
        (("--engine", "vllm", "--hardware", "h200", "--gpus", "a"), "--gpus 'a'"),
        (("--engine", "vllm", "--hardware", "cpu", "--gpus", "0"), "--gpus with --hardware cpu"),
        (("--engine", "vllm", "--hardware", "cpu", "--env", "X"), "--env 'X' sets no variable"),
        (("--engine", "vllm", "--hardware", "cpu", "--env", "VLLM_API_KEY=x"), "VLLM_API_KEY is not for --env"),
        (("--engine", "vllm", "--hardware", "cpu", "--engine-arg", "api_key=x"), "api-key is not for --engine-arg"),
        (("--engine", "vllm", "--hardware", "cpu", "--engine-arg", "port=1"), "port is not for --engine-arg"),
        (
            ("--engine", "vllm", "--hardware", "cpu", "--engine-arg", "enable-prefix-caching"),
            "enable-prefix-caching is not for --engine-arg",
        ),
        (
            (
                "--engine",
                "vllm",
                "--hardware",
                "cpu",
                "--engine-arg",
                "speculative_config.synthetic_acceptance_length=3",
            ),
            "speculative-config is not for --engine-arg",
        ),
        (
            ("--engine", "vllm", "--hardware", "cpu", "--engine-arg", "stream-interval=4"),
            "stream-interval is not for --engine-arg",
        ),
        (("--engine", "vllm", "--base-url", "bf16 dflash=http://x"), "--base-url 'bf16 dflash=http://x'"),
        (("--engine", "vllm", "--base-url", "bf16 ar"), "--base-url 'bf16 ar'"),
        (("--engine", "vllm", "--base-url", URL, "--base-url", URL), "an arm has two servers"),
        (("--engine", "vllm", "--base-url", URL, "--spec", "ar"), "--spec with --base-url"),
        (("--engine", "vllm", "--base-url", URL, "-k", 3), "-k with --base-url"),
        (("--engine", "vllm", "--base-url", URL, "--hardware", "cpu"), "--hardware with --base-url"),
        (("--engine", "vllm", "--base-url", "bf16 ar=host:8000"), "no address of a server"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_a_line_and_makes_nothing(
    fakes: Fakes, prompts: list[str], tmp_path: Path, given: tuple[object, ...], reason: str
) -> None:
    run = ("--bf16", "testbed:dense", "--workload", prompts[0], "--out", tmp_path / "run")
    result = mxq("eval", *run, *given)
    assert result.exit_code == 2, result.output
    said = result.stderr.splitlines()
    assert reason in said[0]
    assert len(said) == 2
    assert not (tmp_path / "run").exists()
    assert json.dumps(fakes.starts) == "[]"
