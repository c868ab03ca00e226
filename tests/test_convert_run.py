"""A conversion's output: bytes, names, files, and nothing at all when it fails."""

import json
import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import vllm_matching as vllm
import yaml
from checkpoints import Tensors, edit_json, metadata, raw_headers, read_all, rewrite, sparse_copy
from conversion import convert
from hypothesis import given, settings
from hypothesis import strategies as st

from mxq.checkpoint import Checkpoint, TensorInfo
from mxq.checkpoint.manifest import checksum
from mxq.checkpoint.staging import staged
from mxq.checkpoint.writer import ShardWriter, TensorSpec, layout
from mxq.convert import decide, recipe
from mxq.convert.plan import plan
from mxq.convert.run import run
from mxq.errors import MxqError, UsageError
from mxq.formats.rules import RULES
from mxq.models import qwen35
from mxq.verify.run import verify

VECTORS = Path(__file__).parent / "data" / "quark_mxfp4_even.npz"


def ordinary_blocks() -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Quark's bf16 vectors that mxq promises to equal: values [n, 32], codes [n, 16], scales [n]."""
    vectors = np.load(VECTORS)
    x = torch.from_numpy(vectors["bfloat16_even_x_u32"].view(np.float32).copy())
    amax = x.abs().amax(-1)
    kept = ((amax == 0) | ((amax >= 2.0**-120) & (amax <= 2.0**120))).numpy()
    return x[kept].bfloat16(), vectors["bfloat16_even_packed"][kept], vectors["bfloat16_even_scale"][kept]


