"""A checkpoint that lacks a tensor is refused by plan and found by verify, whoever made it."""

import shutil
from pathlib import Path

import pytest
from checkpoints import edit_json, rewrite
from conversion import convert

from mxq.checkpoint import Checkpoint
from mxq.convert import recipe
from mxq.convert.plan import plan
from mxq.errors import UsageError
from mxq.verify.run import verify

TEXT = "model.language_model."
MISSING = [
    f"{TEXT}layers.3.self_attn.q_proj.weight",
    f"{TEXT}layers.3.self_attn.k_norm.weight",
    f"{TEXT}layers.0.linear_attn.A_log",
    f"{TEXT}layers.1.linear_attn.in_proj_a.weight",
    f"{TEXT}layers.2.input_layernorm.weight",
    f"{TEXT}embed_tokens.weight",
    f"{TEXT}norm.weight",
    "mtp.fc.weight",
    "mtp.layers.0.self_attn.o_proj.weight",
]
DENSE = [f"{TEXT}layers.0.mlp.down_proj.weight", "mtp.layers.0.mlp.gate_proj.weight"]
MOE = [f"{TEXT}layers.0.mlp.gate.weight", f"{TEXT}layers.1.mlp.shared_expert.up_proj.weight"]


def without(source: Path, name: str, out: Path) -> Path:
    path = shutil.copytree(source, out)
    rewrite(path, lambda tensors: [tensors.pop(key) for key in (name, f"{name}_scale") if key in tensors])
    return path


def check(source: Path, name: str, tmp_path: Path) -> None:
    broken = without(source, name, tmp_path / "source")
    with pytest.raises(UsageError, match="is missing") as error:
        plan(Checkpoint.open(broken), recipe.load("mxfp4"))
    assert name in error.value.message

    theirs = without(convert(source, tmp_path / "out"), name, tmp_path / "theirs")
    for file in ("mxq_manifest.json", "layers.jsonl"):
        (theirs / file).unlink()
    problems = [problem.what for problem in verify(theirs).problems]
    assert any(f"{name} is missing" in what for what in problems), problems


@pytest.mark.parametrize("name", MISSING + DENSE)
def test_of_a_dense_model(name: str, dense_source: Path, tmp_path: Path) -> None:
    check(dense_source, name, tmp_path)


@pytest.mark.parametrize("name", MOE)
def test_of_an_moe(name: str, moe_source: Path, tmp_path: Path) -> None:
    check(moe_source, name, tmp_path)


def test_an_untied_head(dense_source: Path, tmp_path: Path) -> None:
    path = shutil.copytree(dense_source, tmp_path / "source")
    rewrite(path, lambda tensors: tensors.pop("lm_head.weight", None))
    edit_json(path / "config.json", lambda config: config.update(tie_word_embeddings=False))
    with pytest.raises(UsageError, match=r"lm_head\.weight is missing"):
        plan(Checkpoint.open(path), recipe.load("mxfp4"))


def test_a_dropped_mtp_head_is_said(dense_source: Path, tmp_path: Path) -> None:
    path = shutil.copytree(dense_source, tmp_path / "source")
    rewrite(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")])
    edit_json(path / "config.json", lambda config: config["text_config"].update(mtp_num_hidden_layers=1))
    made = plan(Checkpoint.open(path), recipe.load("mxfp4"))
    assert any("there is an MTP head, and there is none" in lint for lint in made.lints)
    report = verify(convert(path, tmp_path / "out"))
    assert not report.problems
    assert [check.done for check in report.checks if check.name == "mtp"] == [False]
