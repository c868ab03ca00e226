"""An export of :mod:`mxq.convert.layout_export`, read back with suspicion, and made into plain matrices again."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.headers import TensorInfo, read_header, read_json
from mxq.checkpoint.manifest import checksum
from mxq.checkpoint.reader import INDEX, inside
from mxq.checkpoint.staging import staged
from mxq.checkpoint.writer import Shard, ShardWriter, TensorSpec, index, layout
from mxq.convert.layout_export import DESCRIPTION, FORMAT, entry, form
from mxq.convert.layout_parts import Rank
from mxq.convert.plan import DEFAULT_SHARD_SIZE
from mxq.errors import MismatchError, MxqError, UsageError
from mxq.files import write_json
from mxq.layouts.kernels import KERNELS, Kernel
from mxq.layouts.permutation import Bytes
from mxq.progress import progress

_AGAIN = "export it again"
_WHERE = ("rows", "columns")


@dataclass(frozen=True)
class Export:
    """An export whose files have the checksums, and whose tensors the shapes, that its description says.

    Attributes:
        tensors: what the files hold; opened as a checkpoint without a config.
        kernel: for which it is.
        rank: for which GPU.
        sizes: by operand, (E, H, I) or (N, K) of the part, not padded.
        first: by operand, its first expert.
        where: by operand, the runs of rows and of columns of a dense module, as the description says them.
        fingerprint: of the source.
    """

    tensors: Checkpoint
    kernel: Kernel
    rank: Rank
    sizes: dict[str, tuple[int, ...]]
    first: dict[str, int]
    where: dict[str, dict[str, Any]]
    fingerprint: str


def open_tensors(path: Path, files: list[Path]) -> Checkpoint:
    """Open safetensors files that are no checkpoint.

    Raises:
        MxqError: one is broken, or has a tensor of another.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, tensor in read_header(file)[1].items():
            if name in tensors:
                raise MxqError(
                    f"{file} holds {name}, and so does {tensors[name].file.name}", "remove what is left over"
                )
            tensors[name] = tensor
    return Checkpoint(path, {}, tensors, {}, None, {})


