"""What a calibration made, read from the files of its blocks, and how those are written.

A block's file has for every quantized module ``codes/MODULE`` and ``scales/MODULE``, where it was scaled
``columns/MODULE`` and ``rows/MODULE``, and ``kept/TENSOR`` for what changed without being quantized; the rest is JSON
in the file's metadata. So is a checksum of every tensor: codes that GPTQ chose could be any, and nothing later would
tell that some changed on the disk.
"""

import contextlib
import functools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxq.errors import MxqError

_METADATA = "mxq"
_CHECKS = "crc32"


@dataclass(frozen=True)
class Block:
    """What one decoder block became; names are those of the checkpoint.

    Attributes:
        codes: module -> packed codes and scales.
        kept, column_scales, row_scales, fallback, tokens_seen: see :class:`Calibrated`.
        facts: ``seconds``, and ``unseen_columns``: module -> how many of its inputs were zero in every token.
    """

    codes: Mapping[str, tuple[Tensor, Tensor]]
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    column_scales: Mapping[str, Tensor] = field(default_factory=dict)
    row_scales: Mapping[str, Tensor] = field(default_factory=dict)
    fallback: Sequence[str] = ()
    tokens_seen: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the block's file, all at once."""
        tensors = {f"codes/{module}": codes for module, (codes, _) in self.codes.items()}
        tensors |= {f"scales/{module}": scales for module, (_, scales) in self.codes.items()}
        for part, held in (("kept", self.kept), ("columns", self.column_scales), ("rows", self.row_scales)):
            tensors |= {f"{part}/{name}": tensor for name, tensor in held.items()}
        said = {"fallback": list(self.fallback), "tokens_seen": dict(self.tokens_seen), **self.facts}
        write_tensors(path, tensors, {_METADATA: json.dumps(said)})


@dataclass(frozen=True)
class Calibrated:
    """The weights of the quantized modules, and what else the algorithm changed.

    Attributes:
        directory: the files of the blocks, ``block-00000.safetensors`` and so on.
        modules: every quantized module -> the file that holds it.
        kept: tensors that are not quantized but have new values, in the source's dtype, by their names there: norms
            before scaled linears.
        column_scales: module -> float32 [K]: what its columns were multiplied by before it was quantized.
        row_scales: module -> float32 [N]: what its rows were divided by.
        fallback: modules rounded to nearest (rule ``even``) because no token of the text reached them.
        tokens_seen: routed expert (``...mlp.experts.3``) -> tokens of the text that were sent to it.
        facts: algorithm, options, text, versions, seconds: what a manifest keeps.
    """

    directory: Path
    modules: Mapping[str, Path]
    kept: Mapping[str, Tensor]
    column_scales: Mapping[str, Tensor]
    row_scales: Mapping[str, Tensor]
    fallback: tuple[str, ...]
    tokens_seen: Mapping[str, int]
    facts: dict[str, Any]

    @classmethod
    def open(cls, directory: Path, facts: Mapping[str, Any]) -> "Calibrated":
        """Return what the blocks in ``directory`` hold; ``facts`` are those about all of them."""
        modules: dict[str, Path] = {}
        parts: dict[str, dict[str, Tensor]] = {"kept": {}, "columns": {}, "rows": {}}
        fallback: list[str] = []
        tokens_seen: dict[str, int] = {}
        unseen_columns: dict[str, int] = {}
        seconds = 0.0
        for path in sorted(directory.glob("block-*.safetensors")):
            with _opened(path) as file:
                for key in file.keys():  # noqa: SIM118 (it is no mapping)
                    part, _, name = key.partition("/")
                    if part == "codes":
                        modules[name] = path
                    elif part in parts:
                        parts[part][name] = _checked(file, _checks(file), key)
                said = json.loads(file.metadata()[_METADATA])
            fallback += said["fallback"]
            tokens_seen |= said["tokens_seen"]
            unseen_columns |= said["unseen_columns"]
            seconds += said["seconds"]
        return cls(
            directory,
            modules,
            parts["kept"],
            parts["columns"],
            parts["rows"],
            tuple(fallback),
            tokens_seen,
            {**facts, "unseen_columns": unseen_columns, "seconds": round(seconds, 1)},
        )

    def codes(self, module: str) -> tuple[Tensor, Tensor]:
        """Return a module's packed codes uint8 [N, K/2] and scales uint8 [N, K/32], as Quark writes them.

        Raises:
            KeyError: the module was not calibrated.
            MxqError: they cannot be read, or are not what was written.
        """
        path = self.modules[module]
        with _refused(path):
            if path not in self._files:
                file = safetensors.safe_open(path, "pt")
                self._files[path] = file, _checks(file)
            return _checked(*self._files[path], f"codes/{module}"), _checked(*self._files[path], f"scales/{module}")

    @functools.cached_property
    def _files(self) -> dict[Path, tuple[Any, dict[str, int]]]:
        return {}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that takes its name when all of it is on the disk.

    Raises:
        MxqError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    checks = {_CHECKS: json.dumps({name: _checksum(tensor) for name, tensor in held.items()})}
    try:
        save_file(held, temporary, {**(metadata or {}), **checks})
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise MxqError(f"{path} cannot be written: {error}", "see to the room on the disk and call it again") from None


def read_tensor(path: Path, name: str) -> Tensor:
    """Return a tensor of a file that :func:`write_tensors` wrote; raise MxqError if it cannot be read."""
    with _opened(path) as file:
        return _checked(file, _checks(file), name)


def _checks(file: Any) -> dict[str, int]:
    checks: dict[str, int] = json.loads(file.metadata()[_CHECKS])
    return checks


def _checked(file: Any, checks: Mapping[str, int], name: str) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    if _checksum(tensor) != checks[name]:
        raise ValueError(f"{name} changed after it was written")
    return tensor


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data)


@contextlib.contextmanager
def _opened(path: Path) -> Any:
    with _refused(path), safetensors.safe_open(path, "pt") as file:
        yield file


@contextlib.contextmanager
def _refused(path: Path) -> Any:
    try:
        yield
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise MxqError(f"{path} cannot be read: {error}", f"delete {path.parent}: calibration starts again") from None
