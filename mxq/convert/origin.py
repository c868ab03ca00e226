"""Whether a conversion is the one begun earlier, and its source the one it was then."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint, TensorInfo
from mxq.checkpoint.beside import copied_files
from mxq.checkpoint.fp8 import stored
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.reader import inside
from mxq.convert import manifest
from mxq.convert.calibration import Stage
from mxq.convert.journal import differences
from mxq.convert.partial import SpoiledError
from mxq.convert.plan import Plan
from mxq.errors import MxqError
from mxq.files import sha256_file

_SAMPLES = 128
_SAMPLE_BYTES = 512


def begun(plan: Plan, spec: str, *, stage: Stage | None = None, stream: bool = False) -> dict[str, Any]:
    """Return what can be said of a conversion before its source's files are all here: all but :func:`files`."""
    return manifest.origin(plan, spec, stage) | {"max_shard_size": plan.max_shard_size, "stream": stream}


def conversion(plan: Plan, spec: str, *, stage: Stage | None = None, stream: bool = False) -> dict[str, Any]:
    """Return all that decides a conversion's bytes, as a journal holds it.

    Args:
        plan: what is carried out.
        spec: names the source.
        stage: the calibration, if the recipe has one.
        stream: whether its weights are fetched while it goes on: the commit and the sha256 that the hub lists say
            which they are, instead of :func:`files`.
    """
    return begun(plan, spec, stage=stage, stream=stream) | {"source_files": files(plan.source, weights=not stream)}


def files(source: Checkpoint, *, weights: bool = True) -> dict[str, list[Any]]:
    """Return the state of every file that is converted or copied, by name; without ``weights`` of those copied only.

    Of weights: bytes, time of the last change, and the SHA-256 of some bytes of every tensor, or of 128 tensors of a
    file with more. None of them would do alone: an edit in place keeps the size and may miss the sample; archives and
    images are unpacked with one time for all. Times are whole seconds, because some file systems forget the rest while
    a file is in use.

    Raises:
        MxqError: one cannot be read.
    """
    found = states(source, source.metadata if weights else ())
    try:
        return found | {name: [sha256_file(inside(source.path, name))] for name in copied_files(source.path)}
    except OSError as error:
        raise MxqError(f"{error.filename or source.path} cannot be read: {error.strerror}") from None


def states(source: Checkpoint, names: Collection[str]) -> dict[str, list[Any]]:
    """Return the state of files of weights, as :func:`files`.

    Raises:
        MxqError: one cannot be read.
    """
    held: dict[str, list[TensorInfo]] = {name: [] for name in names}
    for tensor in stored(source).tensors.values() if held else ():
        if tensor.file.name in held:
            held[tensor.file.name].append(tensor)
    try:
        return {name: _state(inside(source.path, name), tensors) for name, tensors in held.items()}
    except OSError as error:
        raise MxqError(f"{error.filename or source.path} cannot be read: {error.strerror}") from None


def changes(source: Checkpoint, before: dict[str, list[Any]]) -> list[str]:
    """Return in words how the source's files differ from ``before``, which :func:`files` returned.

    Raises:
        MxqError: one cannot be read.
    """
    weights = not before.keys().isdisjoint(source.metadata)
    changed = differences(before, files(source, weights=weights))
    if not changed and weights and fingerprint(Checkpoint.open(source.path)) != fingerprint(source):
        changed.append("headers or config.json differ")
    return changed


def refuse_changed(source: Checkpoint, before: dict[str, list[Any]], doing: str) -> None:
    """Raise SpoiledError if the source's files are not as ``before``; ``doing`` says what was done meanwhile."""
    changed = changes(source, before)
    if changed:
        raise SpoiledError(
            f"{source.path} changed while it was {doing}: {'; '.join(changed)}",
            "nothing was left behind: run the same command again when nothing writes to it",
        )


def _state(file: Path, tensors: list[TensorInfo]) -> list[Any]:
    with file.open("rb", buffering=0) as stream:
        known = os.fstat(stream.fileno())
        digest = hashlib.sha256()
        for tensor in tensors[:: -(-len(tensors) // _SAMPLES) or 1]:
            digest.update(os.pread(stream.fileno(), _SAMPLE_BYTES, (tensor.start + tensor.end) // 2))
    return [known.st_size, int(known.st_mtime), digest.hexdigest()]
