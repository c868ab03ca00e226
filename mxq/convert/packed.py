"""An MXFP4 checkpoint of any tool, opened for a use of its codes and scales: refused if anything is wrong with it."""

from pathlib import Path

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.quantization import Claims
from mxq.checkpoint.reader import read_config
from mxq.errors import MxqError, UsageError, quoted
from mxq.models import qwen35
from mxq.verify import structure
from mxq.verify.claims import claims_of
from mxq.verify.findings import Report
from mxq.verify.opening import open_checked


def open_packed(path: Path, use: str) -> tuple[Checkpoint, Claims]:
    """Open the MXFP4 checkpoint in ``path``, by headers and config; ``use`` says what for: "dequantize".

    Returns:
        It, packed weights by Quark's names, and what its config claims.

    Raises:
        UsageError: it is not quantized, of another architecture, or no checkpoint at all.
        MxqError: it is quantized in another way, or broken.
    """
    config = read_config(path)
    qwen35.family(config, str(path))
    claims = claims_of(config, str(path))
    if claims is None:
        raise UsageError(f"{path} is not quantized, so there is nothing to {use}", "give an MXFP4 checkpoint")
    report = Report()
    opened = open_checked(path, report)
    if opened is not None:
        structure.check(opened, report)
    if report.problems or opened is None:
        raise _broken(path, report)
    return opened.checkpoint, claims


def _broken(path: Path, report: Report) -> MxqError:
    problems = report.problems
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    fix = problems[0].fix
    if all(problem.rewritable for problem in problems):
        fix = f"{quoted('mxq', 'verify', path)} --fix OUT writes a copy without"
    return MxqError(f"{path}: {problems[0].what}{more}", fix)
