"""Published models and drafters as the cost model sees them."""

import json
from pathlib import Path
from typing import Any

from mxq.hardware import machine
from mxq.hardware.cost import Setup
from mxq.hardware.shape import BF16, DrafterShape, TargetShape, drafter_shape, target_shape

ARCHITECTURES = Path(__file__).parent / "data" / "architectures"
DRAFTERS = {"Qwen3.5-27B": "Qwen3.5-27B-DFlash", "Qwen3.5-35B-A3B": "Qwen3.5-35B-A3B-DFlash-v1"}


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ARCHITECTURES / f"{name}.json").read_text())
    return found


def target(name: str) -> TargetShape:
    return target_shape(config(name), name)


def drafter(name: str) -> DrafterShape:
    return drafter_shape(config(name), name)


def setup(name: str, hardware: str = "h200", precision: str = "bf16") -> Setup:
    shape = target(name)
    packed = BF16 if precision == "bf16" else shape.packed_by_recipe()
    return Setup(machine.load(hardware), shape, packed, drafter(DRAFTERS[name]))
