"""A parent for a server, which ends the server and all that the server started when its own parent is gone.

A program of its own, ``python -I -S guard.py GRACE_S COMMAND...``, of the standard library alone so that it starts in
milliseconds. Who starts it holds the other end of its standard input and never writes: end of file means stop. The
kernel closes that end for a process that was killed, too, so that no way to die leaves a server behind.

A process group would miss who left it. So orphans come to this process (PR_SET_CHILD_SUBREAPER), which ends whatever
descends from it until nothing does. If this process is killed itself, the kernel kills the server
(PR_SET_PDEATHSIG), and the process group is left to whoever started it.

It exits with the server's code, 128 + N if signal N ended it, or 127 if there was nothing to start.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.1
_REST_S = 0.5
"""How long those may take whose server is gone: it has told them, or never will."""
_KILL_S = 10.0
"""A process in an uninterruptible call outlives SIGKILL for a while; longer than this is not waited."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Start the command, wait for its end or for that of standard input, and return the exit code."""
    grace, command = float(sys.argv[1]), sys.argv[2:]
    told: list[int] = []
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: told.append(number))
    parent = os.getppid()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # Kept, because a Popen that is collected takes leave of a process that has ended already, and of its code.
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        server = started.pid
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    code: int | None = None
    while code is None and not told and os.getppid() == parent and not select.select([0], [], [], _LOOK_S)[0]:
        code = _reap(server)
    if code is None:
        os.kill(server, signal.SIGTERM)  # it alone: a server tells its workers itself
    deadline = time.monotonic() + (grace if code is None else _REST_S)
    while _descendants() and time.monotonic() < deadline:
        time.sleep(_LOOK_S / 2)
        code = _reap(server) if code is None else _reaped(code)
        if code is not None:
            deadline = min(deadline, time.monotonic() + _REST_S)
    deadline = time.monotonic() + _KILL_S
    while (left := _descendants()) and time.monotonic() < deadline:
        for process in left:
            _kill(process)
        time.sleep(_LOOK_S / 10)
        code = _reap(server) if code is None else _reaped(code)
    code = _reap(server) if code is None else code
    return 128 + signal.SIGKILL if code is None else code


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reap(server: int) -> int | None:
    """Take leave of children that ended; return the server's code if it is among them."""
    code = None
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if process == 0:
            return code
        if process == server:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended


def _reaped(code: int) -> int:
    _reap(0)
    return code


def _descendants() -> list[int]:
    """Return the ids of all processes below this one; those that only wait to be reaped by it are none."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found, look = [], [os.getpid()]
    while look:
        below = children.get(look.pop(), [])
        found += below
        look += below
    return found


def _kill(process: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    # Whatever is still open here belongs to a server that has ended: nothing is to be tidied.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
