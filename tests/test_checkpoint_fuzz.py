"""Thousands of broken headers and indexes: each is refused in a line, or read exactly as the file has it."""

import contextlib
import json
import os
import random
import re
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, write_safetensors
from mutation import mutate, seeds, telling
from safetensors import SafetensorError, deserialize

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.headers import DTYPES, read_header
from mxq.checkpoint.reader import INDEX
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
    ("first", "count"), [(0, 3000), pytest.param(100_000, 15_000, marks=pytest.mark.slow)], ids=["few", "many"]
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


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and an index; beside the directory something that nobody is to read."""
    directory = tmp_path / "model"
    directory.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(sound(tmp_path / "x"))
    (directory / "config.json").write_text('{"architectures": ["X"]}')
    names = {}
    for number, name in enumerate(("a", "b.weight"), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        entry = {"dtype": "U8", "shape": [number], "data_offsets": [0, number]}
        write_safetensors(directory / file, {name: entry}, bytes(number))
        names[name] = file
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 3}, "weight_map": names}))
    return directory


_opened: list[str] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_listen)  # for good: there is no way to take it back


@contextlib.contextmanager
def opening_nothing_outside(directory: Path) -> Iterator[None]:
    global _opened
    _opened = []
    try:
        yield
        assert [path for path in _opened if Path(path).parent != directory] == []
    finally:
        _opened = None


def opens(directory: Path) -> bool:
    """Tell whether mxq opens a checkpoint; make sure that it is then the sound one, and otherwise says why not."""
    refusal = None
    with opening_nothing_outside(directory):
        try:
            checkpoint = Checkpoint.open(directory)
        except MxqError as error:
            refusal = error
    if refusal is not None:
        check_line(refusal)
        return False
    found = {name: (info.file.name, info.shape) for name, info in checkpoint.tensors.items()}
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert found == {"a": (first, (1,)), "b.weight": (second, (2,))}
    return True


@pytest.mark.parametrize(
    ("first", "count"), [(0, 1500), pytest.param(100_000, 6000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_a_broken_index_or_config_is_refused_or_is_of_no_matter(
    sharded: Path, name: str, first: int, count: int
) -> None:
    file = sharded / name
    content = file.read_bytes()
    assert opens(sharded)
    for seed, rng in seeds(first, count):
        with telling(seed):
            file.unlink()
            file.write_bytes(mutate(rng, content))
            opens(sharded)


@pytest.mark.parametrize(
    "name",
    [
        *("../secret.safetensors", "../model/../secret.safetensors", "/dev/zero", "/proc/self/mem", ".", "a\\..\\b"),
        *("link", "loop", "dev", "pipe", "inner", "config.json", "é", "a\udcff", "x" * 256, "x" * 100_000),
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_no_name_in_an_index_leads_out_of_the_directory_or_waits(sharded: Path, name: str) -> None:
    (sharded / "link").symlink_to("../secret.safetensors")
    (sharded / "loop").symlink_to("loop")
    (sharded / "dev").symlink_to("/dev/zero")
    (sharded / "inner").mkdir()
    os.mkfifo(sharded / "pipe")
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(a=name))
    assert not opens(sharded)


CRAFTED = {
    "brackets": ("[" * 100_000, 20),
    "closed brackets": ("[" * 100_000 + "]" * 100_000, 20),
    "a long number": ('{"a":' + "9" * 4_000_000 + "}", 20),
    "axes": ('{"a":{"dtype":"U8","shape":[' + "4611686018427387904," * 100_000 + "1]}}", 20),
    "names": ("{" + ",".join(f'"{n}":0' for n in range(200_000)) + "}", 30),
    "one name": ('{"' + "x" * 8_000_000 + '":0}', 20),
    "lists": ("[" + "[]," * 200_000 + "[]]", 40),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_the_work_of_refusing_a_header_is_bounded_by_its_length(tmp_path: Path, what: str) -> None:
    text, factor = CRAFTED[what]
    file = write_safetensors(tmp_path / "x.safetensors", text.encode())
    tracemalloc.start()
    try:
        with pytest.raises(MxqError) as error:
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < factor * (len(text) + 100_000)
    finally:
        tracemalloc.stop()
    check_line(error.value)


@pytest.mark.parametrize("claimed", [1 << 63, (1 << 64) - 1, 1 << 40, 100_000_000])
def test_a_length_that_is_claimed_is_not_allocated(tmp_path: Path, claimed: int) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(claimed.to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(MxqError, match="truncated"):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
