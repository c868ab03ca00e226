"""Checkpoints on disk taken apart and put together again, by the safetensors library and not by mxq."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def read_all(directory: Path) -> Tensors:
    """Every tensor of a checkpoint."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def rewrite(directory: Path, edit: Callable[[Tensors], object], metadata: dict[str, str] | None = None) -> None:
    """Change the tensors of a checkpoint of one file, in place."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata or {"format": "pt"})


def edit_json(file: Path, edit: Callable[[Any], object]) -> None:
    """Change a JSON file, in place."""
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def reseal(directory: Path) -> None:
    """Bring the manifest in line with what the directory holds, as a converter with a defect would have written it."""
    manifest = directory / "mxq_manifest.json"

    def update(content: Any) -> None:
        content["files"] = {
            file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
            for file in directory.iterdir()
            if file != manifest
        }
        content["tensors"] = {
            name: {"dtype": header["dtype"], "shape": header["shape"], "file": file}
            for file, headers in raw_headers(directory).items()
            for name, header in headers.items()
        }

    edit_json(manifest, update)


def raw_headers(directory: Path) -> dict[str, dict[str, Any]]:
    """The header of every safetensors file, without its metadata."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        header.pop("__metadata__", None)
        found[file.name] = header
    return found


def metadata(file: Path) -> dict[str, str] | None:
    """The metadata of a safetensors file."""
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def write_safetensors(file: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    """A safetensors file with any header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def write_sparse(file: Path, shapes: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of zeros that takes no room on the disk: name -> (dtype, shape), BF16 or F32."""
    header, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        end = offset + torch.Size(shape).numel() * {"BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    write_safetensors(file, {"__metadata__": {"format": "pt"}} | header)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + offset)


def sparse_copy(
    source: Path, directory: Path, larger: dict[str, list[int]], sizes: dict[str, int] | None = None
) -> Path:
    """A checkpoint of zeros with the tensors of ``source``, some of another shape, and ``sizes`` in its config."""
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    edit_json(directory / "config.json", lambda config: config["text_config"].update(sizes or {}))
    headers = raw_headers(source)["model.safetensors"]
    shapes = {name: (entry["dtype"], larger.get(name, entry["shape"])) for name, entry in headers.items()}
    write_sparse(directory / "model.safetensors", shapes)
    return directory


def wide_copy(source: Path, directory: Path, vocabulary: int, intermediate: int) -> Path:
    """A dense checkpoint of zeros like ``source`` but for two of its sizes, its MTP layer's MLP included."""
    larger = {}
    for name, entry in raw_headers(source)["model.safetensors"].items():
        rows, columns = (*entry["shape"], 0)[:2]
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            larger[name] = [vocabulary, columns]
        elif name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
            larger[name] = [intermediate, columns]
        elif name.endswith("mlp.down_proj.weight"):
            larger[name] = [rows, intermediate]
    return sparse_copy(source, directory, larger, {"vocab_size": vocabulary, "intermediate_size": intermediate})