def decoded(packed: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """Values of codes [N, K/2] and scales [N, K/32], by ml_dtypes."""
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(packed.shape[0], -1)
    elements = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return elements * np.repeat(scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)


def test_a_dense_weight_gets_quarks_bytes(dense_source: Path, tmp_path: Path) -> None:
    source = shutil.copytree(dense_source, tmp_path / "source")
    values, codes, scales = ordinary_blocks()
    name = "model.language_model.layers.1.mlp.down_proj"  # [256, 512]: 4096 blocks
    chosen = np.arange(4096) % len(values)
    rewrite(source, lambda tensors: tensors.update({f"{name}.weight": values[chosen].view(256, 512)}))
    written = read_all(convert(source, tmp_path / "out"))
    np.testing.assert_array_equal(written[f"{name}.weight"].numpy(), codes[chosen].reshape(256, 256))
    np.testing.assert_array_equal(written[f"{name}.weight_scale"].numpy(), scales[chosen].reshape(256, 16))


@pytest.mark.parametrize("experts", ["per-expert", "fused"])
def test_experts_stored_fused_get_quarks_bytes_in_either_form(moe_source: Path, tmp_path: Path, experts: str) -> None:
    source = shutil.copytree(moe_source, tmp_path / "source")
    values, codes, scales = ordinary_blocks()
    block = "model.language_model.layers.2.mlp.experts"
    up = {f"{block}.gate_up_proj": (4, 512, 256), f"{block}.down_proj": (4, 256, 256)}
    chosen = {
        name: (np.arange(math.prod(shape) // 32) * 7 + i) % len(values) for i, (name, shape) in enumerate(up.items())
    }
    rewrite(source, lambda tensors: tensors.update({n: values[chosen[n]].view(shape) for n, shape in up.items()}))
    written = read_all(convert(source, tmp_path / "out", experts=experts))
    for name, (count, rows, columns) in up.items():
        packed = codes[chosen[name]].reshape(count, rows, columns // 2)
        scale = scales[chosen[name]].reshape(count, rows, columns // 32)
        if experts == "fused":
            np.testing.assert_array_equal(written[name].numpy(), packed)
            np.testing.assert_array_equal(written[f"{name}_scale"].numpy(), scale)
            continue
        assert name not in written
        for expert in range(count):
            projections = {"down": slice(None)} if "down" in name else {"gate": slice(0, 256), "up": slice(256, 512)}
            for projection, span in projections.items():
                weight = f"{block}.{expert}.{projection}_proj.weight"
                np.testing.assert_array_equal(written[weight].numpy(), packed[expert, span])
                np.testing.assert_array_equal(written[f"{weight}_scale"].numpy(), scale[expert, span])


def test_a_source_stored_per_expert_converts_to_the_same_as_one_stored_fused(moe_source: Path, tmp_path: Path) -> None:
    split = shutil.copytree(moe_source, tmp_path / "split")

    def take_apart(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            fused, block = tensors.pop(name), name.rpartition(".")[0]
            for expert, weight in enumerate(fused):
                parts = {"down": weight} if "down" in name else dict(zip(("gate", "up"), weight.chunk(2), strict=True))
                for projection, part in parts.items():
                    tensors[f"{block}.{expert}.{projection}_proj.weight"] = part.clone()

    rewrite(split, take_apart)
    for experts in ("per-expert", "fused"):
        ours = read_all(convert(split, tmp_path / f"split-{experts}", experts=experts))
        theirs = read_all(convert(moe_source, tmp_path / f"fused-{experts}", experts=experts))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_everything_else_is_the_same_bytes(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out")
    before, after = read_all(source), read_all(out)
    kept = before.keys() & after.keys() - {name for name in after if f"{name}_scale" in after}
    assert {
        name for name in before if name.startswith(("mtp.", "model.visual.", "lm_head", "model.language_model.e"))
    } <= kept
    for name in kept:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].view(-1).view(torch.uint8), before[name].view(-1).view(torch.uint8))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "preprocessor_config.json").read_bytes() == (source / "preprocessor_config.json").read_bytes()
    config, expected = (json.loads((path / "config.json").read_text()) for path in (out, source))
    assert config.pop("quantization_config")["quant_method"] == "quark"
    assert config == expected


def test_shards_and_index(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out", max_shard_size=1_000_000)
    whole = read_all(convert(source, tmp_path / "whole"))
    assert not (tmp_path / "whole" / "model.safetensors.index.json").exists()
    sharded = read_all(out)
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)
    headers = raw_headers(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in headers.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert sorted(headers) == [f"model-{i:05}-of-{len(headers):05}.safetensors" for i in range(1, len(headers) + 1)]
    assert len(headers) > 3
    for file in headers:
        assert metadata(out / file) == {"format": "pt"}
        assert (out / file).stat().st_size < 1_050_000
        assert (out / file).stat().st_mode & 0o777 == 0o644


def test_the_error_of_every_matrix_is_what_numpy_computes(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out")
    before, after = read_all(source), read_all(out)
    layers = [json.loads(line) for line in (out / "layers.jsonl").read_text().splitlines()]
    assert {layer["module"] for layer in layers} == {
        name.removesuffix(".weight_scale") for name in after if name.endswith(".weight_scale")
    }
    for layer in layers:
        packed, scale = (after[layer["module"] + suffix] for suffix in (".weight", ".weight_scale"))
        tensor = before[layer["tensor"]]
        if tensor.ndim == 3:
            _, expert, projection = layer["module"].rsplit(".", 2)
            tensor = tensor[int(expert)]
            if projection != "down_proj":
                tensor = tensor.chunk(2)[projection == "up_proj"]
        exact = tensor.double().numpy()
        assert layer["shape"] == list(exact.shape)
        noise = ((exact - decoded(packed, scale)) ** 2).sum()
        signal = (exact**2).sum()
        assert layer["sqnr_db"] == pytest.approx(10 * np.log10(signal / noise), abs=1e-3)
        assert 15 < layer["sqnr_db"] < 25
        assert layer["relative_error"] == pytest.approx(np.sqrt(noise / signal), rel=1e-4)
        limits = 6 * np.repeat(scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)
        assert layer["saturated"] == (np.abs(exact) > limits).mean()
        assert layer["blocks"] == scale.numel()
        assert layer["scale_exponents"] == [int(scale.min()) - 127, int(scale.max()) - 127]


def test_weights_of_zeros_and_weights_without_error_have_no_ratio(dense_source: Path, tmp_path: Path) -> None:
    source = shutil.copytree(dense_source, tmp_path / "source")
    name = "model.language_model.layers.0.mlp.{}.weight"

    def edit(tensors: Tensors) -> None:
        tensors[name.format("up_proj")].zero_()
        tensors[name.format("gate_proj")].fill_(-1.5)
        tensors[name.format("gate_proj")][0, :32] = 0

    rewrite(source, edit)
    out = convert(source, tmp_path / "out")
    layers = {layer["module"]: layer for layer in map(json.loads, (out / "layers.jsonl").read_text().splitlines())}
    zeros, exact = (layers[name.format(p).removesuffix(".weight")] for p in ("up_proj", "gate_proj"))
    assert (zeros["sqnr_db"], zeros["relative_error"], zeros["scale_exponents"]) == (None, None, None)
    assert zeros["zero_blocks"] == zeros["blocks"] == 512 * 8
    assert (exact["sqnr_db"], exact["relative_error"], exact["zero_blocks"]) == (None, 0.0, 1)
    assert exact["scale_exponents"] == [-2, -2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sources_in_fp32_and_fp16_are_quantized_from_what_they_are(
    dense_source: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    source = shutil.copytree(dense_source, tmp_path / "source")
    weight = "model.language_model.layers.0.mlp.up_proj.weight"
    values = torch.randn(512, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
    rewrite(source, lambda tensors: tensors.update({weight: values}))
    written = read_all(convert(source, tmp_path / "out"))
    error = decoded(written[weight], written[f"{weight}_scale"]) - values.double().numpy()
    assert 0.10 < np.linalg.norm(error) / np.linalg.norm(values.double().numpy()) < 0.125


def test_weight_only_differs_only_in_what_the_config_says_of_activations(dense_source: Path, tmp_path: Path) -> None:
    both = convert(dense_source, tmp_path / "both"), convert(dense_source, tmp_path / "weights", "mxfp4-weight-only")
    tensors = [read_all(path) for path in both]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    schemes = [json.loads((path / "config.json").read_text())["quantization_config"] for path in both]
    assert schemes[1]["global_quant_config"].pop("input_tensors") is None
    assert schemes[0]["global_quant_config"].pop("input_tensors")["is_dynamic"] is True
    assert schemes[0] == schemes[1]


def test_a_text_only_checkpoint_with_tied_embeddings_biases_and_no_mtp(source: Path, tmp_path: Path) -> None:
    text = shutil.copytree(source, tmp_path / "text")
    bias = "model.layers.3.self_attn.q_proj.bias"

    def edit(tensors: Tensors) -> None:
        whole = dict(tensors)
        tensors.clear()
        for name, tensor in whole.items():
            if name.startswith("model.language_model."):
                tensors[name.replace("language_model.", "")] = tensor
        tensors[bias] = torch.arange(512).bfloat16()

    def text_config(config: dict[str, Any]) -> None:
        inner = config.pop("text_config")
        architecture = config["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
        config.clear()
        config.update(inner | {"architectures": [architecture], "tie_word_embeddings": True})

    rewrite(text, edit)
    edit_json(text / "config.json", text_config)
    out = convert(text, tmp_path / "out")
    assert verify(out, text, rows=0).problems == []
    ours, theirs = read_all(out), read_all(convert(source, tmp_path / "whole"))
    assert torch.equal(ours.pop(bias), read_all(text)[bias])
    assert sum(name.endswith("_scale") for name in ours) == sum(name.endswith("_scale") for name in theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name.replace("model.", "model.language_model.", 1)])
    exclude = json.loads((out / "config.json").read_text())["quantization_config"]["exclude"]
    assert vllm.quantized(exclude, "model.layers.3.self_attn.o_proj", vllm.TEXT_ONLY) == (source.name == "dense")
    assert not vllm.quantized(exclude, "model.layers.0.linear_attn.in_proj_ba", vllm.TEXT_ONLY)


def test_mtp_experts_stored_fused_are_kept_and_named(moe_source: Path, tmp_path: Path) -> None:
    fused = shutil.copytree(moe_source, tmp_path / "fused")
    block = "mtp.layers.0.mlp.experts"

    def fuse(tensors: Tensors) -> None:
        parts = {p: [tensors.pop(f"{block}.{e}.{p}_proj.weight") for e in range(4)] for p in ("gate", "up", "down")}
        tensors[f"{block}.gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], dim=1)
        tensors[f"{block}.down_proj"] = torch.stack(parts["down"])

    rewrite(fused, fuse)
    out = convert(fused, tmp_path / "out")
    assert verify(out, fused, rows=0).problems == []
    assert torch.equal(read_all(out)[f"{block}.gate_up_proj"], read_all(fused)[f"{block}.gate_up_proj"])
    exclude = json.loads((out / "config.json").read_text())["quantization_config"]["exclude"]
    assert {block, f"{block}.gate_up_proj", f"{block}.down_proj", f"{block}.3.up_proj"} <= set(exclude)
    assert not vllm.quantized(exclude, block, vllm.MTP)


@pytest.mark.parametrize("name", [name for name in recipe.names() if recipe.load(name).calibration is None])
@pytest.mark.parametrize("experts", ["per-expert", "fused"])
@pytest.mark.parametrize(
    ("form", "listing", "quantized"),
    [("quark", "exclude", vllm.quantized), ("compressed-tensors", "ignore", vllm.compressed_tensors_quantized)],
)
def test_vllm_builds_as_mxfp4_exactly_what_is_packed(
    source: Path,
    tmp_path: Path,
    name: str,
    experts: str,
    form: str,
    listing: str,
    quantized: Callable[[list[str], str, dict[str, str]], bool],
) -> None:
    """For every linear of the target and of MTP that vLLM builds, what its own functions say of our list.

    Recipes that read a text choose bytes or what is kept, and write the list as all do.
    """
    if name == "mxfp4-experts" and source.name == "dense":
        with pytest.raises(UsageError, match="no rules for qwen3_5"):
            convert(source, tmp_path / "out", name)
        return
    out = convert(source, tmp_path / "out", name, experts=experts, form=form)
    entries = json.loads((out / "config.json").read_text())["quantization_config"][listing]
    merged = {member: fused for fused, members in vllm.PACKED_MODULES.items() for member in members}
    built: dict[str, dict[str, set[bool]]] = {"target": {}, "mtp": {}}
    tensors = read_all(out)
    for tensor in tensors:
        module = tensor.removesuffix("_packed").removesuffix(".weight")
        linear = module.endswith(
            ("_proj", "_z", "_a", "_b", "_qkv", ".fc", ".gate", "_gate", ".qkv", ".proj", "fc1", "fc2")
        )
        if not linear or "patch_embed" in module:
            continue
        if ".experts" in module:
            module = module.partition(".experts")[0] + ".experts"
        prefix, _, last = module.rpartition(".")
        module = f"{prefix}.{merged.get(last, last)}"
        if module.startswith("mtp."):
            model, module = "mtp", module
        else:
            model, module = "target", vllm.apply_list([module], vllm.MULTIMODAL)[0]
        built[model].setdefault(module, set()).add(f"{tensor.removesuffix('_packed')}_scale" in tensors)
    assert len(built["target"]) > 20
    assert len(built["mtp"]) >= 5
    for model, renames in (("target", vllm.MULTIMODAL), ("mtp", vllm.MTP)):
        for module, packed in built[model].items():
            assert packed == {quantized(entries, module, renames)}, module


def test_the_card_and_the_manifest_say_what_was_done(source: Path, tmp_path: Path) -> None:
    out = convert(source, tmp_path / "out")
    manifest = json.loads((out / "mxq_manifest.json").read_text())
    assert manifest["recipe"] == recipe.load("mxfp4").as_dict()
    assert manifest["source"]["name"] == source.name
    assert manifest["files"].keys() == {file.name for file in out.iterdir()} - {"mxq_manifest.json"}
    assert manifest["bytes"] == sum(tensor.nbytes for tensor in read_all(out).values())
    tensors = {name: header for headers in raw_headers(out).values() for name, header in headers.items()}
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in manifest["tensors"].items()} == {
        name: (entry["dtype"], entry["shape"]) for name, entry in tensors.items()
    }
    card = (out / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert "base_model" not in head  # a directory here is no address that others could follow
    assert str(source.parent) not in card + (out / "mxq_manifest.json").read_text()
    layers = [json.loads(line) for line in (out / "layers.jsonl").read_text().splitlines()]
    assert f"| quantized | {len(layers)} matrices |" in card
    counted = [int(line.split("|")[2]) for line in card.splitlines() if line.endswith(" quantize |")]
    assert sum(counted) == len(layers)
    assert f"lowest {min(layer['sqnr_db'] for layer in layers):.2f} dB" in card


def test_a_conversion_is_repeatable_to_the_byte(source: Path, tmp_path: Path) -> None:
    first, second = (convert(source, tmp_path / name) for name in ("first", "second"))
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def test_transformers_reads_tokenizer_and_config_of_the_output(source: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    out = convert(source, tmp_path / "out")
    text = "What is 3 + 4?"
    assert AutoTokenizer.from_pretrained(out).encode(text) == AutoTokenizer.from_pretrained(source).encode(text)
    assert AutoConfig.from_pretrained(out).architectures == AutoConfig.from_pretrained(source).architectures


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_number_that_would_become_infinite_is_refused(
    rule: str, dtype: torch.dtype, dense_source: Path, tmp_path: Path
) -> None:
    """From 1.75 * 2^127 on, 4 times the scale 2^126 is the nearest. The rule "floor" saturates at 1.5 * 2^127."""
    (tmp_path / "own.yaml").write_text(f"extends: mxfp4\nscale_rule: {rule}\n")
    tensor = "model.language_model.layers.1.mlp.down_proj.weight"
    for name, number in (("fits", -1.74 * 2.0**127), ("does-not", -1.75 * 2.0**127)):
        source = shutil.copytree(dense_source, tmp_path / name)

        def edit(tensors: Tensors, number: float = number) -> None:
            tensors[tensor] = tensors[tensor].to(dtype)
            tensors[tensor][40, 3] = number

        rewrite(source, edit)
        out = tmp_path / f"{name}-out"
        if name == "fits" or rule == "floor":
            convert(source, out, str(tmp_path / "own.yaml"))
            assert verify(out, source).problems == []
        else:
            with pytest.raises(MxqError, match=rf"{tensor} holds 1 values that MXFP4 rounds to 2\^128, .* in row 40"):
                convert(source, out, str(tmp_path / "own.yaml"))
            assert not out.exists()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_with_a_number_that_is_none_is_refused_by_name_row_and_count(
    source: Path, tmp_path: Path, bad: float
) -> None:
    damaged = shutil.copytree(source, tmp_path / "source")
    if "moe" in source.name:
        tensor, row = (
            "model.language_model.layers.1.mlp.experts.gate_up_proj",
            2 * 512 + 256 + 40,
        )  # expert 2, up, row 40
        reason = rf"{tensor} \(\S+experts.2.up_proj\) holds 2 values .* the first in row 40"
    else:
        tensor, row = "model.language_model.layers.1.mlp.down_proj.weight", 40
        reason = rf"{tensor} holds 2 values that are NaN or infinite, the first in row 40"

    def edit(tensors: Tensors) -> None:
        rows = tensors[tensor].view(-1, tensors[tensor].shape[-1])
        rows[row, 3] = bad
        rows[row + 5, 200] = bad

    rewrite(damaged, edit)
    with pytest.raises(MxqError, match=reason):
        convert(damaged, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_outputs_that_are_in_the_way_are_left_alone(dense_source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, reason in (("full", "is not empty"), ("file", "is a file"), ("none/out", "does not exist")):
        with pytest.raises(UsageError, match=reason):
            convert(dense_source, tmp_path / name)
    assert (tmp_path / "full" / "mine.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine.txt"]
    (tmp_path / "empty").mkdir()
    assert not verify(convert(dense_source, tmp_path / "empty"), dense_source, rows=0).problems


@pytest.mark.parametrize(
    ("leads_to", "reason"), [("../elsewhere.json", "is a link out of"), ("nothing.json", "is a link to nothing")]
)
def test_links_in_place_of_a_models_files_are_noticed_by_the_plan(
    dense_source: Path, tmp_path: Path, leads_to: str, reason: str
) -> None:
    linked = shutil.copytree(dense_source, tmp_path / "linked")
    (linked / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (linked / "tokenizer.json").symlink_to(leads_to)
    with pytest.raises(MxqError, match=f"tokenizer.json {reason}") as error:
        plan(Checkpoint.open(linked), recipe.load("mxfp4"))
    assert error.value.hint == "put the file itself there"


def test_links_that_are_no_part_of_the_model_stay_behind_with_a_note(
    dense_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linked = shutil.copytree(dense_source, tmp_path / "linked")
    (tmp_path / "mine.json").write_text("mine")
    (linked / "mine.json").symlink_to("../mine.json")
    (linked / "stale.txt").symlink_to("nowhere.txt")
    (linked / "twice.txt").symlink_to("tokenizer.json")
    out = convert(linked, tmp_path / "out")
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("not copied")] == [
        "not copied: mine.json",
        "not copied: stale.txt",
    ]
    assert not (out / "mine.json").exists()
    assert (out / "twice.txt").read_bytes() == (linked / "tokenizer.json").read_bytes()
    assert verify(out, linked, rows=0).problems == []


def test_a_mount_point_is_refused_before_anything_is_written(dense_source: Path) -> None:
    with pytest.raises(UsageError, match="the output / is a mount point") as error:
        convert(dense_source, Path("/"))
    assert error.value.hint == "name a new directory inside it"


def test_what_a_killed_process_left_of_a_staged_directory_is_named_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("o[u]t.partial-a", "out.partial-b"):
        (tmp_path / name).mkdir()
    with staged(tmp_path / "o[u]t", 0):
        pass
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left over")]
    assert f"{tmp_path / 'o[u]t.partial-a'}, unless another run is writing it now" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o[u]t", "o[u]t.partial-a", "out.partial-b"]


def test_a_disk_without_room_is_noticed_before_anything_is_written(
    dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(MxqError, match=r"has 1\.00 kB free, the output needs \d\.\d\d MB") as error:
        convert(dense_source, tmp_path / "out")
    assert error.value.hint == "make room, or name a directory on another disk"
    assert not list(tmp_path.iterdir())


def test_the_number_of_threads_changes_no_byte(
    moe_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxq.convert.work._ELEMENTS_AT_ONCE", 1 << 12)
    made = plan(Checkpoint.open(moe_source), recipe.load("mxfp4"), experts="fused", max_shard_size=1_000_000)
    written = []
    for jobs in (1, 5):
        out = tmp_path / str(jobs)
        run(made, out, str(moe_source), jobs=jobs)
        written.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert written[0] == written[1]


def test_a_write_that_fails_leaves_nothing(dense_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(MxqError, match="No space left on device"):
        convert(dense_source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_sources_that_cannot_be_converted(dense_source: Path, moe_source: Path, tmp_path: Path) -> None:
    out = convert(dense_source, tmp_path / "out")
    with pytest.raises(UsageError, match="is already quantized"):
        convert(out, tmp_path / "again")
    odd = "model.language_model.layers.0.mlp.down_proj.weight"
    narrow = sparse_copy(dense_source, tmp_path / "narrow", {odd: [256, 500]})
    with pytest.raises(UsageError, match=rf"{odd} BF16 \[256, 500\] .* has 500 columns, not a multiple of 32"):
        convert(narrow, tmp_path / "out2")
    shallow = shutil.copytree(dense_source, tmp_path / "shallow")
    edit_json(shallow / "config.json", lambda config: config["text_config"].update(num_hidden_layers=8))
    with pytest.raises(UsageError, match=r"says 8 layers, the tensors are of 4"):
        convert(shallow, tmp_path / "out2")
    few = shutil.copytree(moe_source, tmp_path / "few")
    rewrite(few, lambda tensors: tensors.pop("mtp.layers.0.mlp.experts.3.up_proj.weight"))
    with pytest.raises(UsageError, match=r"mtp.layers.0.mlp.experts.3.up_proj is missing"):
        convert(few, tmp_path / "out2")
    edit_json(few / "config.json", lambda config: config["text_config"].update(num_experts=10**15))
    with pytest.raises(UsageError, match=r"says 1000000000000000 experts, but \S+mlp.experts has 4"):
        convert(few, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_shapes_that_aiter_does_not_like_are_noted(dense_source: Path, tmp_path: Path) -> None:
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    narrow = Checkpoint.open(sparse_copy(dense_source, tmp_path / "narrow", {name: [240, 96]}))
    assert plan(Checkpoint.open(dense_source), recipe.load("mxfp4")).lints == []
    (lint,) = decide.lints(narrow, qwen35.pieces(name, narrow.tensors[name].shape))
    assert lint.startswith("model.language_model.layers.0.mlp.down_proj [240, 96]: AITER wants rows in multiples of 32")


SPECS = st.lists(
    st.tuples(st.sampled_from(["U8", "BF16", "F32"]), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=12
)


@given(SPECS, st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_any_layout_of_shards_is_aligned_and_holds_everything_once(
    tmp_path_factory: pytest.TempPathFactory, specs: list[tuple[str, list[int]]], limit: int
) -> None:
    groups = [(TensorSpec(f"t{i}", dtype, tuple(shape)),) for i, (dtype, shape) in enumerate(specs)]
    shards = layout(groups, limit)
    assert sorted(tensor.name for shard in shards for tensor in shard.tensors) == sorted(g[0].name for g in groups)
    directory = tmp_path_factory.mktemp("layout")
    expected = {}
    for shard in shards:
        assert len(shard.groups) == 1 or sum(tensor.nbytes for tensor in shard.tensors) <= limit
        with ShardWriter(directory, shard) as writer:
            for tensor in reversed(shard.tensors):
                data = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8)
                expected[tensor.name] = data
                for start in range(0, len(data), 5):
                    writer.write(tensor.name, start, data[start : start + 5].numpy().data)
        assert writer.checksum == checksum(directory / shard.file)
    (directory / "config.json").write_text("{}")
    for info in shard_tensors(directory, len(shards)):
        assert info.start % {"U8": 1, "BF16": 2, "F32": 4}[info.dtype] == 0
    for name, values in read_all(directory).items():
        assert torch.equal(values.reshape(-1).view(torch.uint8), expected[name])


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=30), st.integers(0, 3), st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_checksum_is_of_the_file_in_whatever_order_and_memory_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, bool]], buffers: int, random: Random
) -> None:
    sizes = [size for size, _ in parts]
    (shard,) = layout([(TensorSpec("a", "U8", (sum(sizes),)),), (TensorSpec("b", "U8", (3,)),)], 1 << 20)
    directory = tmp_path_factory.mktemp("order")
    expected = random.randbytes(sum(sizes))

    def write(start: int, size: int, lent: bool) -> None:
        view = (writer.buffer(size) if lent else None) or memoryview(bytearray(size))
        view[:] = expected[start : start + size]
        writer.write("a", start, view)

    tasks = [(start - size, *part) for part, size, start in zip(parts, sizes, accumulate(sizes), strict=True)]
    random.shuffle(tasks)
    with ShardWriter(directory, shard, buffers) as writer, ThreadPoolExecutor(3) as pool:
        writer.write("b", 0, memoryview(b"bbb"))
        for done in [pool.submit(write, *task) for task in tasks]:
            done.result()
            writer.hash()
    assert writer.checksum == checksum(directory / shard.file)
    assert (directory / shard.file).read_bytes().endswith(expected + b"bbb")


def test_memory_comes_back_though_the_tensor_is_not_complete(tmp_path: Path) -> None:
    (shard,) = layout([(TensorSpec("a", "U8", (40,)),)], 100)
    with ShardWriter(tmp_path, shard, buffers=2) as writer:
        writer.write("a", 0, memoryview(bytes(10)))  # of other memory: the checksum reads it from the file
        for start in (10, 20, 30):
            view = writer.buffer(10)
            assert view is not None
            writer.write("a", start, view)
            writer.hash()


def shard_tensors(directory: Path, count: int) -> list[TensorInfo]:
    from mxq.checkpoint.headers import read_header

    files = sorted(directory.glob("*.safetensors"))
    assert len(files) == count
    return [tensor for file in files for tensor in read_header(file)[1].values()]


def test_a_tensor_that_is_not_filled_exactly_is_a_defect(tmp_path: Path) -> None:
    (shard,) = layout([(TensorSpec("a", "U8", (4,)),)], 100)
    with pytest.raises(ValueError, match="a not filled to the end"), ShardWriter(tmp_path, shard) as writer:
        writer.write("a", 0, memoryview(bytes(3)))
    (tmp_path / shard.file).unlink()
    with pytest.raises(ValueError, match="a is larger than its place"), ShardWriter(tmp_path, shard) as writer:
        writer.write("a", 0, memoryview(bytes(5)))
