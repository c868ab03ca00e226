"""The embedded models and prompts: a trained target with its MTP head, a DFlash drafter for it, five workloads.

They have exactly the structure of the published checkpoints and are made by ``tools/train_testbed.py``.
"""

from pathlib import Path

from mxq.errors import UsageError

NAMES = ("dense",)
WORKLOADS = ("arithmetic", "maths", "functions", "programs", "chat")
PREFIX = "testbed:"

_HERE = Path(__file__).parent


def path(spec: str) -> Path:
    """Return the directory of ``testbed:dense`` (a target) or ``testbed:dense-dflash`` (its drafter).

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
