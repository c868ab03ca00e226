"""From what people call a model to its setup on a machine: of models, config.json alone is looked at."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mxq.checkpoint import open_headers
from mxq.checkpoint.headers import read_json
from mxq.checkpoint.reader import read_config
from mxq.checkpoint.resolve import hub_id, resolve
from mxq.errors import UsageError
from mxq.hardware.cost import Setup
from mxq.hardware.machine import Machine
from mxq.hardware.model import facts_of
from mxq.hardware.shape import BF16, DrafterShape, drafter_shape, packed_of, target_shape


def setup(machine: Machine, model: str | Path, precision: str | None, drafter: str | None = None) -> Setup:
    """Return a model on a machine.

    Args:
        machine: of :func:`mxq.hardware.machine.load`.
        model: a directory, hub id or testbed model; or the path of a config.json.
        precision: ``bf16``, ``mxfp4`` as the recipe of that name has it, or None: as the model's config says.
        drafter: a DFlash drafter, as ``model``.

    Raises:
        UsageError: there is no such model, it is no Qwen3.5, it is MXFP4 and ``precision`` is bf16, or it is quantized
            otherwise and ``precision`` is None.
        MxqError: its config cannot be trusted.
    """
    config, where = _config(model)
    shape = target_shape(config, where)
    packed = packed_of(facts_of(str(model), config, where))
    if precision is None and not packed.any and config.get("quantization_config"):
        raise UsageError(
            f"{where}: its quantization is not MXFP4, and nothing is predicted of others",
            "give --precision to predict a model of its shape in bf16 or MXFP4",
        )
    if packed.any and precision == "bf16":
        raise UsageError(f"{model} is MXFP4, not bf16", "leave --precision out, or give the model it was made of")
    if not packed.any:
        packed = shape.packed_by_recipe() if precision == "mxfp4" else BF16
    found = Setup(machine, shape, packed)
    return found if drafter is None else replace(found, drafter=drafter_of(drafter))


def drafter_of(model: str) -> DrafterShape:
    """Return the shape of a DFlash drafter, called as in :func:`setup`; raises as that does."""
    return drafter_shape(*_config(Path(model) if model.endswith(".json") else model))


def _config(model: str | Path) -> tuple[dict[str, Any], str]:
    if isinstance(model, Path):
        if model.is_dir():
            raise UsageError(f"{model} is a directory", "give it as MODEL, or the config.json in it")
        try:
            return read_json(model), str(model)
        except FileNotFoundError:
            raise UsageError(f"there is no {model}", "give a model's config.json") from None
    if hub_id(model) is not None:
        checkpoint = open_headers(model)
        return checkpoint.config, str(checkpoint.path)
    path = resolve(model)
    return read_config(path), str(path)
