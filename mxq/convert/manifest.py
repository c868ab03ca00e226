"""mxq_manifest.json: what a converted checkpoint was made from and how, and the checksum of every file of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxq.checkpoint.fp8 import block_size, stored
from mxq.checkpoint.headers import read_json
from mxq.checkpoint.identity import fingerprint
from mxq.checkpoint.reader import inside
from mxq.checkpoint.resolve import commit, hub_id
from mxq.convert.beside import MANIFEST
from mxq.convert.plan import Plan
from mxq.errors import MxqError
from mxq.files import sha256_file, versions
from mxq.progress import progress

FORMAT = 1


def source_name(spec: str) -> str:
    """Return how a source is called in what is published: its hub id or testbed name, or its directory's name."""
    model = hub_id(spec)
    if model is not None:
        return model.name
    return spec if spec.startswith("testbed:") else Path(spec).resolve().name


def checksums(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file, by its name."""
    found: dict[str, dict[str, Any]] = {}
    with progress("checksums", sum(file.stat().st_size for file in files), "B") as advance:
        for file in files:
            found[file.name] = checksum(file)
            advance(found[file.name]["bytes"])
    return found


def checksum(file: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256_file(file)}


def origin(plan: Plan, spec: str) -> dict[str, Any]:
    """Return what a conversion is made from, how and by what; ``spec`` names its source."""
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
        "versions": versions("torch"),
    }


def build(plan: Plan, spec: str, directory: Path, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest of a conversion whose files all lie in ``directory``.

    Args:
        plan: what was carried out.
        spec: as for :func:`origin`.
        directory: the checkpoint.
        known: the :func:`checksum` of files that need not be read again, by name.
    """
    place = {tensor.name: shard.file for shard in plan.shards for tensor in shard.tensors}
    files = sorted(directory.iterdir())
    found = checksums([file for file in files if file.name not in known])
    return {
        "format": FORMAT,
        **origin(plan, spec),
        "bytes": plan.bytes_after,
        "files": {file.name: known.get(file.name) or found[file.name] for file in files},
        "tensors": {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "file": place[tensor.name],
                "action": group.action,
                "rule": group.rule,
            }
            for group in plan.groups.values()
            for tensor in group.outputs
        },
    }


def read(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint's directory, None if it has none.

    Raises:
        MxqError: it is not one that this version reads.
    """
    file = inside(path, MANIFEST)
    if not file.exists():
        return None
    manifest = read_json(file)
    if manifest.get("format") != FORMAT:
        raise MxqError(
            f"{file} is of format {manifest.get('format')!r}; this mxq reads {FORMAT}", "use the mxq it names"
        )
    return manifest
