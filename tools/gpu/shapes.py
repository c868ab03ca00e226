"""Directories that vLLM takes for models of the published shapes: everything but weights, which it makes up itself."""

import json
import shutil
from pathlib import Path
from typing import Any

from mxq.checkpoint.compressed_tensors import compressed_tensors_config
from mxq.hardware import machine, opening
from mxq.hardware.memory import Need, need

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


def memory_needed(name: str, precision: str, method: str, k: int, concurrency: int, tokens: int) -> Need:
    """Return the bytes of an engine for so many requests of so many tokens at once."""
    drafter = str(ARCHITECTURES / f"{DRAFTERS[name]}.json")
    setup = opening.setup(machine.load("h200"), ARCHITECTURES / f"{name}.json", precision, drafter)
    return need(setup, method, k, concurrency, tokens)


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
