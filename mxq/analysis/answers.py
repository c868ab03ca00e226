"""Whether answers are right, where a workload says what right is: a reference answer, or Python assertions.

Checking assertions means running code that a model wrote. It gets an interpreter of its own, an empty directory, no
environment, and limits on time, memory and files; that stops accidents, not an attacker, so it is done on request only.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from decimal import Decimal

from mxq.workloads import Prompt

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
# In order of trust; the last match of the first pattern that occurs is the answer.
_FINAL = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\\boxed\{{\s*({_NUMBER})\s*\}}",
        rf"####\s*({_NUMBER})",
        rf"answer is:?\s*\$?({_NUMBER})",
        rf"({_NUMBER})",
    )
)
_CODE = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)

_SECONDS = 10
_PASSED = 77  # not 0: code that exits by itself has not come to its tests
_RUNNER = f"""
import resource, sys
limits = dict(CPU={_SECONDS}, AS={1 << 30}, FSIZE=0, CORE=0, NOFILE=32)
for name, most in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
exec(compile(sys.stdin.read(), "answer", "exec"), dict(__name__="answer"))
sys.exit({_PASSED})
"""


def right(prompt: Prompt, reply: str) -> bool | None:
    """Return whether ``reply`` is right, None where the prompt does not say.

    An ``answer`` that is a number must equal the reply's final number; another one must end the reply. ``tests`` must
    pass after the reply's last code block has been run, or the whole reply if it has none.
    """
    if prompt.tests is not None:
        blocks = _CODE.findall(reply)
        return _passes(blocks[-1] if blocks else reply, prompt.tests)
    if prompt.answer is None:
        return None
    if re.fullmatch(_NUMBER, prompt.answer.strip()):
        found = final_number(reply)
        return found is not None and found == _number(prompt.answer)
    return reply.strip().rstrip(".").endswith(prompt.answer.strip().rstrip("."))


def final_number(reply: str) -> Decimal | None:
    """Return the number that a reply gives as its answer: boxed, after ``####`` or "answer is", else its last one."""
    for pattern in _FINAL:
        if found := pattern.findall(reply):
            return _number(found[-1])
    return None


def _number(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", ""))


@functools.cache
def _passes(code: str, tests: str) -> bool:
    # Arms that agree give the same code, so each distinct pair runs once.
    with tempfile.TemporaryDirectory(prefix="mxq-tests-") as empty:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUNNER],
            cwd=empty,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(f"{code}\n{tests}\n".encode(), timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            # The group is the code's own: whatever it started ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode == _PASSED
