"""The target computes what transformers computes, whatever blocks the tokens come in and whatever is taken back."""

import json
from typing import Any

import pytest
import torch
from decoding import Models, quantizes, reference, rewrite, write_mxfp4
from torch import Tensor

from mxq import decode
from mxq.errors import MxqError, UsageError
from mxq.formats.mxfp4 import dequantize, quantize

IDS = torch.randint(0, 500, (150,), generator=torch.Generator().manual_seed(7))
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 2e-4}  # float32 sums in another order, through four layers


def logits_and_hidden(model: Any, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    with torch.inference_mode():
        out = model.model.language_model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        return model.lm_head(out.last_hidden_state)[0], out.hidden_states, out.last_hidden_state[0]


@torch.inference_mode()
def test_prompt_then_blocks_equal_one_plain_forward(tiny_models: Models, target: decode.Target) -> None:
    logits, layers, final = logits_and_hidden(reference(tiny_models.target), IDS)
    state = target.start(len(IDS) + 16)
    taps = (2, 0)
    seen = target.prompt(state, IDS[:70], taps)
    assert seen.features is not None
    torch.testing.assert_close(seen.logits, logits[69:70], **CLOSE)
    torch.testing.assert_close(seen.hidden, final[:70], **CLOSE)
    torch.testing.assert_close(seen.features, torch.cat([layers[3][0, :70], layers[1][0, :70]], dim=-1), **CLOSE)
    # A second piece of the prompt, then verify passes of every length of which only a part is kept.
    target.prompt(state, IDS[70:75])
    done = 75
    for length, kept in [(1, 1), (16, 3), (4, 4), (16, 16), (2, 1), (7, 5)]:
        wrong = (IDS[done + kept : done + length] + 1) % target.config.vocab_size
        block = torch.cat([IDS[done : done + kept], wrong])
        seen = target.verify(state, block, taps)
        assert seen.features is not None
        torch.testing.assert_close(seen.logits[:kept], logits[done : done + kept], **CLOSE)
        torch.testing.assert_close(seen.hidden[:kept], final[done : done + kept], **CLOSE)
        torch.testing.assert_close(seen.features[:kept, :256], layers[3][0, done : done + kept], **CLOSE)
        target.commit(state, kept)
        done += kept
        assert state.length == done


@torch.inference_mode()
def test_what_was_rejected_leaves_no_trace(target: decode.Target) -> None:
    def run(rejected: Tensor) -> Tensor:
        state = target.start(64)
        target.prompt(state, IDS[:20])
        target.verify(state, torch.cat([IDS[20:23], rejected]))
        target.commit(state, 3)
        return target.verify(state, IDS[23:27]).logits

    # Experts see other numbers of tokens and so sum in another order; a real trace is thousands of times larger.
    torch.testing.assert_close(run(IDS[40:52]), run(IDS[60:72]), rtol=0, atol=2e-5)


@torch.inference_mode()
def test_a_verify_pass_not_committed_changes_nothing(target: decode.Target) -> None:
    state = target.start(64)
    target.prompt(state, IDS[:20])
    once = target.verify(state, IDS[20:30]).logits
    target.verify(state, IDS[50:66])
    torch.testing.assert_close(target.verify(state, IDS[20:30]).logits, once, rtol=0, atol=0)


@torch.inference_mode()
def test_long_prompt_in_pieces_equals_one_piece(dense_target: decode.Target) -> None:
    ids = torch.cat([IDS, IDS.flip(0)])
    whole, pieces = dense_target.start(400), dense_target.start(400)
    logits = dense_target.prompt(whole, ids).logits
    for piece in ids.split(77):
        last = dense_target.prompt(pieces, piece).logits
    torch.testing.assert_close(last, logits, **CLOSE)


def run_prompt(target: decode.Target) -> Tensor:
    with torch.inference_mode():
        return target.prompt(target.start(90), IDS[:80]).hidden


def test_text_only_layout_and_experts_one_by_one(tiny_models: Models, target: decode.Target, tmp_path: Any) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if name.startswith("model.visual."):
                continue
            name = name.replace("model.language_model.", "model.")
            if name.endswith("experts.gate_up_proj") and not name.startswith("mtp."):
                for e, expert in enumerate(tensor):
                    gate, up = expert.chunk(2)
                    tensors[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                    tensors[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
            elif name.endswith("experts.down_proj") and not name.startswith("mtp."):
                for e, expert in enumerate(tensor):
                    tensors[name.replace("down_proj", f"{e}.down_proj.weight")] = expert
            else:
                tensors[name] = tensor

    def config(values: dict[str, Any]) -> None:
        moe = values["model_type"] == "qwen3_5_moe"
        text = values.pop("text_config")
        values.clear()
        values |= text | {"architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"]}

    directory = rewrite(tiny_models.target, tmp_path / "text", change, config)
    again = decode.load_target(directory, dtype=torch.float32)
    torch.testing.assert_close(run_prompt(again), run_prompt(target), rtol=0, atol=0)
    decode.load_drafter(None, again, "mtp")


def test_tied_output_head_is_the_embedding(dense_models: Models, tmp_path: Any) -> None:
    def tie(values: dict[str, Any]) -> None:
        values["tie_word_embeddings"] = values["text_config"]["tie_word_embeddings"] = True

    directory = rewrite(dense_models.target, tmp_path / "tied", lambda t: t.pop("lm_head.weight"), tie)
    tied = decode.load_target(directory, dtype=torch.float32)
    hidden = torch.randn(3, 256)
    torch.testing.assert_close(tied.logits(hidden), hidden @ tied.model.embed_tokens.weight.T)


def test_a_tied_output_head_that_is_stored_must_be_the_embedding(dense_models: Models, tmp_path: Any) -> None:
    def tie(values: dict[str, Any]) -> None:
        values["tie_word_embeddings"] = values["text_config"]["tie_word_embeddings"] = True

    def same(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()

    decode.load_target(rewrite(dense_models.target, tmp_path / "same", same, tie))
    with pytest.raises(MxqError, match=r"tie_word_embeddings is true, but lm_head\.weight differs from model"):
        decode.load_target(rewrite(dense_models.target, tmp_path / "other", lambda tensors: None, tie))


def test_state_tensors_stay_float32_in_a_bf16_model(dense_models: Models) -> None:
    target = decode.load_target(dense_models.target)
    layer = target.model.layers[0].linear_attn
    assert (layer.A_log.dtype, layer.norm.weight.dtype) == (torch.float32, torch.float32)
    assert (layer.dt_bias.dtype, layer.in_proj_qkv.weight.dtype) == (torch.bfloat16, torch.bfloat16)


def test_mxfp4_weights_run_as_their_dequantized_checkpoint(tiny_models: Models, tmp_path: Any) -> None:
    def simulate(tensors: dict[str, Tensor]) -> None:
        for name in filter(quantizes, list(tensors)):
            tensors[name] = dequantize(*quantize(tensors[name]), torch.bfloat16)

    packed = decode.load_target(write_mxfp4(tiny_models.target, tmp_path / "q", weight_only=True), dtype=torch.float32)
    plain = decode.load_target(rewrite(tiny_models.target, tmp_path / "sim", simulate), dtype=torch.float32)
    torch.testing.assert_close(run_prompt(packed), run_prompt(plain), rtol=0, atol=0)


def test_activations_are_rounded_before_every_quantized_product(tiny_models: Models, tmp_path: Any) -> None:
    packed = decode.load_target(write_mxfp4(tiny_models.target, tmp_path / "q", weight_only=False), dtype=torch.float32)
    weight_only = decode.load_target(
        write_mxfp4(tiny_models.target, tmp_path / "w", weight_only=True), dtype=torch.float32
    )

    # The oracle: transformers' plain forward over the same weights, each quantized product's input through the bytes.
    def rounded(x: Tensor) -> Tensor:
        return dequantize(*quantize(x), x.dtype)

    def experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for token, (chosen, shares) in enumerate(zip(index.tolist(), weights, strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                gate, up = (module.gate_up_proj[expert] @ rounded(hidden[token])).chunk(2)
                inner = rounded(torch.nn.functional.silu(gate) * up)
                out[token] += share * (module.down_proj[expert] @ inner)
        return out

    oracle = weight_only.model
    for name, module in oracle.named_modules():
        if name.endswith(".experts"):
            module.forward = experts.__get__(module)
        elif quantizes(f"model.language_model.{name}.weight") and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, args: (rounded(args[0]),))
    before = run_prompt(packed)
    with torch.inference_mode():
        expected = oracle(input_ids=IDS[None, :80], use_cache=False).last_hidden_state[0]
    # A value beside a rounding boundary may go either way and then differs by a whole step: compare in the mean.
    error = (before - expected).norm() / expected.norm()
    assert error < 0.02, f"relative difference {error:.3g}"
    plain = decode.load_target(tmp_path / "w", dtype=torch.float32)
    assert (before - run_prompt(plain)).norm() / expected.norm() > 0.05


def test_missing_tensors_are_named(dense_models: Models, tmp_path: Any) -> None:
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    directory = rewrite(dense_models.target, tmp_path / "m", lambda tensors: tensors.pop(name))
    with pytest.raises(MxqError, match=f"1 tensors are missing: {name}; the checkpoint is incomplete"):
        decode.load_target(directory)


def test_missing_output_head_is_named(dense_models: Models, tmp_path: Any) -> None:
    directory = rewrite(dense_models.target, tmp_path / "m", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(MxqError, match=r"missing: lm_head\.weight"):
        decode.load_target(directory)


def test_tensors_of_no_module_are_named(dense_models: Models, tmp_path: Any) -> None:
    directory = rewrite(
        dense_models.target, tmp_path / "m", lambda t: t.update({"model.language_model.layers.9.mlp.x": torch.ones(1)})
    )
    with pytest.raises(MxqError, match=r"do not belong to this model: model\.language_model\.layers\.9\.mlp\.x"):
        decode.load_target(directory)


def test_wrong_shape_is_named(dense_models: Models, tmp_path: Any) -> None:
    name = "model.language_model.norm.weight"
    directory = rewrite(dense_models.target, tmp_path / "m", lambda t: t.update({name: torch.ones(128)}))
    with pytest.raises(MxqError, match=rf"{name} has shape \[128\] where \[256\] is needed"):
        decode.load_target(directory)


def test_quantized_but_excluded_is_refused(dense_models: Models, tmp_path: Any) -> None:
    directory = write_mxfp4(dense_models.target, tmp_path / "q", weight_only=True)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["exclude"].append("model.language_model.layers.0.mlp.down_proj")
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(MxqError, match=r"layers\.0\.mlp\.down_proj is stored in MXFP4, .* says unquantized"):
        decode.load_target(directory)


def test_unquantized_but_not_excluded_is_refused(dense_models: Models, tmp_path: Any) -> None:
    directory = write_mxfp4(dense_models.target, tmp_path / "q", weight_only=True)
    config = json.loads((directory / "config.json").read_text())
    exclude = config["quantization_config"]["exclude"]
    config["quantization_config"]["exclude"] = [entry for entry in exclude if "in_proj_a" not in entry]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(MxqError, match=r"in_proj_a is stored unquantized, .* says in MXFP4"):
        decode.load_target(directory)


def test_another_architecture_is_a_usage_error(dense_models: Models, tmp_path: Any) -> None:
    directory = rewrite(
        dense_models.target, tmp_path / "m", lambda t: None, lambda c: c.update(architectures=["LlamaForCausalLM"])
    )
    with pytest.raises(UsageError, match="LlamaForCausalLM"):
        decode.load_target(directory)


@pytest.mark.parametrize("values", [{"num_attention_heads": 0}, {"hidden_size": "wide"}, {"layer_types": ["odd"]}])
def test_a_config_no_model_can_be_built_from(dense_models: Models, tmp_path: Any, values: dict[str, Any]) -> None:
    directory = rewrite(dense_models.target, tmp_path / "m", lambda t: None, lambda c: c["text_config"].update(values))
    with pytest.raises(MxqError, match=r"config\.json"):
        decode.load_target(directory)


def test_more_layers_than_tensors_are_not_built(dense_models: Models, tmp_path: Any) -> None:
    def config(values: dict[str, Any]) -> None:
        values["text_config"].update(num_hidden_layers=10**5, layer_types=["full_attention"] * 10**5)

    with pytest.raises(MxqError, match="100000 layers, but the checkpoint holds"):
        decode.load_target(rewrite(dense_models.target, tmp_path / "m", lambda tensors: None, config))
