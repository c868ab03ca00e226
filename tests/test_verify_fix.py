"""A copy without the defects of config, index and headers: what it changes, what it never changes, what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from checkpoints import Tensors, edit_json, metadata, raw_headers, read_all, reseal, rewrite
from safetensors.torch import save_file

from mxq.errors import MismatchError, UsageError
from mxq.verify.fix import fix
from mxq.verify.run import verify

INDEX = "model.safetensors.index.json"


def fixed(path: Path, out: Path, source: Path | None = None) -> str:
    """Fix it; make sure that the original is as it was and that no byte of a tensor changed."""
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    done = fix(path, out, verify(path, source), source)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    old, new = read_all(path), read_all(out)
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert torch.equal(tensor.view(torch.uint8), new[name].view(torch.uint8)), name
    assert all(file.stat().st_nlink == 1 and not file.is_symlink() for file in out.iterdir())
    assert verify(out, source).problems == []
    return done


def forget(entries: Callable[[str], bool]) -> Callable[[dict[str, Any]], object]:
    def edit(config: dict[str, Any]) -> None:
        key = "exclude" if "exclude" in config else "ignore"
        config[key] = [entry for entry in config[key] if not entries(entry)]

    return edit


@pytest.mark.parametrize("form", [foreign.quark, foreign.compressed_tensors])
@pytest.mark.parametrize(
    "edit",
    [
        forget(lambda entry: "mtp" in entry),
        forget(lambda entry: True),
        forget(lambda entry: "visual" in entry or "linear_attn.in_proj_a" in entry),
    ],
    ids=["mtp", "all", "vision-and-half-a-group"],
)
def test_a_list_that_lacks_entries(
    converted_moe: Path,
    moe_source: Path,
    tmp_path: Path,
    form: Callable[[Path, Path], Path],
    edit: Callable[[Any], object],
) -> None:
    path = form(converted_moe, tmp_path / "theirs")
    edit_json(path / "config.json", lambda content: edit(content["quantization_config"]))
    done = fixed(path, tmp_path / "out", moe_source)
    assert "written anew" in done
    key = done.partition(" ")[0]
    ours = json.loads((converted_moe / "config.json").read_text())["quantization_config"]["exclude"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][key] == ours


def test_entries_that_name_too_much_globs_and_missing_keys(converted_moe: Path, tmp_path: Path) -> None:
    path = foreign.quark(converted_moe, tmp_path / "theirs")

    def edit(config: dict[str, Any]) -> None:
        config["exclude"] += ["*mtp*", "re:.*experts.*", "model.language_model.layers.0.mlp.experts"]
        del config["export"], config["layer_type_quant_config"]

    edit_json(path / "config.json", lambda content: edit(content["quantization_config"]))
    assert "export added, layer_type_quant_config added" in fixed(path, tmp_path / "out")


def test_scales_labelled_as_numbers_and_shards_without_metadata(
    converted_moe: Path, moe_source: Path, tmp_path: Path
) -> None:
    path = foreign.shards(foreign.quark(converted_moe, tmp_path / "theirs"), 3)
    first = path / "model-00001-of-00003.safetensors"
    for file, held in ((f, {"made by": "hand"} if f == first else None) for f in sorted(path.glob("*.safetensors"))):
        names = raw_headers(path)[file.name]
        tensors = {name: tensor for name, tensor in read_all(path).items() if name in names}
        for name in [name for name in tensors if name.endswith("_scale")]:
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
        save_file(tensors, file, held)
    done = fixed(path, tmp_path / "out", moe_source)
    assert done == "48 scales labelled U8, 3 of 3 headers written anew, weights copied as they are"
    assert metadata(tmp_path / "out" / first.name) == {"made by": "hand", "format": "pt"}
    dtypes = {name: entry["dtype"] for part in raw_headers(tmp_path / "out").values() for name, entry in part.items()}
    assert {dtypes[name] for name in dtypes if name.endswith("_scale")} == {"U8"}


def test_indexes(converted_moe: Path, moe_source: Path, tmp_path: Path) -> None:
    path = foreign.shards(foreign.compressed_tensors(converted_moe, tmp_path / "theirs"), 3)
    right = json.loads((path / INDEX).read_text())
    edit_json(path / INDEX, lambda index: index["metadata"].update(total_size=0))
    assert fixed(path, tmp_path / "a", moe_source) == "weights copied as they are, index written anew"
    assert json.loads((tmp_path / "a" / INDEX).read_text()) == right
    (path / INDEX).unlink()
    fixed(path, tmp_path / "b")
    assert json.loads((tmp_path / "b" / INDEX).read_text()) == right
    (path / INDEX).write_text("{")
    fixed(path, tmp_path / "c")
    one = foreign.quark(converted_moe, tmp_path / "one")
    (one / INDEX).write_text(json.dumps(right))
    assert "the index left out: one file needs none" in fixed(one, tmp_path / "d")
    assert not (tmp_path / "d" / INDEX).exists()


def test_files_that_are_left_over_are_left_behind(
    converted_moe: Path, moe_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = foreign.quark(converted_moe, tmp_path / "theirs")
    save_file({"lm_head.weight": torch.zeros(2, 2)}, path / "model-00009.safetensors", {"format": "pt"})
    (path / "pytorch_model.bin").write_bytes(b"")
    (path / "README.md").write_text("theirs")
    done = fix(path, tmp_path / "out", verify(path, moe_source), moe_source)
    assert done == "weights copied as they are"
    assert "not copied: model-00009.safetensors\nnot copied: pytorch_model.bin\n" in capsys.readouterr().err
    left = {file.name for file in path.iterdir()} - {file.name for file in (tmp_path / "out").iterdir()}
    assert left == {"model-00009.safetensors", "pytorch_model.bin"}


def refused(path: Path, out: Path, source: Path | None = None) -> MismatchError:
    before = sorted(out.parent.iterdir())
    with pytest.raises(MismatchError) as error:
        fix(path, out, verify(path, source, rows=0), source, rows=0)
    assert sorted(out.parent.iterdir()) == before
    assert error.value.message.startswith(f"{out} was not written: ")
    return error.value


def test_what_lies_in_the_weights_is_refused(converted_moe: Path, moe_source: Path, tmp_path: Path) -> None:
    path = foreign.quark(converted_moe, tmp_path / "theirs")
    name = "model.language_model.layers.0.mlp.experts.1.up_proj.weight"

    def damage(tensors: Tensors) -> None:
        tensors[name][3, 3] ^= 1

    rewrite(path, damage)
    edit_json(path / "config.json", lambda content: content["quantization_config"].update(exclude=["lm_head"]))
    error = refused(path, tmp_path / "out", moe_source)
    assert "1 of 5 problems cannot be fixed by writing config, index or headers anew" in error.message
    assert "row 3 is not what the source's row quantizes to" in error.message


def test_what_mxq_made_or_autoround_lists_or_is_right_is_refused(converted_moe: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no problem, so there is nothing to fix"):
        fix(converted_moe, tmp_path / "out", verify(converted_moe))
    ours = shutil.copytree(converted_moe, tmp_path / "ours")
    edit_json(ours / "config.json", lambda content: content["quantization_config"]["exclude"].append("*mtp*"))
    reseal(ours)
    assert "mxq made" in refused(ours, tmp_path / "out").message
    theirs = foreign.autoround(converted_moe, tmp_path / "theirs")
    edit_json(theirs / "config.json", lambda content: content["quantization_config"].update(extra_config={}))
    assert "are not quantized, but no extra_config entry" in refused(theirs, tmp_path / "out").message


def test_an_output_that_is_not_empty_is_not_touched(converted_moe: Path, tmp_path: Path) -> None:
    path = foreign.quark(converted_moe, tmp_path / "theirs")
    edit_json(path / "config.json", lambda content: content["quantization_config"]["exclude"].append("*mtp*"))
    with pytest.raises(UsageError, match="is not empty"):
        fix(path, path, verify(path))
