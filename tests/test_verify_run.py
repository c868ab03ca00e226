"""Verification finds what is wrong: every defect here is planted, most with the manifest made to agree with it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Tensors, edit_json, read_all, reseal, rewrite
from conversion import convert

from mxq.errors import MxqError, UsageError
from mxq.verify.run import verify

DENSE = "model.language_model.layers.1."
EXPERTS = "model.language_model.layers.2.mlp.experts"


def defective(
    original: Path,
    directory: Path,
    tensors: Callable[[Tensors], object] | None = None,
    config: Callable[[dict[str, Any]], object] | None = None,
    seal: bool = True,
) -> Path:
    """A copy with a defect; its manifest agrees with it if ``seal``."""
    path = shutil.copytree(original, directory / "defective")
    if tensors is not None:
        rewrite(path, tensors)
    if config is not None:
        edit_json(path / "config.json", lambda content: config(content["quantization_config"]))
    if seal:
        reseal(path)
    return path


def found(path: Path, source: Path | None = None) -> list[str]:
    return [problem.what for problem in verify(path, source, rows=0).problems]


@pytest.mark.parametrize("experts", ["per-expert", "fused"])
@pytest.mark.parametrize("shards", [10**6, 10**10])
def test_what_mxq_writes_has_no_problem(source: Path, tmp_path: Path, experts: str, shards: int) -> None:
    out = convert(source, tmp_path / "out", experts=experts, max_shard_size=shards)
    report = verify(out, source, rows=0)
    assert report.problems == []
    assert all(check.done for check in report.checks)
    covered = {check.name: check.covered for check in report.checks}
    matrices = 25 if source.name == "dense" else 48
    rows = sum(json.loads(line)["shape"][0] for line in (out / "layers.jsonl").read_text().splitlines())
    assert covered["source: codes"].startswith(f"{rows} all rows of {matrices} matrices quantized again; SQNR from 1")
    mtp = sum(name.startswith("mtp.") for name in read_all(source))
    assert f"({mtp} of MTP, 21 of vision)" in covered["source: copies"]
    reseal(out)
    assert found(out, source) == []  # so that what is found in a resealed copy is the defect and not the seal


def test_any_changed_byte_is_found_by_its_checksum(converted_dense: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "layers.jsonl"):
        path = shutil.copytree(converted_dense, tmp_path / name)
        content = bytearray((path / name).read_bytes())
        content[-2] ^= 1
        (path / name).write_bytes(content)
        assert f"{name} changed after it was written: its sha256 is not that in the manifest" in found(path)


def test_what_people_and_hubs_add_is_no_damage(converted_dense: Path, dense_source: Path, tmp_path: Path) -> None:
    path = shutil.copytree(converted_dense, tmp_path / "published")
    (path / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (path / ".cache").mkdir()
    (path / "LICENSE").write_text("Apache-2.0\n")
    (path / "README.md").write_text("# Our own words\n")
    assert found(path, dense_source) == []


def test_files_and_manifest_that_come_or_go(converted_dense: Path, tmp_path: Path) -> None:
    path = shutil.copytree(converted_dense, tmp_path / "a")
    (path / "pytorch_model.bin").write_bytes(b"")
    (path / "generation_config.json").unlink()
    assert found(path) == [
        "pytorch_model.bin is not in mxq_manifest.json: it was added later",
        "generation_config.json is missing",
    ]
    (path / "mxq_manifest.json").unlink()
    assert found(path) == ["there is layers.jsonl, which mxq writes, but no mxq_manifest.json: it is not complete"]
    for content in ("{}", '{"format": 1}', '{"format": 1, "files": [1], "tensors": {}}', "[", '{"format": 9}'):
        (path / "mxq_manifest.json").write_text(content)
        (problem,) = found(path)
        assert "mxq_manifest.json" in problem


def test_what_stands_in_place_of_a_file_is_not_read(converted_dense: Path, tmp_path: Path) -> None:
    """A pipe would be waited for, and a link out of the directory could lead to anything."""
    path = shutil.copytree(converted_dense, tmp_path / "out")
    (path / "README.md").unlink()
    os.mkfifo(path / "README.md")
    (path / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (path / "tokenizer.json").symlink_to("../tokenizer.json")
    assert found(path) == [
        f"{path}/README.md is not a file",
        f"{path}/tokenizer.json is a link out of the checkpoint's directory",
    ]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda content: content.pop("source"), "it lacks 'source'"),
        (lambda content: content["source"].pop("fingerprint"), "it lacks 'fingerprint'"),
        (lambda content: content["source"].update(fingerprint=[1]), "the source's fingerprint is no text"),
        (lambda content: content.update(source=[]), "list indices"),
        (lambda content: content.update(source=None), "'NoneType'"),
        (lambda content: content.update(tensors=[1, 2]), "cannot convert"),
        (lambda content: content["tensors"].update({"mtp.fc.weight": [1]}), "list indices"),
    ],
)
def test_a_manifest_without_its_parts_is_a_problem_with_and_without_a_source(
    converted_dense: Path, dense_source: Path, tmp_path: Path, edit: Callable[[Any], object], reason: str
) -> None:
    path = shutil.copytree(converted_dense, tmp_path / "defective")
    edit_json(path / "mxq_manifest.json", edit)
    for source in (None, dense_source):
        (problem,) = found(path, source)
        assert problem.startswith("mxq_manifest.json is malformed: ")
        assert reason in problem


def test_one_code_and_one_scale_are_found_by_quantizing_again(
    converted_dense: Path, dense_source: Path, tmp_path: Path
) -> None:
    def flip(tensors: Tensors) -> None:
        tensors[DENSE + "mlp.up_proj.weight"][300, 17] ^= 1
        tensors[DENSE + "mlp.down_proj.weight_scale"][9, 3] += 1

    path = defective(converted_dense, tmp_path, flip)
    assert found(path) == []  # sound in itself
    (problem,) = verify(path, dense_source, rows=0).problems
    assert problem.what == f"{DENSE}mlp.down_proj row 9 (and 1 more) is not what the source's row quantizes to"
    assert problem.places == (f"{DENSE}mlp.down_proj row 9", f"{DENSE}mlp.up_proj row 300")


def test_what_is_said_of_a_sample_is_not_said_of_all(converted_dense: Path, dense_source: Path) -> None:
    covered = verify(converted_dense, dense_source, rows=16).checks[-1].covered
    assert covered.startswith("400 sampled rows of 25 matrices quantized again; SQNR of these rows from 1")


def test_the_sample_moves_with_the_seed(converted_dense: Path, dense_source: Path, tmp_path: Path) -> None:
    path = defective(
        converted_dense, tmp_path, lambda tensors: tensors[DENSE + "mlp.up_proj.weight"][300:364].bitwise_xor_(1)
    )
    found_by = [bool(verify(path, dense_source, rows=16, seed=seed).problems) for seed in range(20)]
    assert 0 < sum(found_by) < 10  # 79 of the 497 places where 16 rows fit touch the defect
    assert verify(path, dense_source, rows=16, seed=found_by.index(True)).problems


def test_experts_in_the_wrong_order_are_found(converted_moe: Path, moe_source: Path, tmp_path: Path) -> None:
    def swap(tensors: Tensors) -> None:
        for suffix in ("weight", "weight_scale"):
            gate, up = (f"{EXPERTS}.1.{projection}_proj.{suffix}" for projection in ("gate", "up"))
            tensors[gate], tensors[up] = tensors[up], tensors[gate]

    gate, up = found(defective(converted_moe, tmp_path, swap), moe_source)
    assert re.fullmatch(rf"{EXPERTS}\.1\.gate_proj \(-[23]\.\d dB\): it holds up_proj: the two are swapped", gate)
    assert re.fullmatch(rf"{EXPERTS}\.1\.up_proj \(-[23]\.\d dB\): it holds gate_proj: the two are swapped", up)


def test_copies_that_are_none_are_found(converted_moe: Path, moe_source: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["mtp.layers.0.mlp.experts.2.up_proj.weight"][5, 5] += 1
        tensors["model.visual.pos_embed.weight"][0, 0] += 1
        name = "model.language_model.layers.0.linear_attn.A_log"
        tensors[name] = tensors[name].bfloat16()

    problems = found(defective(converted_moe, tmp_path, edit), moe_source)
    assert problems == ["model.language_model.layers.0.linear_attn.A_log is BF16 [4], in the source F32 [4]"]
    shutil.rmtree(tmp_path / "defective")

    def less(tensors: Tensors) -> None:
        original = tensors["model.language_model.layers.0.linear_attn.A_log"]
        edit(tensors)
        tensors["model.language_model.layers.0.linear_attn.A_log"] = original

    (problem,) = verify(defective(converted_moe, tmp_path, less), moe_source, rows=0).problems
    assert problem.places == ("model.visual.pos_embed.weight", "mtp.layers.0.mlp.experts.2.up_proj.weight")
    first = f"{problem.places[0]} (and 1 more)"
    assert problem.what == f"{first}, which are not quantized, are not the same bytes as in the source"


def test_tensors_that_are_missing_or_too_many(converted_dense: Path, dense_source: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["mtp.fc.weight"]
        del tensors[DENSE + "mlp.up_proj.weight"], tensors[DENSE + "mlp.up_proj.weight_scale"]
        tensors["model.extra.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)

    assert found(defective(converted_dense, tmp_path, edit), dense_source) == [
        f"{tmp_path / 'defective'}: {DENSE}mlp.up_proj.weight is missing (and 1 more)",
        f"{DENSE}mlp.up_proj.weight (and 1 more) of the source are missing",
        "model.extra.weight is not in the source",
    ]


def test_codes_and_scales_that_do_not_belong_together(converted_dense: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors[DENSE + "mlp.gate_proj.weight_scale"]
        del tensors[DENSE + "mlp.up_proj.weight"]
        scale = DENSE + "mlp.down_proj.weight_scale"
        tensors[scale] = tensors[scale][:, :-1]
        tensors[DENSE + "linear_attn.in_proj_z.weight"] = torch.zeros(256, 256, dtype=torch.bfloat16)

    problems = found(defective(converted_dense, tmp_path, edit))
    assert f"{DENSE}mlp.gate_proj.weight is packed, but its scales are missing" in problems
    assert f"{DENSE}mlp.up_proj.weight_scale belongs to a weight that is not there" in problems
    both = f"{DENSE}mlp.down_proj.weight [256, 256] with scales [256, 15]"
    assert f"{both} are not codes [N, K/2] and scales [N, K/32] of one weight" in problems
    assert f"{DENSE}linear_attn.in_proj_z.weight BF16 has scales but is not packed" in problems


def test_scales_of_another_type_or_without_meaning(converted_dense: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        name = DENSE + "mlp.up_proj.weight_scale"
        tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
        tensors[DENSE + "mlp.down_proj.weight_scale"][255, 15] = 255

    problems = found(defective(converted_dense, tmp_path, edit))
    assert any(what.startswith(f"{DENSE}mlp.up_proj.weight_scale: scales of type F8_E8M0 vLLM") for what in problems)
    assert f"{DENSE}mlp.down_proj.weight_scale holds scales that mean NaN" in problems


def test_a_config_that_does_not_name_what_is_unquantized(converted_moe: Path, tmp_path: Path) -> None:
    """The defect of other converters: bf16 MTP experts that no entry names."""

    def forget_experts(config: dict[str, Any]) -> None:
        config["exclude"] = [
            e for e in config["exclude"] if "mtp.layers.0.mlp.experts" not in e and e != r"re:.*mtp\..*"
        ]

    (problem,) = verify(defective(converted_moe, tmp_path, config=forget_experts)).problems
    assert problem.what.startswith(
        "the MTP experts mtp.layers.0.mlp.experts.0.down_proj (and 11 more) are not quantized, but no exclude entry "
        "says so"
    )
    assert len(problem.places) == 12
    assert problem.rewritable


def test_globs_and_patterns_that_match_nothing_in_vllm(converted_moe: Path, tmp_path: Path) -> None:
    def globs(config: dict[str, Any]) -> None:
        config["exclude"] = [
            "lm_head",
            "*mtp*",
            "model.visual.*",
            "*linear_attn*",
            "*self_attn*",
            "*mlp.shared_expert*",
        ]

    problems = found(defective(converted_moe, tmp_path, config=globs))
    assert problems[0].startswith("the exclude entries '*mtp*' (and 4 more) are globs, and match nothing")
    for start in ("the MTP experts mtp.layers.0.mlp.experts.0.down_proj (and 11 more)", "mtp.", "model.visual.blocks."):
        assert any(problem.startswith(start) and "no exclude entry says so" in problem for problem in problems)


def test_a_config_that_calls_quantized_weights_unquantized(converted_dense: Path, tmp_path: Path) -> None:
    entry = "language_model.model.layers.1.mlp.gate_proj"
    path = defective(converted_dense, tmp_path, config=lambda config: config["exclude"].append(entry))
    assert found(path) == [
        f"{DENSE}mlp.gate_proj is quantized, but exclude tells vLLM that it is not",
        f"exclude names only a part of {DENSE}mlp.gate_up_proj; vLLM merges it and refuses",
    ]


def test_experts_silently_left_in_bf16(converted_moe: Path, moe_source: Path, tmp_path: Path) -> None:
    """The defect of another converter: success reported, global MXFP4 in the config, no expert quantized."""

    def put_back(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers" in name and ".experts." in name and "mtp" not in name]:
            del tensors[name]
        tensors.update(
            {n: t for n, t in read_all(moe_source).items() if n.endswith(("gate_up_proj", "experts.down_proj"))}
        )

    problems = found(defective(converted_moe, tmp_path, put_back))
    assert problems[0] == "quantization_config claims MXFP4, but no weight is quantized"
    assert problems[1].startswith(
        "the routed experts model.language_model.layers.0.mlp.experts.0.down_proj (and 47 more)"
    )


def test_kinds_of_tensors_that_engines_do_not_load_packed(converted_dense: Path, tmp_path: Path) -> None:
    def pack(tensors: Tensors) -> None:
        tensors["model.language_model.embed_tokens.weight"] = torch.zeros(512, 128, dtype=torch.uint8)
        tensors["model.language_model.embed_tokens.weight_scale"] = torch.zeros(512, 8, dtype=torch.uint8)

    assert found(defective(converted_dense, tmp_path, pack)) == [
        "model.language_model.embed_tokens (embedding) is quantized, and engines load that kind only unquantized"
    ]


def test_a_fused_group_stored_in_part(converted_dense: Path, dense_source: Path, tmp_path: Path) -> None:
    def mix(tensors: Tensors) -> None:
        name = DENSE + "linear_attn.in_proj_z.weight"
        tensors[name] = read_all(dense_source)[name]
        del tensors[f"{name}_scale"]

    path = defective(
        converted_dense, tmp_path, mix, lambda config: config["exclude"].append(DENSE + "linear_attn.in_proj_z")
    )
    assert found(path) == [f"{DENSE}linear_attn.in_proj_qkvz is quantized in part; vLLM merges it and refuses"]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda config: config["quantization_config"].pop("export"), "quantization_config has no export"),
        (lambda config: config["quantization_config"].pop("layer_type_quant_config"), "has no layer_type_quant_config"),
        (lambda config: config.pop("quantization_config"), "has no quantization_config"),
        (lambda config: config["quantization_config"].update(quant_method="awq"), "quantized with 'awq'"),
    ],
)
def test_configs_that_engines_do_not_read(
    converted_dense: Path, tmp_path: Path, edit: Callable[[Any], object], problem: str
) -> None:
    path = shutil.copytree(converted_dense, tmp_path / "defective")
    edit_json(path / "config.json", edit)
    reseal(path)
    assert any(problem in what for what in found(path))


def test_files_that_engines_misread(dense_source: Path, tmp_path: Path) -> None:
    out = convert(dense_source, tmp_path / "out", max_shard_size=10**6)
    index = out / "model.safetensors.index.json"
    edit_json(index, lambda content: content["metadata"].update(total_size=0))
    (out / "model-00009-of-00009.safetensors").write_bytes(b"left over")
    reseal_without = [what for what in found(out) if "manifest" not in what]
    assert reseal_without[0].startswith("model-00009-of-00009.safetensors is not in the index")
    assert reseal_without[1].startswith("model.safetensors.index.json claims a total_size of 0, the tensors have")
    stale = shutil.copytree(convert(dense_source, tmp_path / "one"), tmp_path / "stale")
    shutil.copy(index, stale / index.name)
    problem = found(stale)[0]
    assert problem.startswith("model.safetensors.index.json is of another checkpoint: it names model-00001-of-")
    next(out.glob("model-00002-of-*")).unlink()
    (problem,) = found(out)
    assert re.search(r"model-00002-of-\d+\.safetensors is missing, and the index names it", problem)


def test_shards_without_the_format_that_transformers_wants(converted_dense: Path, tmp_path: Path) -> None:
    path = shutil.copytree(converted_dense, tmp_path / "defective")
    rewrite(path, lambda tensors: None, {"made by": "hand"})
    reseal(path)
    assert found(path) == [
        "model.safetensors lacks the metadata format: pt, without which transformers refuses to load it"
    ]


def test_config_and_files_that_differ_from_the_source(
    converted_dense: Path, dense_source: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(converted_dense, tmp_path / "defective")
    edit_json(path / "config.json", lambda config: config["text_config"].update(rms_norm_eps=1e-5))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    reseal(path)
    assert found(path, dense_source) == [
        "config.json differs from the source's in text_config",
        "chat_template.jinja is not the same as in the source",
    ]


def test_another_source_is_not_taken_for_the_right_one(converted_dense: Path, tmp_path: Path) -> None:
    import tiny

    other = tiny.write_target(tmp_path / "other", seed=1)
    problems = found(converted_dense, other)
    assert any("quantizes to" in problem or "same bytes" in problem for problem in problems)


def test_a_source_of_another_model_is_doubted_before_the_conversion(converted_dense: Path, moe_source: Path) -> None:
    advice = {problem.fix for problem in verify(converted_dense, moe_source, rows=0).problems}
    assert advice == {f"is {moe_source} what it was made from? If so, convert it again"}


def test_broken_files_are_problems_of_the_output_and_errors_of_the_source(
    converted_dense: Path, dense_source: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(converted_dense, tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = found(broken)
    assert "is truncated" in problem
    with pytest.raises(MxqError, match="is truncated") as error:
        verify(converted_dense, broken)
    assert error.value.exit_code == 1
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        verify(tmp_path)
