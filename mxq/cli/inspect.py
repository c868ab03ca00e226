"""``mxq inspect``: look into a checkpoint."""

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxq.cli.tables import show, table
from mxq.errors import MxqError, UsageError
from mxq.files import size
from mxq.progress import printable

if TYPE_CHECKING:
    from mxq.checkpoint import Checkpoint

_EPILOG = """\b
Examples:
  mxq inspect ./dense-mxfp4
  mxq inspect ./dense-mxfp4 --worst 20
  mxq inspect Qwen/Qwen3.5-27B --json
"""

_LANGUAGE_MODEL = "model.language_model."


@click.command(epilog=_EPILOG)
@click.argument("model", metavar="DIR")
@click.option("--worst", type=click.IntRange(min=1), help="Show the so many matrices with the largest error.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(model: str, worst: int | None, as_json: bool) -> None:
    """Look into the checkpoint in DIR: tensors, sizes, what is quantized, and how well.

    DIR may also be a model's id on the Hugging Face hub, or a testbed model.
    """
    from mxq.checkpoint import open_headers
    from mxq.checkpoint.beside import LAYERS

    checkpoint = open_headers(model, LAYERS)
    layers = [] if worst is None else _worst(checkpoint.path, worst)
    facts = _facts(checkpoint)
    if as_json:
        click.echo(json.dumps(facts | ({} if worst is None else {"worst": layers}), indent=2))
        return
    _show(facts)
    if worst is not None:
        _show_worst(layers)


def _facts(checkpoint: "Checkpoint") -> dict[str, Any]:
    from mxq.checkpoint.fp8 import SCALE, block_size, is_fp8
    from mxq.models import qwen35
    from mxq.verify.structure import modules

    fp8 = block_size(checkpoint) if is_fp8(checkpoint.config) else None
    packed = {module.piece.tensor for module in modules(checkpoint).values() if module.scale}
    rows: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for name, tensor in checkpoint.tensors.items():
        weight = name.removesuffix("_scale")
        scale = "MXFP4 scales" if weight in packed else "FP8 scales" if fp8 and name.endswith(SCALE) else None
        stored = "MXFP4" if name in packed else scale or tensor.dtype
        row = rows[qwen35.part(name), qwen35.role(weight), stored]
        row[0] += 1
        row[1] += tensor.nbytes
    quantization = checkpoint.quantization if fp8 is None else None
    return {
        "path": str(checkpoint.path),
        "architectures": checkpoint.config.get("architectures"),
        "files": len(checkpoint.metadata),
        "tensors": len(checkpoint.tensors),
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "quantization": quantization
        and {
            "weights": "MXFP4",
            "format": quantization.form,
            "scale_rule": quantization.rule,
            "activations": "unquantized" if quantization.weight_only else "MXFP4",
            "exclude": len(quantization.entries),
        },
        "fp8_blocks": fp8 and list(fp8),
        "content": [
            {"part": part, "role": role, "stored": stored, "tensors": count, "bytes": nbytes}
            for (part, role, stored), (count, nbytes) in sorted(rows.items())
        ],
    }


def _worst(path: Path, count: int) -> list[dict[str, Any]]:
    from mxq.checkpoint.beside import LAYERS
    from mxq.checkpoint.headers import parse_json
    from mxq.checkpoint.reader import inside

    file = path / LAYERS
    if not inside(path, LAYERS).is_file():
        raise UsageError(f"{path} holds no {LAYERS}, where the errors are", "mxq quantize writes it as it converts")
    try:
        layers = [parse_json(line, "a line") for line in file.read_bytes().splitlines()]
        known = [layer for layer in layers if layer["sqnr_db"] is not None]
        worst = sorted(known, key=lambda layer: float(layer["sqnr_db"]))[:count]
        for layer in worst:
            _row(layer)  # raises for what cannot be shown
        return worst
    except (MxqError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{file} is not as mxq wrote it: {error}", "convert again") from None


def _show(facts: dict[str, Any]) -> None:
    shown = table("part", "role", "stored as", ">tensors", ">size")
    for row in facts["content"]:
        shown.add_row(row["part"], row["role"], row["stored"], str(row["tensors"]), size(row["bytes"]))
    show(shown)
    named = facts["architectures"] or "no architecture"
    architectures = ", ".join(map(str, named)) if isinstance(named, list) else str(named)
    lines = [f"{architectures}: {facts['tensors']} tensors, {size(facts['bytes'])}, in {facts['files']} file(s)"]
    if facts["fp8_blocks"] is not None:
        lines.append(f"weights in FP8 (F8_E4M3), a scale for blocks of {' x '.join(map(str, facts['fp8_blocks']))}")
    elif facts["quantization"] is None:
        lines.append("not quantized")
    else:
        config = facts["quantization"]
        rule = config["scale_rule"] or "not stated"
        lines += [
            f"weights {config['weights']} in the form of {config['format']}, scale rule {rule},",
            f"activations {config['activations']}, {config['exclude']} entries of what is not quantized",
        ]
    click.echo("\n".join(map(printable, lines)))


def _show_worst(layers: list[dict[str, Any]]) -> None:
    shown = table("matrix", ">SQNR dB", ">saturated", ">zero\nblocks", ">scales\n2^")
    for layer in layers:
        shown.add_row(*_row(layer))
    click.echo()
    show(shown)
    if any(layer["module"].startswith(_LANGUAGE_MODEL) for layer in layers):
        click.echo(f"Names without {_LANGUAGE_MODEL}; --json gives them whole, and shapes.")


def _row(layer: dict[str, Any]) -> list[str]:
    exponents = layer["scale_exponents"]
    return [
        printable(layer["module"].removeprefix(_LANGUAGE_MODEL)),
        f"{layer['sqnr_db']:.2f}",
        f"{layer['saturated']:.3%}",
        f"{layer['zero_blocks'] / layer['blocks']:.1%}",
        "" if exponents is None else f"{exponents[0]} to {exponents[1]}",
    ]
