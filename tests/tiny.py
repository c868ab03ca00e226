"""Randomly initialised checkpoints in the real layout, for tests that need structure and not skill."""

import random
from pathlib import Path
from typing import Any

import torch
from testbed_training import export, text
from testbed_training import tokenizer as tok
from testbed_training.target import CausalLM

from mxq.decode.dflash import DFlashModel
from mxq.decode.mtp import MTPModel
from mxq.models.dflash import DFlashConfig


def write_target(directory: Path, *, moe: bool = False, seed: int = 0, layers: int = 4, vocabulary: int = 512) -> Path:
    """Write a random target with tokenizer, vision tower and MTP head; returns ``directory``."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    texts = [tok.conversation(e.prompt) + e.response for make in text.families().values() for e in [make(rng)] * 3]
    tokenizer = tok.train(texts, vocabulary)
    shape = export.Shape(layers=layers, vocabulary=vocabulary, experts=4 if moe else 0)
    config = export.target_config(shape, tokenizer)
    model = _causal_lm(config)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data = torch.log(torch.expm1(torch.empty_like(parameter).uniform_(0.01, 0.3)))
        elif "norm" in name and not name.endswith("linear_attn.norm.weight"):
            parameter.data.normal_(0, 0.05)  # a loader that forgets the 1 + w of these norms must not pass
        elif parameter.ndim >= 2 and "conv1d" not in name and "embed" not in name:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    mtp = MTPModel(model.config)
    for name, parameter in mtp.named_parameters():
        parameter.data.normal_(0, 0.05 if "norm" in name else parameter.shape[-1] ** -0.5)
    export.save_target(
        directory,
        config,
        tokenizer,
        dict(model.model.state_dict()),
        model.lm_head.weight,
        dict(mtp.state_dict()),
        export.vision_tower(config),
    )
    return directory


def write_drafter(directory: Path, target: Path, *, seed: int = 0, **shape: int) -> Path:
    """Write a random DFlash drafter that fits ``target``, heads grouped as in published ones; returns ``directory``."""
    import json

    torch.manual_seed(seed)
    config = json.loads((target / "config.json").read_text())
    mask = config["text_config"]["vocab_size"] - 1
    drafter = export.drafter_config(export.DrafterShape(**{"taps": 2, "heads": 4, **shape}), config, mask)
    model = DFlashModel(DFlashConfig.from_dict(drafter))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    export.save_drafter(directory, drafter, dict(model.state_dict()))
    return directory


def _causal_lm(config: dict[str, Any]) -> CausalLM:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    kind = Qwen3_5MoeForCausalLM if config["model_type"] == "qwen3_5_moe" else Qwen3_5ForCausalLM
    return kind(export.text_config(config))
