"""MXFP4 made into bf16 again: the numbers of the codes under the names of the original, for whatever loads those."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import mxfp4_oracle as oracle
import numpy as np
import pytest
import torch
import yaml
from checkpoints import Tensors, edit_json, metadata, raw_headers, read_all, rewrite
from conversion import convert
from hub import Hub
from hub_runner import Runner
from killing import digests

from mxq import decode
from mxq.checkpoint import Checkpoint
from mxq.convert import dequantize_facts
from mxq.convert.dequantize import EXPERTS, plan
from mxq.convert.dequantize_run import run
from mxq.convert.recipe import directory as recipes
from mxq.errors import MxqError, UsageError
from mxq.formats import tables
from mxq.formats.rules import BLOCK
from mxq.models import qwen35

TEXT_EXPERTS = "model.language_model.layers.2.mlp.experts"
MTP_EXPERTS = "mtp.layers.0.mlp.experts"
FORMS = {"quark": foreign.quark, "compressed-tensors": foreign.compressed_tensors, "auto-round": foreign.autoround}


def dequantize(path: Path, out: Path, **options: Any) -> Path:
    run(plan(path, **options), out, str(path), jobs=2)
    return out


@pytest.fixture(scope="module", params=["dense", "moe"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def original(kind: str, request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(f"{kind}_source"))


@pytest.fixture(scope="module")
def converted(kind: str, request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(f"converted_{kind}"))


@pytest.fixture(scope="module")
def simulation(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``mxq dequantize`` makes of ``converted``. Not to be changed."""
    return dequantize(converted, tmp_path_factory.mktemp("simulation") / "out")


def decoded(tensors: Tensors, name: str) -> torch.Tensor:
    """The values of a packed weight, by ml_dtypes."""
    codes = oracle.unpack(tensors[name].numpy())
    scale = oracle.e8m0(tensors[f"{name}_scale"].numpy()).repeat(BLOCK, axis=-1)
    return torch.from_numpy(oracle.e2m1(codes) * scale)


def expected(converted: Path, names: Callable[[str], bool] = lambda name: True) -> Tensors:
    """What a checkpoint of mxq's means, in float32, as published ones are stored: experts of the language model fused.

    Experts that ``names`` does not tell to fuse stay one by one.
    """
    tensors = read_all(converted)
    packed = [name for name in tensors if f"{name}_scale" in tensors]
    values = {name: decoded(tensors, name) for name in packed}
    values |= {
        name: tensors[name] for name in tensors if name not in values and name.removesuffix("_scale") not in values
    }
    blocks = [qwen35.experts_module(name.removesuffix(".weight")) for name in packed]
    for block in {block for block in blocks if block is not None and f"{block}.gate_up_proj" not in values}:
        if names(block):
            foreign.fuse_experts(values, block)
    return values


def check_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if found[name].dtype == tensor.dtype:
            assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
        else:
            assert found[name].dtype == torch.bfloat16, name
            assert torch.equal(found[name].float(), tensor), name


def test_the_tensors_are_those_of_the_original_with_the_values_of_the_codes(
    original: Path, converted: Path, simulation: Path
) -> None:
    before, after = read_all(original), read_all(simulation)
    assert {name: (t.dtype, t.shape) for name, t in after.items()} == {n: (t.dtype, t.shape) for n, t in before.items()}
    check_equal(after, expected(converted))
    assert metadata(simulation / "model.safetensors") == {"format": "pt"}
    assert json.loads((simulation / "config.json").read_text()) == json.loads((original / "config.json").read_text())
    own = {"config.json", "model.safetensors", "README.md", "mxq_dequantized.json"}
    beside = {file.name for file in simulation.iterdir()} - own
    assert {"tokenizer.json", "chat_template.jinja", "preprocessor_config.json"} <= beside
    assert all((simulation / name).read_bytes() == (original / name).read_bytes() for name in beside)


