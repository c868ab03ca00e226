"""Does a quantized checkpoint hold what it says, will engines read it so, and is it what its source becomes?

Whoever made it: what mxq writes has a manifest, and is held against that too.
"""

from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint, manifest
from mxq.checkpoint.beside import CARD, DEQUANTIZED, LAYERS, MANIFEST
from mxq.checkpoint.headers import open_regular
from mxq.checkpoint.reader import inside
from mxq.errors import MxqError, UsageError
from mxq.formats.rules import RULES
from mxq.models import qwen35
from mxq.verify import structure
from mxq.verify.compare import compare
from mxq.verify.complete import lacks_mtp
from mxq.verify.declared import is_qwen35
from mxq.verify.findings import CONVERT_AGAIN, Problem, Report
from mxq.verify.installed_vllm import check_vllm
from mxq.verify.opening import Opened, open_checked
from mxq.verify.values import check_values

_READ_BY_ENGINES = frozenset(".safetensors .bin .pt .pth .gguf .json .jsonl .jinja .model .txt .tiktoken .py".split())


def verify(path: Path, against: Path | Checkpoint | None = None, *, rows: int = 16, seed: int = 0) -> Report:
    """Check the checkpoint in ``path``.

    Args:
        path: a quantized checkpoint, of mxq or another tool.
        against: its source. Kept tensors are compared whole, quantized ones by quantizing ``rows`` consecutive rows of
            every matrix again, at a place that ``seed`` decides.
        rows: see ``against``; 0 takes all.
        seed: see ``against``.

    Raises:
        UsageError: ``path`` or ``against`` is no checkpoint at all, or ``path`` was dequantized or is of another model
            than Qwen3.5.
        MxqError: ``against`` is broken. All that is wrong with ``path`` is in the report.
    """
    if (path / DEQUANTIZED).is_file():
        raise UsageError(f"{path} was made by mxq dequantize and holds no MXFP4", "verify what it was made from")
    report = Report()
    opened = open_checked(path, report)
    if opened is None:
        return report
    if not is_qwen35(opened.checkpoint):
        qwen35.family(opened.checkpoint.config, str(path))  # raises for another model's
    claims = structure.check(opened, report)
    if lacks_mtp(opened.checkpoint):
        report.skip("mtp", "there is no MTP head, though config.json says so: MTP cannot draft for it")
    if claims is not None:
        modules = structure.modules(opened.checkpoint)
        check_vllm(claims, structure.found_packed(modules), modules, report)
    check_values(opened.checkpoint, report)
    checks = [
        check for check in report.checks if check.name != structure.COMPLETE
    ]  # the source says what is missing, too
    comparable = all(problem.rewritable for check in checks for problem in check.problems)
    comparable &= _check_manifest(opened, report)  # whose checksums say that a byte changed, and the source says which
    if against is None:
        return report
    if claims is None or not comparable:
        report.skip("source", "not compared, because of the problems above")
    else:
        source = against if isinstance(against, Checkpoint) else Checkpoint.open(against)
        compare(opened.checkpoint, source, claims, report, rows=rows, seed=seed)
    return report


def _check_manifest(opened: Opened, report: Report) -> bool:
    """Add what the manifest shows; return False for one that cannot be read."""
    path = opened.checkpoint.path
    try:
        content = manifest.read(path)
    except MxqError as error:
        report.add("manifest", "sha256 of every file", [Problem(error.message, error.hint or CONVERT_AGAIN)])
        return False
    if content is not None:
        covered, problems = _manifest(opened, content)
        report.add("manifest", covered, problems)
        return not any("is malformed" in problem.what for problem in problems)
    if (path / LAYERS).exists():
        what = f"there is {LAYERS}, which mxq writes, but no {MANIFEST}: it is not complete"
        report.add("manifest", "sha256 of every file", [Problem(what)])
    else:
        report.skip("manifest", f"another tool made it: without {MANIFEST} no checksum tells whether a byte changed")
    return True


def _manifest(opened: Opened, content: dict[str, Any]) -> tuple[str, list[Problem]]:
    covered = "sha256 of every file"
    checkpoint = opened.checkpoint
    try:
        files, tensors = dict(content["files"]), dict(content["tensors"])
        if not isinstance(content["source"]["fingerprint"], str):
            raise TypeError("the source's fingerprint is no text")
        if content["recipe"]["scale_rule"] not in RULES:
            raise ValueError("the recipe's scale_rule is none that mxq has")
        problems = _check_files(checkpoint.path, files)
        held = {checkpoint.stored.get(name, name): tensor for name, tensor in checkpoint.tensors.items()}
        for name in tensors.keys() | held.keys():
            tensor, entry = held.get(name), tensors.get(name)
            actual = tensor and [tensor.dtype, list(tensor.shape), tensor.file.name]
            expected = entry and [entry["dtype"], entry["shape"], entry["file"]]
            if actual != expected:
                problems.append(Problem(f"tensor {name} is {actual}, in {MANIFEST} {expected}"))
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
        if not name.startswith(".") and Path(name).suffix in _READ_BY_ENGINES
    ]
    problems += [Problem(f"{name} is missing") for name in sorted(files.keys() - present)]
    held = []
    for name in sorted(files.keys() & present):
        try:
            open_regular(inside(path, name)).close()
            held.append(path / name)
        except MxqError as error:
            problems.append(Problem(error.message, error.hint or CONVERT_AGAIN))
    for name, actual in manifest.checksums(held).items():
        if actual != files[name] and name != CARD:  # which people go on writing
            what = f"{name} changed after it was written: its sha256 is not that in the manifest"
            problems.append(Problem(what, f"put the file back as it was, or {CONVERT_AGAIN}"))
    return problems
