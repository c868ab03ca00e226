"""The model card: README.md with the YAML head that the Hugging Face hub reads, from the manifest alone."""

import math
from collections import defaultdict
from typing import Any

import yaml

from mxq.checkpoint.beside import SCALES

_ALGORITHMS = {"gptq": "GPTQ", "awq": "AWQ", "smoothquant": "SmoothQuant"}
_FORMS = {"quark": "AMD Quark's", "compressed-tensors": "compressed-tensors', `mxfp4-pack-quantized`"}


def card(manifest: dict[str, Any], layers: list[dict[str, Any]]) -> str:
    """Return the card of a converted checkpoint; ``layers`` is the content of layers.jsonl."""
    source, recipe = manifest["source"], manifest["recipe"]
    form = manifest["options"]["format"]
    head: dict[str, Any] = {"tags": ["mxfp4", form, "qwen3.5"]}
    if source["hub"]:
        head = {"base_model": source["name"], "base_model_relation": "quantized"} | head
    sqnr = sorted(layer["sqnr_db"] for layer in layers if layer["sqnr_db"] is not None)
    commit = f" at commit `{source['commit']}`" if source["commit"] else ""
    activations = "MXFP4, quantized as the model runs" if recipe["activations"] == "dynamic" else "unquantized"
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        "",
        f"# {source['name']}, MXFP4",
        "",
        f"Made from `{source['name']}`{commit} ({', '.join(source['architectures'])}) by mxq "
        f"{manifest['versions']['mxq']}",
        f"with the recipe `{recipe['name']}`: {recipe['description']}.",
        "",
        "| | |",
        "|---|---|",
        f"| quantized | {len(layers)} matrices |",
        f"| weights | OCP MXFP4: E2M1 elements, an E8M0 scale for every 32, scale rule `{recipe['scale_rule']}` |",
        *_calibration(manifest),
        f"| activations | {activations} |",
        f"| form | {_FORMS[form]} |",
        f"| routed experts stored | {manifest['options']['experts']} |",
        f"| size of the tensors | {manifest['bytes'] / 1e9:.3f} GB, from {source['bytes'] / 1e9:.3f} GB |",
    ]
    if sqnr:
        lines.append(
            f"| signal to quantization noise per matrix | median {_median(sqnr):.2f} dB, lowest {sqnr[0]:.2f} dB |"
        )
    if any(tensor["action"] == "dequantize" for tensor in manifest["tensors"].values()):
        lines += [
            "",
            "The source is block-FP8: MXFP4 is made from the float32 products of its codes and scales. What is called",
            "dequantize below is those products as the nearest bf16, and a copy of the source's bytes is the rest.",
        ]
    else:
        lines += ["", f"Every other tensor is a byte-for-byte copy of the source's{_folded(manifest)}."]
    lines += _chosen(manifest)
    lines += ["", "## What was quantized", ""]
    lines += ["| rule | tensors | |", "|---|---|---|"]
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for name, tensor in manifest["tensors"].items():
        if not (tensor["action"] == "quantize" and name.endswith("_scale")):
            counts[tensor["rule"], tensor["action"]] += 1
    lines += [f"| `{rule}` | {count} | {action} |" for (rule, action), count in counts.items()]
    lines += [
        "",
        "A quantized weight counts once and is stored as two tensors, codes and scales. `mxq_manifest.json` holds the",
        "checksum of every file and the rule behind every tensor, `layers.jsonl` the error of every quantized matrix.",
    ]
    return "\n".join(lines) + "\n"


def _calibration(manifest: dict[str, Any]) -> list[str]:
    """Return the rows about how codes were chosen; none of a recipe that rounds."""
    text, result = manifest.get("calibration"), manifest.get("calibrated")
    if text is None or result is None:
        return []
    recipe = manifest["recipe"]
    options = ", ".join(f"{name} {value}" for name, value in recipe["options"].items()) or "none"
    rows = [
        f"| calibrated by | {_ALGORITHMS[recipe['algorithm']]} of AMD Quark {manifest['versions']['amd-quark']}, on "
        f"{text['device']}; options: {options} |",
        f"| calibration text | {text['set']}: {text['samples']} samples of {text['length']} tokens "
        f"({text['samples'] * text['length']} tokens), seed {text['seed']} |",
    ]
    seen = [count for counts in result["tokens_per_expert"].values() for count in counts]
    if seen:
        unseen = sum(count == 0 for count in seen)
        rows.append(
            f"| routed experts by tokens of it | {min(seen)} to {max(seen)}; {unseen} saw none, and are rounded to the "
            "nearest |"
        )
    return rows


def _chosen(manifest: dict[str, Any]) -> list[str]:
    """Return the section about what a mixed recipe kept; none of another recipe."""
    if "choice" not in manifest:
        return []
    choice, asked = manifest["choice"], manifest["mixed"]
    text, count, whole_gb = asked["text"], len(choice["groups"]), choice["bytes"]["everything_quantized"] / 1e9
    kl, whole = (choice[name]["kl"]["estimate"] for name in ("chosen", "everything_quantized"))
    kept = [group for group in choice["groups"] if group["kept"]]
    return [
        "",
        "## What was kept, by measured error",
        "",
        f"These of {count} groups of modules stay as they were: of all choices that make the checkpoint at most",
        f"{asked['budget']:g} times as large as everything quantized, {whole_gb:.3f} GB, that with the largest sum",
        "of errors.",
        "An error is KL to the unquantized model, in nats per token, with the group alone quantized, on",
        f"{text['samples']} samples of {text['length']} tokens (text {text['set']}, seed {text['seed']}). That of this "
        f"checkpoint is {kl:.6f},",
        f"on the text by which it was chosen, and {whole:.6f} with everything quantized.",
        "",
        "| kept | KL | 95 % interval | MB more |",
        "|---|---|---|---|",
        *(_kept_row(group) for group in kept),
    ]


def _kept_row(group: dict[str, Any]) -> str:
    kl = group["kl"]
    ends = "-" if kl["lower"] is None else f"{kl['lower']:.6f} to {kl['upper']:.6f}"
    return f"| {group['group']} | {kl['estimate']:.6f} | {ends} | {group['bytes_saved'] / 1e6:.3f} |"


def _folded(manifest: dict[str, Any]) -> str:
    count = len(manifest.get("calibrated", {}).get("folded", ()))
    if not count:
        return ""
    return f", but {count} norms, which undo what columns behind them were scaled by ({SCALES})"


def _median(ordered: list[float]) -> float:
    middle = (len(ordered) - 1) / 2
    return (ordered[math.floor(middle)] + ordered[math.ceil(middle)]) / 2