def test_quantized_again_it_is_the_same_checkpoint(converted: Path, simulation: Path, tmp_path: Path) -> None:
    again = convert(simulation, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (converted / name).read_bytes()
    assert not (again / "mxq_dequantized.json").exists()


def test_it_decodes_to_the_same_tokens_as_the_weights_in_mxfp4(original: Path, tmp_path: Path) -> None:
    weight_only = convert(original, tmp_path / "mxfp4", "mxfp4-weight-only")
    ids = torch.arange(40) * 11 % 500
    answers, logits = [], []
    for path in (weight_only, dequantize(weight_only, tmp_path / "bf16")):
        target = decode.load_target(path, dtype=torch.bfloat16)
        with torch.inference_mode():
            logits.append(target.prompt(target.start(64), ids).logits)
        answers.append(decode.generate(target, ids.tolist(), max_new_tokens=24).token_ids)
    assert torch.equal(*logits)
    assert answers[0] == answers[1]


def test_transformers_loads_it_and_misses_nothing(kind: str, simulation: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration

    models = {"dense": Qwen3_5ForConditionalGeneration, "moe": Qwen3_5MoeForConditionalGeneration}
    model, loaded = models[kind].from_pretrained(simulation, dtype="auto", output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in loaded["unexpected_keys"])
    written = read_all(simulation)
    parameters = dict(model.named_parameters())
    compared = [name for name in written if not name.startswith("mtp.")]
    assert [n for n in compared if not torch.equal(parameters[n], written[n].to(parameters[n].dtype))] == []
    assert len(compared) > 50


# --- experts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_experts(moe_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A MoE model whose MTP experts are quantized as well, stored in either way."""
    root = tmp_path_factory.mktemp("all-experts")
    recipe = yaml.safe_load((recipes() / "mxfp4.yaml").read_text())
    rules = recipe["rules"]["qwen3_5_moe"]
    rules["quantize"].append("mtp.layers.*.mlp.experts.*")
    rules["keep_if_present"].remove("mtp.*")
    rules["keep"] += [
        "mtp.fc",
        "mtp.*norm*",
        "mtp.*.self_attn.[qkvo]_proj",
        "mtp.*.mlp.gate",
        "mtp.*.mlp.shared_expert*",
    ]
    (root / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return {
        experts: convert(moe_source, root / experts, str(root / "mine.yaml"), experts=experts)
        for experts in ("per-expert", "fused")
    }


@pytest.mark.parametrize("stored", ["per-expert", "fused"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_experts_are_written_as_asked(
    all_experts: dict[str, Path], moe_source: Path, tmp_path: Path, stored: str, experts: str
) -> None:
    written = read_all(dequantize(all_experts[stored], tmp_path / "out", experts=experts))
    fuses = {"published": lambda block: block.startswith("model."), "fused": lambda block: True}
    wanted = expected(all_experts["per-expert"], fuses.get(experts, lambda block: False))
    if (stored, experts) == ("fused", "published"):
        foreign.fuse_experts(wanted, MTP_EXPERTS)  # as they are
    check_equal(written, wanted)
    if (stored, experts) == ("per-expert", "published"):
        assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in read_all(moe_source).items()}


# --- other tools -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_other_tools_checkpoints_too(form: str, converted_moe: Path, tmp_path: Path) -> None:
    path = FORMS[form](converted_moe, tmp_path / "theirs")
    (path / "quantization_config.json").write_text("{}")  # as AutoRound writes it
    edit_json(path / "config.json", lambda c: c["text_config"].update(quantization_config=c["quantization_config"]))
    out = dequantize(path, tmp_path / "out")
    check_equal(read_all(out), expected(converted_moe))  # where -0 equals 0
    assert "quantization_config" not in (out / "config.json").read_text()
    assert not (out / "quantization_config.json").exists()
    assert Checkpoint.open(out).quantization is None
    weight_only = form == "compressed-tensors"  # as the fixtures are made
    said = json.loads((out / "mxq_dequantized.json").read_text())["activations"]
    assert said == ("unquantized" if weight_only else "quantized in the source, not simulated")


@pytest.mark.parametrize("experts", ["per-expert", "fused"])
def test_the_other_form_that_mxq_writes(moe_source: Path, converted_moe: Path, tmp_path: Path, experts: str) -> None:
    path = convert(moe_source, tmp_path / "mxfp4", form="compressed-tensors", experts=experts)
    check_equal(read_all(dequantize(path, tmp_path / "out")), expected(converted_moe))


def test_a_checkpoint_in_several_files_and_into_several(converted_moe: Path, tmp_path: Path) -> None:
    path = foreign.shards(foreign.quark(converted_moe, tmp_path / "theirs"), 3)
    out = dequantize(path, tmp_path / "out", max_shard_size=2_000_000)
    check_equal(read_all(out), expected(converted_moe))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, header in raw_headers(out).items() for name in header}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_all(out).values())
    assert len(raw_headers(out)) > 3


# --- what is refused ---------------------------------------------------------------------------------------------


def refused(path: Path, out: Path, reason: str, kind: type[MxqError] = MxqError) -> MxqError:
    with pytest.raises(kind, match=reason) as error:
        dequantize(path, out)
    assert not [file for file in out.parent.iterdir() if file.name.startswith("out")]
    return error.value


def test_a_source_that_is_not_quantized_is_refused(dense_source: Path, tmp_path: Path) -> None:
    assert refused(dense_source, tmp_path / "out", "is not quantized", UsageError).hint == "give an MXFP4 checkpoint"


def test_what_verify_finds_wrong_is_refused(converted_dense: Path, tmp_path: Path) -> None:
    broken = foreign.quark(converted_dense, tmp_path / "broken")
    edit_json(broken / "config.json", lambda config: config["quantization_config"].update(exclude=[]))
    error = refused(broken, tmp_path / "out", "no exclude entry says so")
    assert error.hint == f"mxq verify {broken} --fix OUT writes a copy without"
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    rewrite(broken, lambda tensors: tensors.pop(f"{name}_scale"))
    assert "--fix" not in (refused(broken, tmp_path / "out", f"{name} is packed, but its scales").hint or "")


def test_matrices_that_cannot_be_one_tensor_are_refused(converted_moe: Path, tmp_path: Path) -> None:
    broken = foreign.quark(converted_moe, tmp_path / "broken")

    def cut(tensors: Tensors) -> None:
        for name in (f"{TEXT_EXPERTS}.1.up_proj.weight", f"{TEXT_EXPERTS}.1.up_proj.weight_scale"):
            tensors[name] = tensors[name][:100]

    rewrite(broken, cut)
    edit_json(broken / "config.json", lambda config: config["text_config"].pop("moe_intermediate_size"))
    refused(broken, tmp_path / "out", f"the matrices of {TEXT_EXPERTS}.gate_up_proj differ in size")


@pytest.mark.parametrize(
    ("byte", "reason"), [(255, r"a scale that means NaN \(byte 255\)"), (254, "values of 2\\^128")]
)
@pytest.mark.parametrize("name", ["layers.0.mlp.experts.3.up_proj", "layers.2.mlp.experts.0.down_proj"])
def test_a_scale_that_bf16_has_no_number_for_is_refused(
    converted_moe: Path, tmp_path: Path, byte: int, reason: str, name: str
) -> None:
    broken = foreign.quark(converted_moe, tmp_path / "broken")

    def edit(tensors: Tensors) -> None:
        tensors[f"model.language_model.{name}.weight_scale"][77, 2] = byte
        tensors[f"model.language_model.{name}.weight"][77, 32:48] = 0x77

    rewrite(broken, edit)
    refused(broken, tmp_path / "out", rf"model\.language_model\.{name} holds {reason}.*the first in row 77")


def test_the_largest_and_the_lowest_scales_are_kept(converted_dense: Path, tmp_path: Path) -> None:
    extreme = foreign.quark(converted_dense, tmp_path / "extreme")
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    codes = torch.arange(16).repeat_interleave(2)[:16] % 8
    scales = [0, 1, tables.SAFE_BYTE, 254]

    def edit(tensors: Tensors) -> None:
        for block, byte in enumerate(scales):
            tensors[f"{name}_scale"][0, block] = byte
            tensors[name][0, 16 * block : 16 * block + 16] = codes if byte < 254 else 0x12  # 1 and 0.5

    rewrite(extreme, edit)
    found = read_all(dequantize(extreme, tmp_path / "out"))[name][0].double().numpy()
    values = oracle.e2m1(oracle.unpack(read_all(extreme)[name].numpy()))[0].astype(np.float64)
    powers = oracle.e8m0(read_all(extreme)[f"{name}_scale"].numpy())[0].astype(np.float64).repeat(BLOCK)
    np.testing.assert_array_equal(found, values * powers)


# --- what it says of itself, and how it ends ---------------------------------------------------------------------


def test_it_says_what_it_was_made_from(original: Path, converted: Path, simulation: Path) -> None:
    said = json.loads((simulation / "mxq_dequantized.json").read_text())
    ours = json.loads((converted / "mxq_manifest.json").read_text())
    assert said["versions"]["mxq"] == ours["versions"]["mxq"]
    assert said["source"]["name"] == converted.name
    assert len(said["source"]["fingerprint"]) == 64
    assert said["source"]["quantization_config"]["quant_method"] == "quark"
    assert said["activations"] == "quantized in the source, not simulated"
    found = digests(simulation)
    del found["mxq_dequantized.json"]
    assert {name: entry["sha256"] for name, entry in said["files"].items()} == found
    assert {name: entry["file"] for name, entry in said["tensors"].items()} == {
        name: file for file, header in raw_headers(simulation).items() for name in header
    }
    before, after = read_all(original), read_all(simulation)
    dequantized = {name for name, entry in said["tensors"].items() if entry["action"] == "dequantize"}
    assert dequantized == {name for name in before if not torch.equal(before[name], after[name])}
    card = (simulation / "README.md").read_text()
    assert f"Made from the MXFP4 checkpoint `{converted.name}`" in card
    assert "not that of the activations" in " ".join(card.split())


@pytest.mark.slow
def test_a_model_on_the_hub(converted_dense: Path, hub: Hub, mxq: Runner, tmp_path: Path) -> None:
    repository = hub.add("org/model", foreign.shards(foreign.quark(converted_dense, tmp_path / "theirs"), 2))
    mxq("dequantize", "org/model", tmp_path / "out")
    check_equal(read_all(tmp_path / "out"), expected(converted_dense))
    source = json.loads((tmp_path / "out/mxq_dequantized.json").read_text())["source"]
    assert (source["name"], source["hub"], source["commit"]) == ("org/model", True, repository.refs["main"])
    assert "base_model: org/model\n" in (tmp_path / "out/README.md").read_text()


def test_a_source_that_changes_meanwhile_spoils_it(
    converted_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(converted_dense, tmp_path / "source")
    facts = dequantize_facts.facts

    def meanwhile(*arguments: Any) -> dict[str, Any]:
        (source / "tokenizer.json").write_text("{}")
        return facts(*arguments)

    monkeypatch.setattr(dequantize_facts, "facts", meanwhile)
    with pytest.raises(MxqError, match=r"changed while it was read: tokenizer.json differs"):
        dequantize(source, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_killed_and_run_again_it_ends_with_the_same_bytes(converted_dense: Path, tmp_path: Path) -> None:
    undisturbed = digests(dequantize(converted_dense, tmp_path / "undisturbed", max_shard_size=1_000_000))
    script = Path(__file__).with_name("killing.py")
    options = ["--max-shard-size", "1000000", "--jobs", "2"]
    words = [script, "in_a_shard", "60", tmp_path, "dequantize", converted_dense, *options]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *stops, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert (last["killed"], last["published"]) == (0, True)
    assert len({stop["recorded"] for stop in stops}) > 1
    for stop in stops:
        assert stop["killed"] == -signal.SIGKILL
        assert (stop["code"], stop["left"], stop["files"]) == (0, ["out"], undisturbed)
        if stop["recorded"]:
            assert f"continuing: {stop['recorded']} of" in stop["said"]
