"""Checkpoints in exactly the layout of the published ones, from the modules that were trained.

What the real Qwen3.5 checkpoints look like and a plain ``save_pretrained`` does not reproduce: names below
``model.language_model.``, a vision tower, the MTP head, language-model experts fused into 3-D tensors without
``.weight`` while the MTP experts are stored one by one, ``A_log`` and the GDN norm in float32 among bf16.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import tokenizer as tok

State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The numbers that tell one testbed target from another; everything else is common to all."""

    layers: int = 8
    hidden: int = 256
    intermediate: int = 512
    vocabulary: int = tok.VOCABULARY
    experts: int = 0  # 0: dense
    experts_per_token: int = 2
    expert_intermediate: int = 256
    max_positions: int = 2048

    @property
    def moe(self) -> bool:
        """Whether the feed-forward layers are mixtures of experts."""
        return self.experts > 0


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """The numbers of a DFlash drafter; hidden size and vocabulary are its target's.

    Its keys and values have the target's shape (kv heads, head dim), because vLLM keeps all of a drafter's layers in
    one K/V cache group: layers of another shape are cut into groups of as many as the target has full-attention ones.
    """

    layers: int = 3
    intermediate: int = 256
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    taps: int = 3


def target_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return config.json of a target: the keys that the published configurations have."""
    ids = {name: tokenizer.token_to_id(name) for name in tok.SPECIAL}
    text: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": ids[tok.END_OF_TEXT],
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(shape.layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 64,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": shape.max_positions,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }
    if shape.moe:
        text |= {
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": shape.expert_intermediate,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": shape.expert_intermediate,
        }
    else:
        text |= {"model_type": "qwen3_5_text", "intermediate_size": shape.intermediate}
    kind = "qwen3_5_moe" if shape.moe else "qwen3_5"
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if shape.moe else "Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": ids["<|image_pad|>"],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": False,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 64,
            "model_type": kind,
            "num_heads": 1,
            "num_position_embeddings": 16,
            "out_hidden_size": shape.hidden,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def drafter_config(shape: DrafterShape, target: dict[str, Any], mask_token_id: int) -> dict[str, Any]:
    """Return config.json of a DFlash drafter for a target with the configuration ``target``."""
    text = target["text_config"]
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": target_layer_ids(text["num_hidden_layers"], shape.taps),
        },
        "dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": text["max_position_embeddings"],
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_target_layers": text["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": text["vocab_size"],
    }


def target_layer_ids(layers: int, taps: int) -> list[int]:
    """Spread ``taps`` layers over the target: evenly from 1 to L - 3 where that many exist, else the last ones."""
    if taps <= layers - 3:
        return [round(1 + i * (layers - 4) / max(taps - 1, 1)) for i in range(taps)]
    return list(range(layers - taps, layers))


def text_config(config: dict[str, Any]) -> Any:
    """Return transformers' text configuration for a target's config.json."""
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    text = dict(config["text_config"])
    kind = Qwen3_5MoeTextConfig if text["model_type"] == "qwen3_5_moe_text" else Qwen3_5TextConfig
    return kind(**{k: v for k, v in text.items() if k not in ("model_type", "dtype")})


def vision_tower(config: dict[str, Any]) -> State:
    """Return a vision tower's tensors: randomly initialised, present because real checkpoints have one."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    vision = {k: v for k, v in config["vision_config"].items() if k not in ("model_type", "deepstack_visual_indexes")}
    return dict(Qwen3_5VisionModel(Qwen3_5VisionConfig(**vision)).state_dict())


def save_target(
    directory: Path,
    config: dict[str, Any],
    tokenizer: Tokenizer,
    text: State,
    lm_head: Tensor,
    mtp: State,
    vision: State,
    *,
    shards: int = 1,
) -> None:
    """Write a target. ``text`` has transformers' names of the text model, ``mtp`` those of ``MTPModel``.

    With ``shards`` 2 the MTP head has a file of its own, so that it can be trained again without the rest changing.
    """
    tensors = {f"model.language_model.{name}": tensor for name, tensor in text.items()}
    tensors["lm_head.weight"] = lm_head
    tensors |= {f"model.visual.{name}": tensor for name, tensor in vision.items()}
    for name, tensor in mtp.items():
        if name.endswith("experts.gate_up_proj"):
            base = f"mtp.{name.removesuffix('gate_up_proj')}"
            for e, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                tensors |= {f"{base}{e}.gate_proj.weight": gate, f"{base}{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            base = f"mtp.{name.removesuffix('down_proj')}"
            tensors |= {f"{base}{e}.down_proj.weight": expert for e, expert in enumerate(tensor)}
        else:
            tensors[f"mtp.{name}"] = tensor
    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        _save_tensors(directory / "model.safetensors", tensors)
    else:
        head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
        _save_shards(directory, [{n: t for n, t in tensors.items() if n not in head}, head])
    _save_json(directory / "config.json", config)
    stop = [tokenizer.token_to_id(tok.END), tokenizer.token_to_id(tok.END_OF_TEXT)]
    _save_json(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": stop, "pad_token_id": stop[1], "max_new_tokens": 256},
    )
    vision_size = config["vision_config"]
    pixels = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": vision_size["spatial_merge_size"],
        "patch_size": vision_size["patch_size"],
        "temporal_patch_size": vision_size["temporal_patch_size"],
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 1024, "shortest_edge": 64},
    }
    _save_json(directory / "preprocessor_config.json", {**pixels, "image_processor_type": "Qwen2VLImageProcessorFast"})
    _save_json(
        directory / "video_preprocessor_config.json", {**pixels, "video_processor_type": "Qwen3VLVideoProcessor"}
    )
    tok.save(tokenizer, directory)


def save_drafter(directory: Path, config: dict[str, Any], state: State) -> None:
    """Write a drafter: its network only, embedding and output head are the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    _save_tensors(directory / "model.safetensors", state)
    _save_json(directory / "config.json", config)


def served(state: State) -> State:
    """Return ``state`` in the precision it is stored and served in: bf16, but float32 for A_log and the GDN norm."""
    return {
        name: tensor.detach().cpu().to(torch.float32 if _keeps_float32(name) else torch.bfloat16).contiguous()
        for name, tensor in state.items()
    }


def _keeps_float32(name: str) -> bool:
    return name.endswith((".A_log", ".linear_attn.norm.weight"))


def _save_tensors(path: Path, tensors: State) -> None:
    save_file({k: v.clone() for k, v in served(tensors).items()}, path, metadata={"format": "pt"})


def _save_shards(directory: Path, shards: list[State]) -> None:
    """Write several files and the index that says which tensor is in which."""
    where: dict[str, str] = {}
    size = 0
    for i, tensors in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _save_tensors(directory / name, tensors)
        where |= dict.fromkeys(sorted(tensors), name)
        size += sum(tensor.nbytes for tensor in served(tensors).values())
    _save_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def _save_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
