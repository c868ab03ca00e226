"""The embedded models and prompts: two trained targets with MTP heads, a DFlash drafter for each, five workloads.

They have exactly the structure of the published checkpoints and are made by ``tools/train_testbed.py``.
"""

from pathlib import Path

from mxq.errors import UsageError

NAMES = ("dense", "moe")
WORKLOADS = ("arithmetic", "maths", "functions", "programs", "chat")
PREFIX = "testbed:"

_HERE = Path(__file__).parent


def path(spec: str) -> Path:
    """Return the directory of a target (``testbed:dense``) or of its drafter (``testbed:dense-dflash``).

    Raises UsageError for any other name.
    """
    name = spec.removeprefix(PREFIX)
    if name.removesuffix("-dflash") not in NAMES:
        known = ", ".join(f"{PREFIX}{n}{kind}" for n in NAMES for kind in ("", "-dflash"))
        raise UsageError(f"there is no testbed model {spec!r}", f"use one of {known}")
    return _HERE / name


def prompts_dir() -> Path:
    """Return the directory that holds ``<workload>.jsonl`` for each of :data:`WORKLOADS`."""
    return _HERE / "prompts"


def calibration_text() -> Path:
    """Return the file of conversations that recipes calibrate the targets with; no held-out prompt is among them."""
    return _HERE / "calibration.jsonl"
