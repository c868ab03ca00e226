"""Headers are believed only as far as the file bears them out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mxq.checkpoint.headers import DTYPES, MAX_HEADER, nbytes, read_header
from mxq.errors import MxqError

ENTRY = {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}
DATA = bytes(range(16))


def refused(file: Path, match: str) -> None:
    with pytest.raises(MxqError, match=match) as error:
        read_header(file)
    assert str(file) in error.value.message
    assert error.value.exit_code == 1


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros((), dtype=torch.float32),
        "c": torch.zeros(0, 7, dtype=torch.uint8),
        "d": torch.zeros(4, dtype=torch.float8_e8m0fnu),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    metadata, found = read_header(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"}
    assert {name: (info.shape, DTYPES[info.dtype], info.nbytes) for name, info in found.items()} == {
        name: (tuple(tensor.shape), tensor.dtype, tensor.nbytes) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("kept", [0, 5, 8, 40])
def test_a_file_cut_short_is_called_truncated(tmp_path: Path, kept: int) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", {"a": ENTRY}, DATA)
    file.write_bytes(file.read_bytes()[:kept])
    refused(file, "truncated")


def test_data_cut_short_is_called_truncated_and_data_too_long_is_not(tmp_path: Path) -> None:
    refused(write_safetensors(tmp_path / "short", {"a": ENTRY}, DATA[:-1]), "truncated: it has .* its header claims")
    refused(write_safetensors(tmp_path / "long", {"a": ENTRY}, DATA + b"x"), "not a valid safetensors file: it has")


def test_a_header_longer_than_the_file_or_the_format_allows_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    for claimed in (1 << 63, (1 << 64) - 1, 1 << 40):
        file.write_bytes(claimed.to_bytes(8, "little") + b"{}")
        refused(file, "truncated")
    with file.open("wb") as stream:
        stream.write((MAX_HEADER + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER + 100)
    refused(file, "more than the 100000000")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "F4"}, "unknown type 'F4'"),
        ({"dtype": None}, "unknown type None"),
        ({"shape": [2, -4]}, "shape"),
        ({"shape": [2.0, 4]}, "shape"),
        ({"shape": [True, 8]}, "shape"),
        ({"shape": "24"}, "shape"),
        ({"shape": [1 << 62, 1 << 62]}, "needs"),
        ({"shape": [1 << 70]}, "shape"),
        ({"shape": [2, 5]}, "needs 20 bytes but claims 0 to 16"),
        ({"data_offsets": [16, 0]}, "needs 16 bytes"),
        ({"data_offsets": [-16, 0]}, "offsets"),
        ({"data_offsets": [0]}, "offsets"),
        ({"data_offsets": [1, 17]}, "leaves a gap"),
        ({"extra": 1}, "is not dtype, shape and data_offsets"),
    ],
)
def test_an_entry_that_lies_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    refused(write_safetensors(tmp_path / "x.safetensors", {"a": ENTRY | change}, DATA), reason)


def test_overlaps_gaps_and_missing_fields_are_refused(tmp_path: Path) -> None:
    second = {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}
    refused(write_safetensors(tmp_path / "overlap", {"a": ENTRY, "b": second}, DATA), "tensor b at byte .* overlaps")
    later = {"dtype": "U8", "shape": [4], "data_offsets": [20, 24]}
    refused(write_safetensors(tmp_path / "gap", {"a": ENTRY, "b": later}, DATA + bytes(8)), "tensor b .* leaves a gap")
    refused(write_safetensors(tmp_path / "field", {"a": {"dtype": "U8", "shape": [1]}}, DATA), "is not dtype, shape")
    refused(write_safetensors(tmp_path / "list", {"a": [1]}, DATA), "is not dtype, shape")


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{",
        b'{"a": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"__metadata__": {"format": 1}}',
        b'{"__metadata__": []}',
        b'{"a": %s, "a": %s}' % ((json.dumps(ENTRY).encode(),) * 2),
    ],
    ids=["list", "cut", "nan", "utf8", "deep", "metadata-number", "metadata-list", "twice"],
)
def test_a_header_that_is_not_a_table_of_tensors_is_refused(tmp_path: Path, text: bytes) -> None:
    refused(write_safetensors(tmp_path / "x.safetensors", text), "x.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "model-00002-of-00003.safetensors", "is missing")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_mutation_of_a_header_is_read_as_something_outside_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any byte of a sound file changed, dropped or doubled: a clear refusal, or tensors that lie in the file."""
    sound = {"__metadata__": {"format": "pt"}, "a": ENTRY, "b": {"dtype": "U8", "shape": [4], "data_offsets": [16, 20]}}
    file = write_safetensors(tmp_path_factory.getbasetemp() / "mutated.safetensors", sound, DATA + bytes(4))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["change", "drop", "double"])):
            case "change":
                content[position] = data.draw(st.integers(0, 255))
            case "drop":
                del content[position]
            case "double":
                content.insert(position, content[position])
    file.write_bytes(content)
    try:
        _, tensors = read_header(file)
    except MxqError:
        return
    for tensor in tensors.values():
        assert 8 <= tensor.start <= tensor.end <= len(content)
        assert tensor.nbytes == nbytes(tensor.dtype, tensor.shape)
