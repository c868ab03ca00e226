"""A server as a process: its log in a file, its end noticed, and nothing of it left, whatever happens to this process.

The server runs under :mod:`mxq.engines.guard`, which ends all of it when a pipe from this process closes: at the end of
the block, on an exception, on Ctrl-C and SIGTERM, and when this process is killed.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mxq.engines import guard
from mxq.engines.builds import CAUSES
from mxq.engines.launch import HARDWARE, UNLESS_SET
from mxq.engines.vllm_log import lines_of, read_log
from mxq.errors import MxqError, UsageError, quoted

GRACE_S = 20.0
"""What a server may take to end after SIGTERM."""
_TAIL = 1 << 18
_MOST_QUOTED = 300
_HARMLESS = re.compile(r"\b(?:DEBUG|INFO|WARNING) \d\d-\d\d ")
_ERROR = re.compile(
    r"(?:Error|Exception|error): |^Value error, "
)  # the last is pydantic's, below a line that says less


class ServerError(MxqError):
    """A server does not do what it is there for.

    ``lost`` says that it ended, or does not answer any more: only a new server helps. ``status`` is that of HTTP, of a
    request that it refused or gave up. ``unanswered`` says that a connection which had been used before was closed with
    no byte of an answer: servers close idle ones, and may just have done so when a request is sent.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        lost: bool = False,
        status: int | None = None,
        unanswered: bool = False,
    ) -> None:
        super().__init__(message, hint)
        self.lost, self.status, self.unanswered = lost, status, unanswered


class ServerProcess:
    """A server that was started; see :func:`started`."""

    def __init__(self, argv: Sequence[str], log: Path, process: "subprocess.Popen[bytes]", begin: int) -> None:
        self.argv, self.log = tuple(argv), log
        self._process, self._begin = process, begin

    @property
    def group(self) -> int:
        """The process group that the server is in."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the server is gone."""
        # It stays unreaped, so that its number is no other process's while there may be something to kill by it.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def check(self) -> None:
        """Raise ServerError, with the line of the log that says why, if the server is gone."""
        if self.ended:
            found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            assert found is not None
            raise self.failure(f"the server ended ({_ending(found.si_code, found.si_status)})")

    def failure(self, message: str) -> ServerError:
        """Return an error that says what the log says, with what to do about it where that is known."""
        line = telling_line(self.log, self._begin)
        cause = next((cause for cause in CAUSES if line is not None and cause.pattern.search(line)), None)
        said = f"its log says: {line}" if line is not None else "and logged nothing"
        if line is None and (last := last_line(self.log, self._begin)) is not None:
            said = f"its log names no error, and ends with: {last}"
        what = message if cause is None else f"{message}: {cause.what}"
        hint = f"the whole log is {quoted(self.log)}"
        return ServerError(f"{what}; {said}", hint if cause is None else f"{cause.hint}; {hint}", lost=True)

    def stop(self) -> None:
        """End the server and all its processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        _wait_unreaped(self._process, GRACE_S + 15)  # if that is interrupted, the guard goes on by itself
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # if the guard hangs, or was killed
        self._process.wait()


@contextlib.contextmanager
def started(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[ServerProcess]:
    """Start a command, and end it and all that it started with the block.

    Args:
        argv: the command; its first word is looked for as :func:`program` does.
        env: variables beside those that there are.
        log: what it prints is appended to this file.

    Raises:
        UsageError: there is no such program.
        OSError: the log cannot be written.
    """
    path = program(argv[0])
    command = [sys.executable, "-I", "-S", str(guard.__file__), str(GRACE_S), path, *argv[1:]]
    with log.open("ab") as stream:
        begin = stream.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**UNLESS_SET, **os.environ, **env},
            start_new_session=True,  # Ctrl-C is for this process, which then ends the server
        )
    server = ServerProcess((path, *argv[1:]), log, process, begin)
    try:
        yield server
    finally:
        server.stop()


def found(name: str) -> str | None:
    """Return the path of a program: "python" is this one; others are looked for beside it, then on the PATH."""
    if name == "python":
        return sys.executable
    beside = Path(sys.executable).parent / name
    return str(beside) if os.sep not in name and beside.exists() else shutil.which(name)


def vllm_program(hardware: str) -> str | None:
    """Return the path of the program that vLLM is started by there; None if vLLM is not installed."""
    name = HARDWARE[hardware].command[0]
    return None if name == "python" and importlib.util.find_spec("vllm") is None else found(name)


def no_vllm(hardware: str, instead: str) -> MxqError:
    """Return the error that says so, with what can be done ``instead`` of installing it."""
    beside = "" if HARDWARE[hardware].command[0] == "python" else ", nor on the PATH"
    return MxqError(f"vLLM is not installed where mxq is{beside}", f"{HARDWARE[hardware].install}; or {instead}")


def program(name: str) -> str:
    """Return what :func:`found` does; raise UsageError if there is none."""
    path = found(name)
    if path is None:
        raise UsageError(
            f"there is no program {name!r} where mxq is, nor on the PATH", "install vLLM, or attach to one"
        )
    return path


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def check_free(host: str, port: int) -> None:
    """Raise UsageError if a server cannot listen there: another one would answer in its place."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UsageError(f"{host}:{port} is taken or not of this machine ({error.strerror})", "take another") from None


def telling_line(log: Path, begin: int = 0) -> str | None:
    """Return the line of a log that says why a server failed, of what was logged from byte ``begin`` on.

    The first failure that vLLM logged, since others follow from it; else the last line that names an error; else the
    last one that is not of vLLM's ordinary ones. None if there is no such line.
    """
    lines = _lines(log, begin)
    failures = read_log(lines).failures
    errors = [line for line in lines if _ERROR.search(line) and not _HARMLESS.search(line)]
    said = [*failures[:1], *errors[-1:], *[line for line in lines if not _HARMLESS.search(line)][-1:]]
    return next(map(_clean, said), None)


def last_line(log: Path, begin: int = 0) -> str | None:
    """Return the last line of what was logged from byte ``begin`` on; None if nothing was."""
    return next(map(_clean, _lines(log, begin)[-1:]), None)


def _lines(log: Path, begin: int) -> list[str]:
    with log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(begin, size - _TAIL))
        return [stripped for line in lines_of(stream) if (stripped := line.strip())]


def _clean(line: str) -> str:
    return "".join(sign for sign in line[:_MOST_QUOTED] if sign.isprintable())


def _ending(code: int, status: int) -> str:
    """Say how it ended; the guard's exit code is the server's."""
    number = status if code != os.CLD_EXITED else status - 128
    if 0 < number < signal.NSIG:
        name = signal.Signals(number).name
        return name + (", which is what the kernel sends when memory runs out" if number == signal.SIGKILL else "")
    return f"exit code {status}"


def _wait_unreaped(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
