"""Open a checkpoint that may be broken: say what is wrong with its files and index, and go on with what is there.

Where :meth:`mxq.checkpoint.Checkpoint.open` refuses, this looks at what engines would find: the files that the index
names, or all that lie there if it names none of them.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint, TensorInfo
from mxq.checkpoint.headers import read_header, read_json
from mxq.checkpoint.reader import INDEX, SINGLE, inside, read_config
from mxq.errors import MxqError
from mxq.verify.findings import CONVERT_AGAIN, Problem, Report, about, first

_PACKED = "_packed"
_GET_AGAIN = "download or convert it again"
_REBUILD = "rebuild the index"


@dataclass(frozen=True)
class Opened:
    """A checkpoint as engines would find it.

    Attributes:
        checkpoint: its tensors.
        relabelled: the scales that a file says to be F8_E8M0; ``checkpoint`` has them as U8, with the same bytes.
        leftover: safetensors files that belong to nothing.
    """

    checkpoint: Checkpoint
    relabelled: tuple[str, ...]
    leftover: tuple[str, ...]


def open_checked(path: Path, report: Report) -> Opened | None:
    """Open the checkpoint in ``path``, add what is wrong with its files to ``report``; None if that is too much.

    Raises:
        UsageError: the directory is no checkpoint at all.
    """
    problems: list[Problem] = []
    try:
        config = read_config(path)
        files = sorted(file.name for file in path.glob("*.safetensors"))
        if not files:
            Checkpoint.open(path)  # which says what there is instead
        index = _index(path, problems)
        wanted, leftover = _wanted(path, files, index, problems)
        metadata, tensors = _headers(path, wanted, problems)
    except MxqError as error:
        if error.exit_code == 2:
            raise
        problems.append(Problem(error.message, error.hint or CONVERT_AGAIN))
        report.add("files", "headers and index", problems)
        return None
    problems += about(
        [file for file, held in metadata.items() if held.get("format") != "pt"],
        "{} lacks the metadata format: pt, without which transformers refuses to load it",
        "write the header again",
        rewritable=True,
        many="{} lack the metadata format: pt, without which transformers refuses to load them",
    )
    if index is not None:
        problems += _against_index(index, tensors)
    problems += about(
        [name for name in tensors if f"{name}{_PACKED}" in tensors],
        f"{{}} is there both as it is and with {_PACKED}",
        "find out which is left over, and remove it",
    )
    relabelled = tuple(
        name for name, tensor in tensors.items() if tensor.dtype == "F8_E8M0" and name.endswith("_scale")
    )
    tensors |= {name: dataclasses.replace(tensors[name], dtype="U8") for name in relabelled}
    report.add("files", f"{len(metadata)} safetensors files, {len(tensors)} tensors", problems)
    return Opened(Checkpoint(path, config, tensors, metadata, index, {}), relabelled, leftover)


def _index(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    file = inside(path, INDEX)
    if not file.exists():
        return None
    try:
        index = read_json(file)
        names = index.get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(value, str) for value in names.values()):
            raise MxqError(f"{file} has no weight_map of tensors to files")
    except MxqError as error:
        problems.append(Problem(error.message, _REBUILD, (INDEX,), rewritable=True))
        return {"weight_map": {}}
    return index


def _wanted(
    path: Path, files: list[str], index: dict[str, Any] | None, problems: list[Problem]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the files that make up the checkpoint, and those that are left over."""
    if index is None:
        wanted = [SINGLE] if SINGLE in files else files
        if wanted != [SINGLE]:
            what = f"there is neither {SINGLE} nor {INDEX}, so that transformers does not find {first(wanted)}"
            problems.append(Problem(what, _REBUILD, tuple(wanted), rewritable=True))
    else:
        wanted = sorted(set(index["weight_map"].values()))
        for name in wanted:
            inside(path, name)
        missing = [name for name in wanted if name not in files]
        if wanted and missing == wanted:
            what = f"{INDEX} is of another checkpoint: it names {first(missing)}, and none of them is there"
            problems.append(Problem(what, _REBUILD, tuple(missing), rewritable=True))
            wanted = []
        elif missing:
            raise MxqError(f"{path / missing[0]} is missing, and the index names it", _GET_AGAIN)
        wanted = wanted or files
    spare = [name for name in files if name not in wanted]
    known = _names(path, wanted) if spare else set()
    left = []
    for name in spare:
        held = _names(path, [name])
        if held and not {_module(tensor) for tensor in held} & {_module(tensor) for tensor in known}:
            what = f"{name} is not in the index, so engines do not load its {len(held)} tensors"
            problems.append(Problem(what, _REBUILD, (name,), rewritable=True))
            wanted.append(name)
        else:
            left.append(name)
    problems += about(
        left,
        "{} is not in the index, and engines may load it all the same",
        "remove it",
        rewritable=True,
        many="{} are not in the index, and engines may load them all the same",
    )
    return wanted, tuple(left)


def _names(path: Path, files: Iterable[str]) -> set[str]:
    """Return the names of the tensors in ``files``, none for one that cannot be read."""
    found: set[str] = set()
    for name in files:
        try:
            found |= read_header(inside(path, name))[1].keys()
        except MxqError:
            continue
    return found


def _module(tensor: str) -> str:
    return tensor.removesuffix("_scale").removesuffix(_PACKED)


def _headers(
    path: Path, files: list[str], problems: list[Problem]
) -> tuple[dict[str, dict[str, str]], dict[str, TensorInfo]]:
    metadata: dict[str, dict[str, str]] = {}
    tensors: dict[str, TensorInfo] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for name in files:
        metadata[name], found = read_header(inside(path, name))
        for tensor, info in found.items():
            if tensor in tensors:
                twice.setdefault((tensors[tensor].file.name, name), []).append(tensor)
            else:
                tensors[tensor] = info
    for (one, other), names in twice.items():
        what = f"{first(names)} is both in {one} and in {other}, and engines take whichever they load last"
        problems.append(Problem(what, "find out which file is left over, and remove it", tuple(names)))
    return metadata, tensors


def _against_index(index: dict[str, Any], tensors: dict[str, TensorInfo]) -> Iterator[Problem]:
    names: dict[str, str] = index["weight_map"]
    if names and not any(tensor.file.name in names.values() for tensor in tensors.values()):
        return  # another checkpoint's, which has been said
    metadata = index.get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(tensor.nbytes for tensor in tensors.values())
    if names and claimed != total:
        what = f"{INDEX} claims a total_size of {claimed!r:.40}, the tensors have {total} bytes"
        yield Problem(what, _REBUILD, (INDEX,), rewritable=True)
    experts = {name.partition(".experts.")[0] for name in tensors if ".experts.0." in name}
    lost = [
        name
        for name in names
        if name not in tensors and name + _PACKED not in tensors and name.partition(".experts.")[0] not in experts
    ]
    yield from about(lost, f"{INDEX} names {{}}, which no file holds", _GET_AGAIN)
    stale = [name for name in names if name not in tensors and name not in lost]
    stale += [name for name, info in tensors.items() if names and names.get(name) != info.file.name]
    yield from about(
        stale, f"{INDEX} does not say rightly in which file {{}} is, or whether", _REBUILD, rewritable=True
    )
