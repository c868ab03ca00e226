"""The same model in either form: one set of bytes under two sets of names, and everything that reads it agrees."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, read_all, reseal, rewrite
from click.testing import CliRunner
from conversion import convert

from mxq import decode
from mxq.checkpoint import Checkpoint
from mxq.checkpoint.quantization import quantization_of
from mxq.cli import main
from mxq.errors import MxqError
from mxq.verify.claims import claims_of
from mxq.verify.run import verify

CT = "compressed-tensors"
MODULE = "model.language_model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def quark(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("quark") / source.name)


@pytest.fixture(scope="module")
def theirs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("theirs") / source.name, form=CT)


@pytest.fixture(scope="module")
def dense(dense_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(dense_source, tmp_path_factory.mktemp("theirs") / "dense", form=CT)


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}_packed" if f"{name}_scale" in tensors else name: tensor for name, tensor in tensors.items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8))
        for name, tensor in ours.items()
    )


def test_only_names_and_config_differ(quark: Path, theirs: Path) -> None:
    ours = read_all(quark)
    assert same(renamed(ours), read_all(theirs))
    assert renamed(ours).keys() != ours.keys()
    differing = {file.name for file in quark.iterdir() if file.read_bytes() != (theirs / file.name).read_bytes()}
    assert differing == {"config.json", "README.md", "mxq_manifest.json", "model.safetensors"}
    configs = [json.loads((path / "config.json").read_text()) for path in (quark, theirs)]
    listed = [config.pop("quantization_config") for config in configs]
    assert configs[0] == configs[1]
    assert listed[0]["exclude"] == listed[1]["ignore"]


def test_experts_stored_fused(moe_source: Path, tmp_path: Path) -> None:
    """Names that vLLM 0.32 loads, to the tokens that it gets from experts stored one by one."""
    quark, theirs = (convert(moe_source, tmp_path / form, experts="fused", form=form) for form in ("quark", CT))
    tensors = read_all(theirs)
    assert same(renamed(read_all(quark)), tensors)
    block = "model.language_model.layers.2.mlp.experts"
    assert {name: list(tensors[f"{block}.{name}"].shape) for name in ("gate_up_proj_packed", "gate_up_proj_scale")} == {
        "gate_up_proj_packed": [4, 512, 128],
        "gate_up_proj_scale": [4, 512, 8],
    }
    assert verify(theirs, moe_source, rows=0).problems == []
    assert torch.equal(logits(theirs), logits(quark))


def test_verify_passes_it_and_holds_it_against_its_manifest(source: Path, theirs: Path) -> None:
    report = verify(theirs, source, rows=0)
    assert report.problems == []
    assert all(check.done for check in report.checks)


def test_a_code_that_its_rule_does_not_make_is_found(dense: Path, dense_source: Path, tmp_path: Path) -> None:
    path = shutil.copytree(dense, tmp_path / "defective")
    rewrite(path, lambda tensors: tensors[f"{MODULE}.weight_packed"][300].bitwise_xor_(1))
    (problem,) = verify(path).problems
    assert "its sha256 is not that in the manifest" in problem.what
    reseal(path)
    (problem,) = verify(path, dense_source, rows=0).problems
    assert problem.what == f"{MODULE} row 300 is not what the source's row quantizes to"


@pytest.mark.parametrize("rule", ["rceil", "diffs", "mse"])
def test_the_manifest_names_the_rule_that_the_config_cannot(dense_source: Path, tmp_path: Path, rule: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"name: mine\ndescription: a test\nextends: mxfp4\nscale_rule: {rule}\n")
    out = convert(dense_source, tmp_path / "out", str(mine), form=CT)
    assert rule not in (out / "config.json").read_text()
    assert verify(out, dense_source, rows=0).problems == []
    edit_json(out / "mxq_manifest.json", lambda content: content["recipe"].update(scale_rule="even"))
    assert "is not what the source's row quantizes to" in verify(out, dense_source, rows=0).problems[0].what
    edit_json(out / "mxq_manifest.json", lambda content: content["recipe"].update(scale_rule="none"))
    (problem,) = verify(out, dense_source).problems
    assert problem.what == "mxq_manifest.json is malformed: the recipe's scale_rule is none that mxq has"


def logits(path: Path) -> torch.Tensor:
    target = decode.load_target(path)
    ids = torch.arange(40) * 7 % 300
    return target.prompt(target.start(64), ids).logits


def test_both_decode_alike(quark: Path, theirs: Path, source: Path, tmp_path: Path) -> None:
    assert torch.equal(logits(theirs), logits(quark))
    weight_only = [convert(source, tmp_path / form, "mxfp4-weight-only", form=form) for form in ("quark", CT)]
    assert torch.equal(logits(weight_only[1]), logits(weight_only[0]))
    assert not torch.equal(logits(weight_only[1]), logits(theirs))


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": True},
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False},
        "mxfp4",
    ],
)
def test_activations_that_mxq_does_not_decode_are_no_matter_for_the_weights(dense: Path, inputs: Any) -> None:
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    assert claims_of(config, "here") is not None
    with pytest.raises(MxqError, match="here: input_activations of quantization_config are not dynamic MXFP4"):
        quantization_of(config, "here")


def test_groups_that_differ_in_their_activations_are_refused(dense: Path) -> None:
    config = json.loads((dense / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"] | {"input_activations": None, "targets": ["re:.*down_proj"]}
    with pytest.raises(MxqError, match="or not for all"):
        quantization_of(config, "here")


def test_a_name_beside_its_packed_one_hides_neither(dense: Path, tmp_path: Path) -> None:
    path = shutil.copytree(dense, tmp_path / "twice")
    rewrite(path, lambda tensors: tensors.update({f"{MODULE}.weight": torch.zeros(1, dtype=torch.bfloat16)}))
    assert {f"{MODULE}.weight", f"{MODULE}.weight_packed"} <= Checkpoint.open(path).tensors.keys()
    assert any("is there both as it is and with _packed" in problem.what for problem in verify(path).problems)
    with pytest.raises(MxqError):
        decode.load_target(path)


def test_every_verb_and_the_card_name_the_form(dense_source: Path, tmp_path: Path) -> None:
    def mxq(*arguments: object) -> str:
        result = CliRunner().invoke(main, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    out = tmp_path / "out"
    planned = json.loads(mxq("plan", dense_source, "--format", CT, "--json"))
    assert planned["format"] == CT
    assert "whatever the recipe says" in planned["lints"][-1]
    assert json.loads(mxq("quantize", dense_source, out, "--format", CT, "--json"))["format"] == CT
    assert json.loads((out / "mxq_manifest.json").read_text())["options"]["format"] == CT
    assert f"in the form of {CT}, scale rule not stated" in mxq("inspect", out)
    card = (out / "README.md").read_text()
    assert "| form | compressed-tensors', `mxfp4-pack-quantized` |" in card
    assert f"- {CT}\n" in card
