# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How vLLM 0.32.0 decides whether a module is quantized: its own functions, copied without what serves other formats.

From vllm/model_executor/layers/quantization/quark/utils.py (should_ignore_layer), .../utils/config_utils.py
(find_matching_patterns, is_equal_or_regex_match), vllm/model_executor/models/utils.py (WeightsMapper: prefixes), and
the mappings of qwen3_vl.py, qwen3_5.py and qwen3_5_mtp.py. For compressed-tensors .../compressed_tensors/utils.py
(should_ignore_layer) and .../compressed_tensors_moe.py (get_moe_method), for AutoRound .../inc/config_parser.py.
"""

import re
from typing import Any

PACKED_MODULES = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
}
# What a model class renames: Qwen3_5(Moe)ForConditionalGeneration, Qwen3_5(Moe)ForCausalLM, Qwen3_5(Moe)MTP.
MULTIMODAL = {
    "model.visual.": "visual.",
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
}
TEXT_ONLY = {"model.language_model.": "model."}
MTP: dict[str, str] = {}


def apply_list(values: list[str], orig_to_new_prefix: dict[str, str]) -> list[str]:
    mapped = []
    for key in values:
        for prefix, new_key in orig_to_new_prefix.items():
            if key.startswith(prefix):
                key = key.replace(prefix, new_key, 1)
        mapped.append(key)
    return mapped


def should_ignore_layer(
    layer_name: str, ignore: list[str], fused_mapping: dict[str, list[str]], *, check_children: bool = False
) -> bool:
    if check_children and any(
        target == layer_name or target.startswith(layer_name + ".") for target in ignore if not target.startswith("re:")
    ):
        return True
    per_shard_matches = find_matching_patterns(layer_name, ignore, fused_mapping)
    shards_ignored = [len(matches) > 0 for matches in per_shard_matches]
    if any(shards_ignored) and not all(shards_ignored):
        raise ValueError(
            f"Found different quantization schemes for the shards of "
            f"{layer_name}. vLLM requires all to use the same scheme."
        )
    return all(shards_ignored)


def find_matching_patterns(layer_name: str, patterns: list[str], fused_mapping: dict[str, list[str]]) -> list[set[str]]:
    matches = [pattern for pattern in patterns if is_equal_or_regex_match(layer_name, pattern)]
    if matches:
        return [set(matches)]
    proj_name = layer_name.split(".")[-1]
    if proj_name not in fused_mapping:
        return [set()]
    shard_names = [layer_name.replace(proj_name, shard_proj_name) for shard_proj_name in fused_mapping[proj_name]]
    return [
        {pattern for pattern in patterns if is_equal_or_regex_match(shard_name, pattern)} for shard_name in shard_names
    ]


def is_equal_or_regex_match(value: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], value) is not None
    return target == value


def quantized(exclude: list[str], module: str, renames: dict[str, str]) -> bool:
    """Whether vLLM builds ``module`` (its own name, fused modules by their fused name) as quantized."""
    experts = module.endswith(".experts")
    return not should_ignore_layer(module, apply_list(exclude, renames), PACKED_MODULES, check_children=experts)


def compressed_tensors_quantized(ignore: list[str], module: str, renames: dict[str, str]) -> bool:
    """As :func:`quantized`, by a config of compressed-tensors whose one group targets Linear."""
    ignore = apply_list(ignore, renames)
    if not module.endswith(".experts"):
        return not should_ignore_layer(module, ignore, PACKED_MODULES)
    projections = ("gate_proj", "up_proj", "down_proj")
    states = [should_ignore_layer(f"{module}.0.{name}", ignore, PACKED_MODULES) for name in projections]
    if len(set(states)) > 1:
        raise ValueError("All MoE projections need to have same quantization scheme but found multiple")
    return not states[0]


def autoround_quantized(
    extra_config: dict[str, dict[str, Any]], blocks: list[str], module: str, renames: dict[str, str]
) -> bool:
    """As :func:`quantized`, by a config of AutoRound whose other layers have 4 bits."""
    extra = dict(zip(apply_list(list(extra_config), renames), extra_config.values(), strict=True))
    blocks = apply_list(blocks, renames)

    def configured(name: str) -> bool:
        return name in extra or any(_is_pattern(key) and re.search(key, name) is not None for key in extra)

    def bits(name: str, quantized: bool) -> int:
        if name in extra:
            return extra[name].get("bits", 4 if quantized else 16)
        for pattern, layer in extra.items():
            if _is_pattern(pattern) and re.search(pattern, name) is not None:
                return layer.get("bits", 4 if quantized else 16)
        return 4 if quantized else 16

    for name in extra:
        if name in (module, f"model.{module}") and extra[name].get("bits", 16) >= 16:
            return False
    if module in extra:
        return bits(module, True) < 16
    default = not module.endswith("lm_head")
    if blocks:
        default = any(module.startswith(name) for name in blocks)
    if module.endswith(".experts"):
        states = {bits(name, default) for name in extra if name.startswith(module)}
        if len(states) > 1:
            raise ValueError(f"Fused MoE layer {module!r} requires consistent quant config for all sub-layers")
        if states:
            return states.pop() < 16
    for fused, parts in PACKED_MODULES.items():
        if module.count(fused) == 1:
            names = [module.replace(fused, part) for part in parts]
            if not any(configured(name) for name in names):
                continue
            states = {bits(name, default) for name in names}
            if len(states) > 1:
                raise ValueError(f"Fused module {module!r} requires consistent quant config for {names}")
            return states.pop() < 16
    return bits(module, default) < 16


def _is_pattern(key: str) -> bool:
    return any(character in "*+?^$()[]{}|\\" for character in key)
