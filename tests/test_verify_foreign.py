"""What other tools write is judged by their own rules: sound, it passes; each of their known defects has its name."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from checkpoints import Tensors, edit_json, read_all, rewrite
from safetensors.torch import save_file

from mxq.formats import mxfp4
from mxq.verify.findings import Problem, Report
from mxq.verify.run import verify

LAYER = "model.language_model.layers.1."
MTP_EXPERTS = "mtp.layers.0.mlp.experts"
FORMS = {"quark": foreign.quark, "compressed-tensors": foreign.compressed_tensors, "auto-round": foreign.autoround}


@pytest.fixture
def quark(converted_dense: Path, tmp_path: Path) -> Path:
    return foreign.quark(converted_dense, tmp_path / "quark")


@pytest.fixture
def quark_moe(converted_moe: Path, tmp_path: Path) -> Path:
    return foreign.quark(converted_moe, tmp_path / "quark-moe")


def problems(path: Path, source: Path | None = None) -> list[Problem]:
    return verify(path, source, rows=0).problems


def only(path: Path, source: Path | None = None) -> Problem:
    (problem,) = problems(path, source)
    return problem


def quantization(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    edit_json(path / "config.json", lambda content: edit(content["quantization_config"]))


def covered(report: Report, name: str) -> str:
    return next(check.covered for check in report.checks if check.name == name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_sound_checkpoint_passes_and_says_what_could_not_be_checked(
    form: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = FORMS[form](request.getfixturevalue(f"converted_{kind}"), tmp_path / "theirs")
    report = verify(path, request.getfixturevalue(f"{kind}_source"), rows=0)
    assert report.problems == []
    assert [(check.name, check.covered) for check in report.checks if not check.done] == [
        ("manifest", "another tool made it: without mxq_manifest.json no checksum tells whether a byte changed")
    ]
    assert "the scale rule even makes 100.00% of the blocks; SQNR from 1" in covered(report, "source: codes")


def test_the_same_in_several_files(quark: Path, dense_source: Path) -> None:
    assert problems(foreign.shards(quark, 3), dense_source) == []


# --- files and index ---------------------------------------------------------------------------------------------


def test_a_stale_index_beside_a_new_file(converted_dense: Path, dense_source: Path, tmp_path: Path) -> None:
    """AutoRound leaves the source's index where it writes one file: names and files of it do not exist."""
    path = foreign.compressed_tensors(converted_dense, tmp_path / "theirs")
    names = list(read_all(dense_source))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    problem = only(path, dense_source)
    assert problem.what.startswith("model.safetensors.index.json is of another checkpoint: it names model-00001-of-")
    assert problem.rewritable


