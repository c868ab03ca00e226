"""Does a converted checkpoint hold what it says, will engines read it so, and is it what its source becomes?"""

from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint
from mxq.convert import manifest, structure
from mxq.convert.beside import MANIFEST
from mxq.convert.compare import compare
from mxq.convert.structure import Problem, Report, scales_of
from mxq.errors import MxqError


def verify(path: Path, against: Path | None = None, *, rows: int = 16, seed: int = 0) -> Report:
    """Check the checkpoint in ``path``.

    Args:
        path: a converted checkpoint.
        against: its source. Kept tensors are compared whole, quantized ones by quantizing ``rows`` consecutive rows of
            every matrix again, at a place that ``seed`` decides.
        rows: see ``against``; 0 takes all.
        seed: see ``against``.

    Raises:
        UsageError: ``path`` or ``against`` is no checkpoint at all.
        MxqError: ``against`` is broken. All that is wrong with ``path`` is in the report.
    """
    report = Report()
    checkpoint = structure.open_checked(path, report)
    if checkpoint is None:
        return report
    structure.check(checkpoint, report)
    report.add("scales", *_scale_bytes(checkpoint))
    report.add("manifest", *_manifest(checkpoint))
    if against is not None and report.problems:
        report.skip("source", "not compared, because of the problems above")
    elif against is not None:
        compare(checkpoint, Checkpoint.open(against), report, rows=rows, seed=seed)
    return report


def _scale_bytes(checkpoint: Checkpoint) -> tuple[str, list[Problem]]:
    problems, count = [], 0
    for name in scales_of(checkpoint):
        for chunk in checkpoint.read_bytes(name, 16 << 20):
            count += len(chunk)
            if (chunk == 255).any():
                problems.append(Problem(f"{name} holds scales that mean NaN", "the source held NaN or infinity"))
                break
    return f"{count} scales, none of them NaN", problems


def _manifest(checkpoint: Checkpoint) -> tuple[str, list[Problem]]:
    covered = "sha256 of every file"
    try:
        content = manifest.read(checkpoint.path)
        if content is None:
            return covered, [Problem(f"there is no {MANIFEST}: it was not made by mxq, or not completely")]
        files, tensors = dict(content["files"]), dict(content["tensors"])
        if not isinstance(content["source"]["fingerprint"], str):
            raise TypeError("the source's fingerprint is no text")
        problems = _check_files(checkpoint.path, files)
        for name in tensors.keys() | checkpoint.tensors.keys():
            tensor, entry = checkpoint.tensors.get(name), tensors.get(name)
            actual = tensor and [tensor.dtype, list(tensor.shape), tensor.file.name]
            expected = entry and [entry["dtype"], entry["shape"], entry["file"]]
            if actual != expected:
                problems.append(Problem(f"tensor {name} is {actual}, in {MANIFEST} {expected}"))
    except MxqError as error:
        return covered, [Problem(error.message, error.hint or "convert it again")]
    except KeyError as error:
        return covered, [Problem(f"{MANIFEST} is malformed: it lacks {error}")]
    except (TypeError, ValueError, AttributeError) as error:
        return covered, [Problem(f"{MANIFEST} is malformed: {error}")]
    return f"{covered}: {len(files)}", problems


def _check_files(path: Path, files: dict[str, Any]) -> list[Problem]:
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    problems = [
        Problem(f"{name} is not in {MANIFEST}: it was added later", "remove it if engines might read it")
        for name in sorted(present - files.keys())
    ]
    problems += [Problem(f"{name} is missing") for name in sorted(files.keys() - present)]
    for name, actual in manifest.checksums([path / name for name in sorted(files.keys() & present)]).items():
        if actual != files[name]:
            problems.append(Problem(f"{name} changed after it was written: its sha256 is not that in the manifest"))
    return problems
