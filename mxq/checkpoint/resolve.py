"""From what a user types to a directory: a path, ``testbed:NAME``, or the id of a model on the Hugging Face hub."""

import re
from dataclasses import dataclass
from pathlib import Path

from mxq.checkpoint.reader import Checkpoint, read_config

LEFTOVERS = ".cache"
"""Name of the directory that the hub's library leaves beside what it downloads to a place of ours."""

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")


@dataclass(frozen=True)
class HubId:
    """``ORG/NAME`` or ``ORG/NAME@REVISION``: a model on the hub, and a branch, tag or commit of it (None: ``main``)."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def hub_id(spec: str) -> HubId | None:
    """Return which model on the hub ``spec`` names; None if it is a directory here, a testbed, or no id."""
    found = _HUB_ID.fullmatch(spec)
    return None if found is None or ".." in spec or Path(spec).exists() else HubId(found[1], found[2])


def commit(path: Path) -> str | None:
    """Return the commit that a directory is the snapshot of, None if it does not lie in a cache of the hub."""
    return path.name if path.parent.name == "snapshots" and is_commit(path.name) else None


def is_commit(revision: str) -> bool:
    """Tell whether ``revision`` is a commit and not a branch or tag."""
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def resolve(spec: str) -> Path:
    """Return the directory that ``spec`` names, downloading it from the hub if need be.

    Raises:
        UsageError: there is no such directory, testbed or model, or it holds no config.json; a model on the hub has
            no safetensors files, or may not be read.
        MxqError: the hub could not be reached or what it sent cannot be trusted.
    """
    model = hub_id(spec)
    if model is not None:
        from mxq.checkpoint import hub

        return hub.download(model)
    path = _local(spec)
    read_config(path)
    return path


def open_headers(spec: str, *extra: str, beside: bool = False) -> Checkpoint:
    """Open the checkpoint that ``spec`` names; of one on the hub only config.json, index and headers are fetched.

    Whoever reads a tensor of it all the same fetches that tensor.

    Args:
        spec: as for :func:`resolve`.
        extra: names of small files that are fetched too, if the model has them.
        beside: whether all small files are fetched that a conversion copies.

    Raises:
        UsageError, MxqError: as :func:`resolve` and :meth:`Checkpoint.open`.
    """
    model = hub_id(spec)
    if model is not None:
        from mxq.checkpoint import hub

        return hub.open_headers(model, extra, beside=beside)
    return Checkpoint.open(_local(spec))


def _local(spec: str) -> Path:
    if spec.startswith("testbed:"):
        from mxq import testbed

        return testbed.path(spec)
    return Path(spec)
