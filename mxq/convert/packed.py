"""An MXFP4 checkpoint of any tool, opened for a use of its codes and scales: refused if anything is wrong with it."""

from collections.abc import Iterable
from pathlib import Path

from mxq.checkpoint import Checkpoint, manifest
from mxq.checkpoint.beside import MANIFEST
from mxq.checkpoint.quantization import Claims
from mxq.checkpoint.reader import read_config
from mxq.errors import MxqError, UsageError, quoted
from mxq.models import qwen35
from mxq.verify import structure
from mxq.verify.claims import claims_of
from mxq.verify.findings import CONVERT_AGAIN, Report
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


def check_bytes(checkpoint: Checkpoint, tensors: Iterable[str]) -> None:
    """Compare the files that hold ``tensors`` with the checksums of a manifest of mxq's, if there is one.

    Raises:
        MxqError: one changed after it was written, or the manifest is none.
    """
    path = checkpoint.path
    content = manifest.read(path)
    if content is None:
        return
    said = content.get("files")
    if not isinstance(said, dict):
        raise MxqError(f"{path / MANIFEST} is malformed: it lacks files", CONVERT_AGAIN)
    for name, found in manifest.checksums(sorted({checkpoint.tensors[name].file for name in tensors})).items():
        if found != said.get(name):
            what = f"{path / name} changed after it was written: its sha256 is not that in {MANIFEST}"
            raise MxqError(what, f"{quoted('mxq', 'verify', path)} --against SOURCE names the tensors")


def _broken(path: Path, report: Report) -> MxqError:
    problems = report.problems
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    fix = problems[0].fix
    if all(problem.rewritable for problem in problems):
        fix = f"{quoted('mxq', 'verify', path)} --fix OUT writes a copy without"
    return MxqError(f"{path}: {problems[0].what}{more}", fix)
