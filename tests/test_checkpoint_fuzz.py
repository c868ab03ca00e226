"""Thousands of broken headers and indexes: each is refused in a line, or read exactly as the file has it."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_safetensors
from mutation import mutate, seeds, telling
from safetensors import SafetensorError, deserialize

from mxq.checkpoint.headers import DTYPES, read_header
from mxq.errors import MxqError

SHAPES = {
    "model.layers.0.mlp.up_proj.weight": ("BF16", [4, 8]),
    "model.layers.0.mlp.up_proj.weight_scale": ("U8", [4, 1]),
    "empty": ("F32", [0, 7]),
    "scalar": ("F64", []),
    "mtp.norm.weight": ("F32", [3]),
    "flags": ("BOOL", [2, 1, 2]),
}
# Of what safetensors reads, mxq refuses: keys beside the three that the format has (or a list in place of the object),
# names twice or not printable, no metadata given as null, shapes that torch cannot have, types that it does not know.
STRICTER = re.compile(
    r"is not dtype, shape and data_offsets|occurs twice|cannot be printed|metadata is not a table"
    r"|has shape|needs more bytes than a file can have|is of unknown type '[A-Z0-9_]+'"
)


def sound(file: Path) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "note": "é"}}
    offset = 0
    for name, (dtype, shape) in SHAPES.items():
        end = offset + {"BF16": 2, "U8": 1, "F32": 4, "F64": 8, "BOOL": 1}[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return write_safetensors(file, header, random.Random(0).randbytes(offset)).read_bytes()


def prod(shape: list[int]) -> int:
    total = 1
    for axis in shape:
        total *= axis
    return total


def check_header(file: Path, content: bytes) -> bool:
    """Tell whether mxq reads a file; make sure that it then reads what safetensors reads, and else says why not."""
    file.unlink(missing_ok=True)  # to cut it to nothing and fill it again takes a file system much longer
    file.write_bytes(content)
    try:
        theirs: list[tuple[str, dict[str, Any]]] | None = deserialize(content)
    except SafetensorError:
        theirs = None
    refusal = None
    try:
        metadata, ours = read_header(file)
    except MxqError as error:
        refusal = error
    if refusal is not None:
        check_line(refusal)
        assert theirs is None or STRICTER.search(refusal.message), f"only mxq refuses: {refusal}"
        return False
    assert theirs is not None, "only mxq accepts"
    assert all(isinstance(part, str) for pair in metadata.items() for part in pair)
    assert {name: (info.dtype, list(info.shape), content[info.start : info.end]) for name, info in ours.items()} == {
        name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in theirs
    }
    reached = 8 + int.from_bytes(content[:8], "little")
    for info in sorted(ours.values(), key=lambda info: (info.start, info.end)):
        assert info.start == reached
        assert info.nbytes == prod(list(info.shape)) * DTYPES[info.dtype].itemsize
        reached = info.end
    assert reached == len(content)
    return True


def check_line(error: MxqError) -> None:
    assert error.message.isprintable(), repr(error.message)
    assert error.hint
    assert error.hint.isprintable()
    assert error.exit_code in (1, 2)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 3000), pytest.param(100_000, 30_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_broken_header_is_refused_or_read_as_safetensors_reads_it(tmp_path: Path, first: int, count: int) -> None:
    file = tmp_path / "x.safetensors"
    content = sound(file)
    assert check_header(file, content)
    read = 0
    for seed, rng in seeds(first, count):
        with telling(seed):
            read += check_header(file, mutate(rng, content, 8))
    assert count < 3000 or 0.02 < read / count < 0.3  # neither all noise nor all sound
