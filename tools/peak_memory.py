"""Peak resident memory of a command.

Linux hands a process's peak on to what it starts, through fork and exec, so that a command started by a large process
seems to need as much as that one. Here it is started by a small one.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def measured(command: Sequence[str | Path]) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run ``command`` to its end; returns its exit status and output, and its peak resident memory in bytes."""
    with tempfile.NamedTemporaryFile() as peak:
        starter = [sys.executable, "-I", "-S", __file__, peak.name]
        done = subprocess.run([*starter, *map(str, command)], capture_output=True, text=True, check=False)
        return done, int(Path(peak.name).read_text())


def main() -> None:
    """``python peak_memory.py FILE COMMAND...``: run the command, write its peak in bytes to the file."""
    file, *command = sys.argv[1:]
    pid = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    Path(file).write_text(str(usage.ru_maxrss * 1024))  # the kernel counts in KiB on Linux
    code = os.waitstatus_to_exitcode(status)
    sys.exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    main()
