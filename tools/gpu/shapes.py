"""Directories that vLLM takes for models of the published shapes: everything but weights, which it makes up itself."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq.checkpoint.compressed_tensors import compressed_tensors_config
from mxq.hardware import machine, opening
from mxq.hardware.memory import need

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ROOT / "tests" / "data" / "architectures"
DRAFTERS = {"Qwen3.5-27B": "Qwen3.5-27B-DFlash", "Qwen3.5-35B-A3B": "Qwen3.5-35B-A3B-DFlash-v1"}
"""Of two drafters published for the second the first: the later one mixes kinds of attention, vLLM 0.25 cannot."""

_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json"),
)
# By the default recipe: what stays bf16, under the names of vLLM's modules and of the checkpoint's.
_KEPT = ("lm_head", "re:.*visual.*", "re:.*mtp.*", "re:.*in_proj_(a|b|ba)$", "re:.*mlp.gate$")
_KEPT_IN_MOE = ("re:.*self_attn.*", "re:.*linear_attn.*", "re:.*shared_expert.*")


def weights_needed(name: str, precision: str, method: str) -> float:
    """Return the bytes of an engine's weights, a DFlash drafter's included."""
    drafter = str(ARCHITECTURES / f"{DRAFTERS[name]}.json")
    setup = opening.setup(machine.load("h200"), ARCHITECTURES / f"{name}.json", precision, drafter)
    needed = need(setup, method, 0, 0, 0)
    return needed.target + needed.drafter


@dataclass(frozen=True)
class Blocks:
    """How vLLM's cache is laid out: all kinds of layers take blocks of one size from it.

    Attributes:
        tokens: of attention in a block (``block_size``).
        bytes: of a block, for as many layers as a group has.
        each: blocks that a request takes.
    """

    tokens: int
    bytes: int
    each: int


def blocks_needed(name: str, method: str, k: int, most_k: int, request: int) -> Blocks:
    """Return the blocks for requests of so many tokens (vLLM 0.25: ``_get_kv_cache_groups_uniform_page_size``).

    Layers are grouped by kind, in groups of one size; a group has a block for each ``tokens`` of attention, or one for
    each of K + 1 states of its gated DeltaNets. The block's size is that of ``most_k`` drafts, whatever K is: vLLM's
    own would differ by a few percent, and be a part of the key under which compiled code is kept.
    """
    config = _config(name)["text_config"]
    kinds = config["layer_types"]
    attention, linear = kinds.count("full_attention"), kinds.count("linear_attention")
    token = 4 * config["num_key_value_heads"] * config["head_dim"]  # bytes of K and V in bfloat16
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    convolved = (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1 + most_k) * 2
    state = convolved + values * config["linear_key_head_dim"] * 4
    tokens = 16 * math.ceil(state / (16 * token))
    layers = [linear, attention + (method == "mtp")]
    if method == "dflash":
        drafter = _config(DRAFTERS[name])
        assert 4 * drafter["num_key_value_heads"] * drafter["head_dim"] == token
        layers.append(drafter["num_hidden_layers"])
    size = min(layers)
    states, *others = (math.ceil(number / size) for number in layers)
    return Blocks(tokens, size * tokens * token, states * (k + 1) + sum(others) * math.ceil(request / tokens))


def write_target(name: str, precision: str, directory: Path) -> Path:
    """Write a target's directory, "bf16" or "mxfp4", and return it.

    MXFP4 is weight-only, in the form of compressed-tensors: the one that vLLM runs by native kernels (Marlin) on an
    NVIDIA GPU before Blackwell.
    """
    path = directory / f"{name}-{precision}"
    config = _config(name)
    if precision == "mxfp4":
        moe = "num_experts" in config["text_config"]
        kept = [*_KEPT, *(_KEPT_IN_MOE if moe else ())]
        config["quantization_config"] = compressed_tensors_config(kept, weight_only=True)
    return _write(path, config)


def write_drafter(name: str, directory: Path) -> Path:
    """Write the directory of a target's DFlash drafter and return it."""
    return _write(directory / DRAFTERS[name], _config(DRAFTERS[name]))


def _config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ARCHITECTURES / f"{name}.json").read_text())
    return found


def _write(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in _BESIDE:  # any tokenizer does: prompts are token ids
        shutil.copyfile(ROOT / "mxq" / "testbed" / "dense" / name, path / name)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return path