def test_an_index_of_names_that_were_changed(converted_dense: Path, dense_source: Path, tmp_path: Path) -> None:
    path = foreign.compressed_tensors(converted_dense, tmp_path / "theirs")
    total = sum(tensor.nbytes for tensor in read_all(path).values())
    names = dict.fromkeys(read_all(dense_source), "model.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "does not say rightly in which file" in only(path, dense_source).what


@pytest.mark.parametrize("claimed", [0, None, 10**9])
def test_a_total_size_that_is_none(quark: Path, claimed: int | None) -> None:
    foreign.shards(quark, 2)
    edit_json(quark / "model.safetensors.index.json", lambda index: index["metadata"].update(total_size=claimed))
    assert re.fullmatch(
        rf"model\.safetensors\.index\.json claims a total_size of {claimed}, the tensors have \d+ bytes",
        only(quark).what,
    )


def test_a_shard_that_the_index_forgets(quark: Path, dense_source: Path) -> None:
    tensors, weight_map = read_all(quark), {}
    (quark / "model.safetensors").unlink()
    for file, mine in (("model-1.safetensors", True), ("model-2.safetensors", False)):  # a module is in one of them
        part = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.") is mine}
        save_file(part, quark / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = quark / "model.safetensors.index.json"
    total = sum(tensor.nbytes for tensor in tensors.values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    assert problems(quark, dense_source) == []
    names = {name: file for name, file in weight_map.items() if file == "model-2.safetensors"}
    edit_json(index, lambda content: content.update(weight_map=names))
    forgotten = problems(quark, dense_source)[0]
    assert forgotten.what == "model-1.safetensors is not in the index, so engines do not load its 15 tensors"


def test_a_shard_that_is_left_over_or_missing_or_twice(quark: Path, dense_source: Path) -> None:
    foreign.shards(quark, 2)
    left = quark / "model-00003-of-00003.safetensors"
    save_file({"lm_head.weight": read_all(dense_source)["lm_head.weight"]}, left, {"format": "pt"})
    assert only(quark).what == f"{left.name} is not in the index, and engines may load it all the same"
    edit_json(
        quark / "model.safetensors.index.json", lambda index: index["weight_map"].update({"lm_head.weight": left.name})
    )
    found = [problem.what for problem in problems(quark)]
    assert any(
        re.match(r"lm_head\.weight is both in model-0000\d-of-00002\.safetensors and in model-00003", what)
        for what in found
    )
    left.unlink()
    assert "is missing, and the index names it" in only(quark).what


def test_a_tensor_that_only_the_index_has(quark: Path) -> None:
    foreign.shards(quark, 2)
    file = quark / "model-00001-of-00002.safetensors"
    tensors = {name: tensor for name, tensor in read_all(quark).items() if name != "mtp.fc.weight"}
    index = json.loads((quark / "model.safetensors.index.json").read_text())["weight_map"]
    for path in quark.glob("*.safetensors"):
        save_file({n: t for n, t in tensors.items() if index[n] == path.name}, path, {"format": "pt"})
    assert file.exists()
    assert any("names mtp.fc.weight, which no file holds" in problem.what for problem in problems(quark))


def test_shards_without_an_index(quark: Path) -> None:
    (foreign.shards(quark, 2) / "model.safetensors.index.json").unlink()
    assert only(quark).what.startswith("there is neither model.safetensors nor model.safetensors.index.json")


def test_shards_without_metadata(quark: Path, dense_source: Path) -> None:
    """Quark's file-to-file mode, llm-compressor and AutoRound write none."""
    save_file(read_all(quark), quark / "model.safetensors")
    problem = only(quark, dense_source)
    assert problem.what.startswith("model.safetensors lacks the metadata format: pt")
    assert problem.rewritable


# --- config against tensors --------------------------------------------------------------------------------------


def pack(tensors: Tensors, name: str) -> None:
    """A tensor in the place of one quantized by a tool that asks nothing but whether the name ends in .weight."""
    *axes, columns = tensors[name].shape
    tensors[name] = torch.randint(256, (*axes, max(1, columns // 2)), dtype=torch.uint8)
    tensors[f"{name}_scale"] = torch.randint(110, 125, (*axes, max(1, columns // 32)), dtype=torch.uint8)


def test_conv1d_quantized_by_quark(quark: Path, dense_source: Path) -> None:
    def defect(tensors: Tensors) -> None:
        name = LAYER + "linear_attn.conv1d.weight"
        pack(tensors, name)
        tensors[f"{name}_scale"] = tensors[f"{name}_scale"][..., 0]

    rewrite(quark, defect)
    problem = only(quark, dense_source)
    assert problem.what.startswith(f"{LAYER}linear_attn.conv1d (conv1d) is quantized, and engines load that kind only")
    assert problem.fix == "convert it again with *conv1d* excluded"
    assert not problem.rewritable


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.language_model.layers.0.mlp.gate.weight", "router"),
        ("model.language_model.layers.0.mlp.shared_expert_gate.weight", "router"),
        ("model.language_model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_kinds_that_engines_do_not_load_quantized(quark_moe: Path, name: str, role: str) -> None:
    rewrite(quark_moe, lambda tensors: pack(tensors, name))
    module = name.removesuffix(".weight")
    assert any(problem.what.startswith(f"{module} ({role}) is quantized") for problem in problems(quark_moe))


def test_mtp_experts_that_no_entry_names(quark_moe: Path, moe_source: Path) -> None:
    """Quark expands exclude from the source's names, and those of MTP experts are none of them."""

    def defect(config: dict[str, Any]) -> None:
        config["exclude"] = [e for e in config["exclude"] if MTP_EXPERTS not in e and e != r"re:.*mtp\..*"]

    quantization(quark_moe, defect)
    problem = only(quark_moe, moe_source)
    assert problem.what.startswith(f"the MTP experts {MTP_EXPERTS}.0.down_proj (and 11 more) are not quantized")
    assert "speculative decoding" in problem.what
    assert problem.rewritable


def test_mtp_experts_stored_together_are_found_in_the_source_and_missed_in_the_list(
    quark_moe: Path, moe_source: Path
) -> None:
    rewrite(quark_moe, lambda tensors: foreign.fuse_experts(tensors, MTP_EXPERTS))
    assert problems(quark_moe, moe_source) == []
    rewrite(quark_moe, lambda tensors: tensors[f"{MTP_EXPERTS}.gate_up_proj"][3, 5, 7].add_(1))
    assert only(quark_moe, moe_source).places == (f"{MTP_EXPERTS}.3.gate_proj.weight",)


def test_mtp_quantized_though_the_source_needs_it(converted_moe: Path, tmp_path: Path) -> None:
    """llm-compressor and AutoRound quantize MTP unless told not to: engines can load that, the router aside."""
    path = foreign.compressed_tensors(converted_moe, tmp_path / "theirs")
    quantization(path, lambda config: config.update(ignore=["re:.*visual.*", "lm_head"]))
    found = problems(path)
    assert any(problem.places[0].startswith("mtp.") and "no ignore entry says so" in problem.what for problem in found)


def test_mtp_fc_quantized_outside_the_blocks_that_autoround_names(converted_dense: Path, tmp_path: Path) -> None:
    """AutoRound's model_free mode quantizes mtp.fc, and says that it quantized the layers."""
    path = foreign.autoround(converted_dense, tmp_path / "theirs")

    def defect(tensors: Tensors) -> None:
        codes, tensors["mtp.fc.weight_scale"] = mxfp4.quantize(tensors.pop("mtp.fc.weight"))
        tensors["mtp.fc.weight_packed"] = codes

    rewrite(path, defect)
    quantization(path, lambda config: config["extra_config"].pop("mtp.fc"))
    problem = only(path)
    assert problem.what == "mtp.fc is quantized, but the config tells vLLM that it is not"
    assert "give it 4 bits" in problem.fix
    quantization(path, lambda config: config["extra_config"].update({"mtp.fc": {"bits": 4}}))
    assert problems(path) == []


def test_routed_experts_passed_over_in_silence(quark_moe: Path, moe_source: Path) -> None:
    """Quark without weight_converters: success reported, MXFP4 in the config, the experts in bf16."""

    def defect(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.language_model") and ".experts." in name]:
            del tensors[name]
        source = read_all(moe_source)
        tensors.update({name: t for name, t in source.items() if name.endswith(("gate_up_proj", "experts.down_proj"))})

    rewrite(quark_moe, defect)
    none, experts = problems(quark_moe)
    assert none.what == "quantization_config claims MXFP4, but no weight is quantized"
    assert re.match(
        r"the routed experts \S+\.0\.mlp\.experts\.0\.down_proj \(and 47 more\) are not quant", experts.what
    )
    assert "weight_converters" in experts.fix
    assert not experts.rewritable


@pytest.mark.parametrize(
    ("group", "member"),
    [
        ("self_attn.qkv_proj", "layers.3.self_attn.k_proj"),
        ("mlp.gate_up_proj", "layers.1.mlp.up_proj"),
        ("linear_attn.in_proj_qkvz", "layers.1.linear_attn.in_proj_z"),
    ],
)
def test_fused_groups_in_part(quark: Path, dense_source: Path, group: str, member: str) -> None:
    name = f"model.language_model.{member}"

    def defect(tensors: Tensors) -> None:
        tensors[f"{name}.weight"] = read_all(dense_source)[f"{name}.weight"]
        del tensors[f"{name}.weight_scale"]

    rewrite(quark, defect)
    quantization(quark, lambda config: config["exclude"].append(name))
    whole = name.rsplit(".", 2)[0] + f".{group}"
    assert only(quark).what == f"{whole} is quantized in part; vLLM merges it and refuses"


def test_one_gate_of_two_quantized(quark: Path) -> None:
    name = LAYER + "linear_attn.in_proj_a.weight"
    rewrite(quark, lambda tensors: pack(tensors, name))
    found = [problem.what for problem in problems(quark)]
    assert f"{LAYER}linear_attn.in_proj_ba is quantized in part; vLLM merges it and refuses" in found


def test_names_of_one_tool_with_the_config_of_another(converted_dense: Path, tmp_path: Path) -> None:
    path = foreign.compressed_tensors(converted_dense, tmp_path / "theirs")
    (path / "config.json").write_bytes((converted_dense / "config.json").read_bytes())
    assert "by a config of Quark vLLM looks for a name that ends with .weight" in only(path).what
    other = foreign.quark(converted_dense, tmp_path / "other")
    config = (foreign.compressed_tensors(converted_dense, tmp_path / "again") / "config.json").read_bytes()
    (other / "config.json").write_bytes(config)
    assert "by a config of compressed-tensors vLLM looks for" in only(other).what


def test_a_weight_that_is_there_twice(converted_dense: Path, dense_source: Path, tmp_path: Path) -> None:
    path = foreign.compressed_tensors(converted_dense, tmp_path / "theirs")
    name = LAYER + "mlp.up_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name: read_all(dense_source)[name]}))
    assert any(f"{name} is there both as it is and with _packed" in problem.what for problem in problems(path))


# --- values ------------------------------------------------------------------------------------------------------


def test_scales_labelled_as_numbers(quark: Path, dense_source: Path) -> None:
    """vLLM casts float8_e8m0fnu to its uint8 parameter by value."""

    def relabel(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    rewrite(quark, relabel)
    problem = only(quark, dense_source)
    assert len(problem.places) == 25
    assert "F8_E8M0" in problem.what
    assert problem.rewritable


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda scale: scale.__setitem__((3, 5), 255), "holds scales that mean NaN"),
        (lambda scale: scale.fill_(0), "_scale 0: all scales are the same byte, though codes differ"),
        (lambda scale: scale.fill_(121), "_scale 121: all scales are the same byte, though codes differ"),
        (lambda scale: scale.copy_(scale - 100), "is the middle of the scales, which no trained weight has"),
        (lambda scale: scale.copy_(scale + 60), "is the middle of the scales, which no trained weight has"),
    ],
)
def test_scales_that_cannot_be(quark: Path, edit: Callable[[torch.Tensor], object], reason: str) -> None:
    rewrite(quark, lambda tensors: edit(tensors[LAYER + "mlp.up_proj.weight_scale"]))
    problem = only(quark)
    assert problem.what.startswith(f"{LAYER}mlp.up_proj.weight_scale")
    assert reason in problem.what


def test_nan_written_as_6(quark: Path, dense_source: Path, tmp_path: Path) -> None:
    """Quark turns a block with NaN into codes 7 under scale 1; its sign may be either."""
    name = LAYER + "mlp.up_proj.weight"

    def defect(tensors: Tensors) -> None:
        tensors[name][7, 16:32] = torch.tensor([0x77, 0xFF, 0x7F, 0xF7] * 4, dtype=torch.uint8)
        tensors[f"{name}_scale"][7, 1] = 127

    before = problems(quark, dense_source)
    rewrite(quark, defect)
    assert before == []
    assert only(quark).what.startswith(f"{name} holds blocks of nothing but 6 under scale 1")
    source = shutil.copytree(dense_source, tmp_path / "source")
    rewrite(source, lambda tensors: tensors[name][7, 40].fill_(torch.nan))
    rewrite(quark, lambda tensors: tensors[f"{name}_scale"][7, 1].fill_(126))  # no sign of it in itself
    assert only(quark, source).what.startswith(f"{LAYER}mlp.up_proj holds NaN or infinity in the source")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_kept_tensors_with_numbers_that_are_none(quark: Path, value: float) -> None:
    rewrite(quark, lambda tensors: tensors["model.visual.pos_embed.weight"][0, 0].fill_(value))
    assert only(quark).what == "model.visual.pos_embed.weight holds NaN or infinity"


def test_config_and_tokenizer_written_anew_but_the_same(quark: Path, dense_source: Path) -> None:
    edit_json(quark / "config.json", lambda config: config.update(transformers_version="9", new_default=True))
    content = json.loads((quark / "tokenizer.json").read_text())
    (quark / "tokenizer.json").write_text(json.dumps(content, indent=7))
    assert problems(quark, dense_source) == []
    edit_json(quark / "config.json", lambda config: config["text_config"].update(rms_norm_eps=1e-5))
    edit_json(quark / "tokenizer.json", lambda content: content["model"].update(vocab={"a": 0}))
    assert [problem.what for problem in problems(quark, dense_source)] == [
        "config.json differs from the source's in text_config.rms_norm_eps",
        "tokenizer.json is not the same as in the source",
    ]
