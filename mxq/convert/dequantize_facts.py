"""What a dequantized checkpoint says of itself: mxq_dequantized.json, and the model card made from that alone.

It is no manifest of a conversion, because nothing in it is MXFP4 any more.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.manifest import checksums
from mxq.checkpoint.resolve import commit, hub_id
from mxq.convert.dequantize import Plan
from mxq.convert.manifest import source_name
from mxq.files import versions

FORMAT = 1


def origin(source: Checkpoint, spec: str, experts: str) -> dict[str, Any]:
    """Return what is dequantized, how and by what; ``spec`` names the source."""
    return {
        "made": "dequantized",
        "source": {
            "name": source_name(spec),
            "hub": hub_id(spec) is not None,
            "commit": None if hub_id(spec) is None else commit(source.path),
            "fingerprint": fingerprint(source),
            "architectures": source.config["architectures"],
            "tensors": len(source.tensors),
            "bytes": sum(tensor.nbytes for tensor in source.tensors.values()),
            "quantization_config": source.config["quantization_config"],
        },
        "options": {"experts": experts},
        "versions": versions("torch"),
    }


def facts(plan: Plan, spec: str, directory: Path, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the content of mxq_dequantized.json.

    Args:
        plan: what was carried out.
        spec: as for :func:`origin`.
        directory: where all files but this and the card lie.
        known: size and checksum of the shards.
    """
    others = checksums(sorted(file for file in directory.iterdir() if file.name not in known))
    shards = {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in known.items()}
    return {
        "format": FORMAT,
        **origin(plan.source, spec, plan.experts),
        "activations": "unquantized" if plan.weight_only else "quantized in the source, not simulated",
        "bytes": plan.bytes_after,
        "matrices": plan.matrices,
        "files": dict(sorted((shards | others).items())),
        "tensors": {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "file": shard.file,
                "action": "dequantize" if tensor.name in plan.packed else "copy",
            }
            for shard in plan.shards
            for tensor in shard.tensors
        },
    }


def card(content: dict[str, Any]) -> str:
    """Return the model card of a dequantized checkpoint, given its mxq_dequantized.json."""
    source = content["source"]
    head: dict[str, Any] = {"tags": ["qwen3.5", "mxfp4-simulation"]}
    if source["hub"]:
        head = {"base_model": source["name"]} | head
    at = f" at commit `{source['commit']}`" if source["commit"] else ""
    activations = content["activations"]
    if activations == "unquantized":
        same = (
            "An engine that computes with these weights computes what one with MXFP4 weights computes, up to rounding."
        )
    else:
        same = (
            "The source quantizes activations too, as the model runs. These weights do not: what an engine computes"
            " with\nthem has the error of the weights and not that of the activations."
        )
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        "",
        f"# {source['name']}, its MXFP4 weights in bf16",
        "",
        f"Made from the MXFP4 checkpoint `{source['name']}`{at} ({', '.join(source['architectures'])}) by mxq "
        f"{content['versions']['mxq']},",
        "for engines without MXFP4. Every weight that was packed is here the number that its code and scale mean,",
        "which bfloat16 holds exactly; every other tensor is a byte-for-byte copy. This is not the model from before",
        "the quantization, and no more exact than MXFP4.",
        "",
        same,
        "",
        "| | |",
        "|---|---|",
        f"| dequantized | {content['matrices']} matrices |",
        f"| activations | {activations} |",
        f"| routed experts stored | {content['options']['experts']} |",
        f"| size of the tensors | {content['bytes'] / 1e9:.3f} GB, from {source['bytes'] / 1e9:.3f} GB |",
        "",
        "`mxq_dequantized.json` holds the checksum of every file and what the source was.",
    ]
    return "\n".join(lines) + "\n"
