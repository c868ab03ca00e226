"""mxq_manifest.json: what a converted checkpoint was made from and how, and the checksum of every file of it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxq.checkpoint.fp8 import block_size, stored
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.manifest import FORMAT, checksums
from mxq.checkpoint.resolve import commit, hub_id
from mxq.convert.calibration import PACKAGES, Stage
from mxq.convert.plan import Plan
from mxq.files import versions


def source_name(spec: str) -> str:
    """Return how a source is called in what is published: its hub id or testbed name, or its directory's name."""
    model = hub_id(spec)
    if model is not None:
        return model.name
    if spec.startswith("testbed:"):
        return spec
    return os.fsencode(Path(spec).resolve().name).decode(errors="backslashreplace")  # a name need not be UTF-8


def origin(plan: Plan, spec: str, stage: Stage | None = None) -> dict[str, Any]:
    """Return what a conversion is made from, how and by what; ``spec`` names its source."""
    packages = PACKAGES if stage is not None else ()
    block = block_size(stored(plan.source))
    return {
        "source": {
            "name": source_name(spec),
            "hub": hub_id(spec) is not None,
            "commit": None if hub_id(spec) is None else commit(plan.source.path),
            "fingerprint": fingerprint(plan.source),
            "architectures": plan.source.config["architectures"],
            "tensors": len(stored(plan.source).tensors),
            "bytes": plan.bytes_before,
        }
        | ({} if block is None else {"fp8_blocks": list(block)}),
        "recipe": plan.recipe.as_dict(),
        "options": {"format": plan.form, "experts": plan.experts},
        "versions": versions("torch", *packages),
    } | (dict(plan.recipe.chosen) if stage is None else {"calibration": stage.facts})


def build(
    plan: Plan,
    spec: str,
    directory: Path,
    known: Mapping[str, dict[str, Any]],
    stage: Stage | None = None,
    calibrated: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the manifest of a conversion whose files all lie in ``directory``.

    Args:
        plan: what was carried out.
        spec: as for :func:`origin`.
        directory: the checkpoint.
        known: the :func:`checksum` of files that need not be read again, by name.
        stage: the calibration, if the recipe has one.
        calibrated: what came of it, as :func:`mxq.convert.calibration.results`.
    """
    folded = () if calibrated is None else calibrated["folded"]
    place = {tensor.name: shard.file for shard in plan.shards for tensor in shard.tensors}
    files = sorted(directory.iterdir())
    found = checksums([file for file in files if file.name not in known])
    return {
        "format": FORMAT,
        **origin(plan, spec, stage),
        **({} if calibrated is None else {"calibrated": calibrated}),
        "bytes": plan.bytes_after,
        "files": {file.name: known.get(file.name) or found[file.name] for file in files},
        "tensors": {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "file": place[tensor.name],
                "action": "fold" if tensor.name in folded else group.action,
                "rule": group.rule,
            }
            for group in plan.groups.values()
            for tensor in group.outputs
        },
    }