def open_export(path: Path) -> Export:
    """Open the export in ``path`` and compare its files with the checksums.

    Raises:
        UsageError: there is none.
        MismatchError: files or tensors are not those of the description.
        MxqError: the description is none that this version reads, or a file is broken.
    """
    file = inside(path, DESCRIPTION)
    if not file.is_file():
        raise UsageError(f"{path} holds no {DESCRIPTION}", "give a directory that mxq layout export made")
    content = read_json(file)
    if content.get("format") != FORMAT:
        raise MxqError(f"{file} is of format {content.get('format')!r:.40}; this mxq reads {FORMAT}", _AGAIN)
    try:
        kernel = KERNELS[content["kernel"]]
        rank = Rank(*(_natural(content[key]) for key in ("tp", "ep", "rank")))
        files: dict[str, Any] = dict(content["files"])
        given = dict(content["operands"])
        letters = "EHI" if kernel.is_moe else "NK"
        sizes = {name: tuple(_size(kernel, letter, said["part"]) for letter in letters) for name, said in given.items()}
        first = {name: rank.of_ep * of[0] if kernel.is_moe else 0 for name, of in sizes.items()}
        for key, value in form(kernel).items():
            if content[key] != value:
                raise ValueError(f"{key} is not that of {kernel.name}")
        for name, of in sizes.items():
            before = tuple(_natural(given[name]["source"][letter]) for letter in letters)
            own = {key: value for key, value in given[name].items() if key not in _WHERE}
            shared = (of[0] * rank.ep, of[1], of[2] * rank.tp) if kernel.is_moe else before
            if own != entry(kernel, name, before, of, rank.of_ep) or before != shared:
                raise ValueError(f"{name} is not what rank {rank.rank} has")
        where = {name: {key: said[key] for key in _WHERE if key in said} for name, said in given.items()}
        fingerprint = str(content["source"]["fingerprint"])
        claimed = {name: (said["bytes"], said["sha256"]) for name, said in files.items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise MxqError(f"{file} does not describe a layout: {type(error).__name__} {error!s:.120}", _AGAIN) from None
    except UsageError as error:
        raise MxqError(f"{file}: {error.message}", _AGAIN) from None
    there = {found.name for found in path.glob("*.safetensors")}
    if claimed.keys() != there:
        name = min(claimed.keys() ^ there)
        raise MismatchError(f"{path}: {name} is {'missing' if name in claimed else 'not in the description'}", _AGAIN)
    for name, (size, digest) in claimed.items():
        found = checksum(inside(path, name))
        if (found["bytes"], found["sha256"]) != (size, digest):
            raise MismatchError(f"{path / name} does not have the sha256 of {DESCRIPTION}", _AGAIN)
    tensors = open_tensors(path, [inside(path, name) for name in sorted(claimed)])
    wanted = {f"{one}.{name}": shape for one, of in sizes.items() for name, shape in kernel.shapes(of).items()}
    held = {name: tensor.shape for name, tensor in tensors.tensors.items() if tensor.dtype == "U8"}
    if wanted != held or len(held) != len(tensors.tensors):
        name = min({n for n in {*wanted, *tensors.tensors} if wanted.get(n) != held.get(n)}, default="")
        what = f"{name} is {_shape(held.get(name))}, by {DESCRIPTION} {_shape(wanted.get(name))}"
        raise MismatchError(f"{path}: {what}", _AGAIN)
    return Export(tensors, kernel, rank, sizes, first, where, fingerprint)


def undo(export: Export, out: Path, max_shard_size: int = DEFAULT_SHARD_SIZE) -> int:
    """Write the plain matrices of an export to the new directory ``out``; return how many there are.

    They have the names of a checkpoint that stores experts one by one: ``X.weight`` [N, K/2], ``X.weight_scale``
    [N, K/32], of the part that the GPU has.

    Raises:
        UsageError: ``out`` is not to be written to.
        MxqError: reading or writing failed, or sizes are none that the kernel takes.
    """
    groups = [_specs(name, sizes, export.first[name]) for name, sizes in export.sizes.items()]
    shards: list[Shard] = layout(groups, max_shard_size)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    names = iter(export.sizes)
    with staged(out, total) as work, progress("undoing", total, "B") as advance:
        for shard in shards:
            with ShardWriter(work, shard) as writer:
                for group in shard.groups:
                    for spec, array in zip(group, _matrices(export, next(names)), strict=True):
                        writer.write(spec.name, 0, np.ascontiguousarray(array).data.cast("B"))
                        advance(spec.nbytes)
                    writer.hash()
        if (content := index(shards)) is not None:
            write_json(work / INDEX, content)
    return sum(map(len, groups)) // 2


def read_array(tensors: Checkpoint, name: str, e: int = 0, count: int = 1) -> Bytes:
    """Read the bytes of a tensor, or those of part ``e`` of ``count`` of it, in a row."""
    size = tensors.info(name).nbytes // count
    out = np.empty(size, np.uint8)
    tensors.read_into(name, e * size, out.data)
    return out


def _specs(name: str, sizes: tuple[int, ...], first: int) -> list[TensorSpec]:
    if len(sizes) == 2:
        return _pair(name, *sizes)
    e, h, i = sizes
    return [
        spec
        for expert in range(first, first + e)
        for projection, n, k in (("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i))
        for spec in _pair(f"{name}.{expert}.{projection}", n, k)
    ]


def _pair(module: str, n: int, k: int) -> list[TensorSpec]:
    return [TensorSpec(f"{module}.weight", "U8", (n, k // 2)), TensorSpec(f"{module}.weight_scale", "U8", (n, k // 32))]


def _matrices(export: Export, name: str) -> Iterator[Bytes]:
    kernel, sizes = export.kernel, export.sizes[name]
    count, one = (sizes[0], (1, *sizes[1:])) if kernel.is_moe else (1, sizes)
    for e in range(count):
        stored = {
            tensor: read_array(export.tensors, f"{name}.{tensor}", e, count).reshape(shape)
            for tensor, shape in kernel.shapes(one).items()
        }
        try:
            plain = kernel.plain(stored, one)
        except ValueError as error:
            raise MxqError(f"{export.tensors.path}: {name}: {error}", _AGAIN) from None
        if not kernel.is_moe:
            yield from plain.values()
            return
        i = sizes[2]
        for rows in (slice(0, i), slice(i, 2 * i)):
            yield plain["w13"][0, rows]
            yield plain["w13_scale"][0, rows]
        yield plain["w2"][0]
        yield plain["w2_scale"][0]


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r:.40} where a number is to be")
    return value


def _size(kernel: Kernel, letter: str, part: dict[str, Any]) -> int:
    value = _natural(part[letter])
    of = {"E": 1, "H": 32, "I": 32, "N": kernel.intermediate, "K": kernel.hidden}[letter]
    if not value or value % of:
        raise ValueError(f"{letter} = {value}, not a multiple of {of}")
    return value


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"U8 {[*shape]}"
