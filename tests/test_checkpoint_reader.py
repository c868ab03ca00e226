"""Opening a checkpoint: what is one, what is refused, and that reading gives the bytes that are there."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, read_all
from safetensors.torch import save_file

from mxq import testbed
from mxq.checkpoint import Checkpoint, resolve
from mxq.checkpoint.reader import INDEX
from mxq.errors import MxqError, UsageError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards and an index."""
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(64, dtype=torch.uint8), "c": torch.ones(2, 2, 32)}
    save_file({"a": tensors["a"]}, tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({name: tensors[name] for name in "bc"}, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    weight_map = {name: f"model-0000{1 + (name != 'a')}-of-00002.safetensors" for name in "abc"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 624}, "weight_map": weight_map}))
    return tmp_path


def test_every_tensor_and_any_rows_of_it_are_read_as_the_library_reads_them(source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    expected = read_all(source)
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
        raw = torch.cat(list(checkpoint.read_bytes(name, 1000)))
        assert torch.equal(raw, tensor.contiguous().view(-1).view(torch.uint8))
        if tensor.ndim > 1:
            rows = tensor.reshape(-1, tensor.shape[-1])
            start, stop = len(rows) // 3, -(-2 * len(rows) // 3)
            assert torch.equal(checkpoint.read_rows(name, start, stop), rows[start:stop])
            with pytest.raises(IndexError):
                checkpoint.read_rows(name, 0, len(rows) + 1)


def test_shards_are_found_through_the_index(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert torch.equal(checkpoint.read("b"), torch.arange(64, dtype=torch.uint8))
    assert checkpoint.tensors["c"].shape == (2, 2, 32)
    with pytest.raises(MxqError, match="no tensor d"):
        checkpoint.read("d")


def test_a_shard_that_the_index_names_but_is_missing(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MxqError, match=r"model-00002-of-00002.safetensors is missing; download"):
        Checkpoint.open(sharded)


def test_an_index_and_shards_that_disagree(sharded: Path) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(d="model-00001-of-00002.safetensors"))
    with pytest.raises(MxqError, match="holds tensor d, but it does not"):
        Checkpoint.open(sharded)
    edit_json(sharded / INDEX, lambda index: (index["weight_map"].pop("d"), index["weight_map"].pop("b")))
    with pytest.raises(MxqError, match=r"holds tensor b, which .* does not name"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00002-of-00002.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(sharded: Path, name: str) -> None:
    (sharded / name).unlink()
    os.mkfifo(sharded / name)
    with pytest.raises(MxqError, match=f"{name} is not a file"):
        Checkpoint.open(sharded)


def test_a_config_deeper_than_what_can_be_written_again(sharded: Path) -> None:
    (sharded / "config.json").write_text('{"a": ' * 500 + "1" + "}" * 500)
    with pytest.raises(MxqError, match=r"config\.json nests deeper than 64 levels"):
        Checkpoint.open(sharded)


def test_an_index_that_leaves_out_a_whole_shard(sharded: Path) -> None:
    """As a source it would be converted without, of MTP say, and nobody told."""
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop("a"))
    with pytest.raises(MxqError, match=r"names 1 of the 2 files model-\*-of-00002; download"):
        Checkpoint.open(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, sharded / "model-00001-of-00002.safetensors")
    with pytest.raises(MxqError, match="tensor b is in model-00001"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("content", ['{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}', "{}", "["])
def test_an_index_that_is_none(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(MxqError, match=r"index\.json"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "a\0b", "a\nb"]
)
def test_an_index_that_leads_out_of_its_directory(sharded: Path, name: str) -> None:
    (sharded.parent / "secret.safetensors").write_bytes(b"")
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(a=name))
    with pytest.raises(MxqError, match="leads out of the checkpoint's directory"):
        Checkpoint.open(sharded)


def test_links_are_followed_inside_the_checkpoint_and_the_hub_cache_and_nowhere_else(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shard = sharded / "model-00001-of-00002.safetensors"
    shutil.move(shard, elsewhere / "shard")
    shard.symlink_to(elsewhere / "shard")
    with pytest.raises(MxqError, match="is a link out of the checkpoint's directory"):
        Checkpoint.open(sharded)

    repository = tmp_path_factory.mktemp("models--a--b")
    snapshot = repository / "snapshots" / "0123"
    blobs = repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    shard.unlink()
    shutil.move(elsewhere / "shard", shard)
    for file in sharded.iterdir():
        if file.is_file():
            shutil.copy(file, blobs / f"blob-{file.name}")
            (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    assert torch.equal(Checkpoint.open(snapshot).read("a"), torch.arange(12.0).view(3, 4))


def test_a_file_that_became_shorter_after_it_was_opened(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    file = checkpoint.tensors["b"].file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(MxqError, match="became shorter while it was read"):
        checkpoint.read("b")


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "is not a directory"), (tmp_path, "holds no config.json")):
        with pytest.raises(UsageError, match=reason):
            resolve(str(path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds neither"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(MxqError, match="no JSON object"):
        resolve(str(tmp_path))


def test_a_pickle_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3_5ForConditionalGeneration"]}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\nmkdir\n(S'exploded'\ntR.")  # opening it makes a directory
    with pytest.raises(
        UsageError, match=r"pytorch_model.bin, a pickle, which mxq never opens; convert it to safetensors"
    ):
        Checkpoint.open(resolve(str(tmp_path)))
    assert not Path("exploded").exists()


def test_a_spec_that_names_a_testbed(monkeypatch: pytest.MonkeyPatch, dense_source: Path) -> None:
    monkeypatch.setattr(testbed, "path", lambda spec: dense_source)
    assert resolve("testbed:dense") == dense_source
