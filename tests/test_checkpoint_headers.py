"""Headers are believed only as far as the file bears them out."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_safetensors
from safetensors.torch import save_file

from mxq.checkpoint.headers import DTYPES, MAX_HEADER, read_header, read_json
from mxq.errors import MxqError

ENTRY = {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}
DATA = bytes(range(16))
SOUND = json.dumps({"a": ENTRY}).encode()


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
        ({"dtype": "F5"}, "unknown type 'F5'"),
        ({"dtype": None}, "unknown type None"),
        ({"shape": [2, -4]}, "shape"),
        ({"shape": [2.0, 4]}, "shape"),
        ({"shape": [True, 8]}, "shape"),
        ({"shape": "24"}, "shape"),
        ({"shape": [1 << 62, 1 << 62]}, "needs"),
        ({"shape": [1 << 70]}, "shape"),
        ({"shape": [1 << 62] * 64}, "needs more bytes than a file can have"),
        ({"shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}, "needs more bytes than a file can have"),
        ({"shape": [2, 4] + [1] * 63}, "has shape"),
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
        b"\xef\xbb\xbf" + SOUND,
        SOUND.decode().encode("utf-16"),
        SOUND.replace(b'"a"', rb'"\ud800"'),
        SOUND.replace(b'"a"', b'"\xed\xa0\x80"'),
        SOUND.replace(b'"a"', rb'"a\nb"'),
        SOUND.replace(b'"a"', b'"\xe2\x80\xae"'),
        SOUND.replace(b"[0,", b"[-0,"),
    ],
    ids="list cut nan utf8 deep metadata-number metadata-list twice bom utf16 surrogate surrogate-bytes newline "
    "right-to-left minus-zero".split(),
)
def test_a_header_that_is_not_a_table_of_tensors_is_refused(tmp_path: Path, text: bytes) -> None:
    refused(write_safetensors(tmp_path / "x.safetensors", text), "x.safetensors")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "directory", "device"):
        refused(tmp_path / name, "is not a file")


@pytest.mark.parametrize("number", ["1e999", "-1E999", "NaN", "-Infinity", "9" * 5000], ids=lambda text: text[:5])
def test_numbers_that_no_other_reader_takes_for_one(tmp_path: Path, number: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(f'{{"rope_theta": {number}}}')
    with pytest.raises(MxqError, match=r"config\.json is not valid JSON: .* is no (whole )?number"):
        read_json(file)


def test_a_json_file_longer_than_any_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(MxqError, match="has more than 100000000 bytes"):
        read_json(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "model-00002-of-00003.safetensors", "is missing")
