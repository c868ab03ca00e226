"""Write a copy of a checkpoint without the defects that are not in its weights: config, index, headers.

No byte of a tensor changes, and the original is not touched. Files are copied and never linked: with a link, whoever
edits one of the two changes both; on a filesystem that shares blocks a copy costs nothing anyway.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.beside import CARD, MANIFEST, copied_files, left_files
from mxq.checkpoint.headers import encode_header, parse_json
from mxq.checkpoint.quantization import exclude_entries
from mxq.checkpoint.quark import Quark, quark_config
from mxq.checkpoint.reader import INDEX, SINGLE, inside
from mxq.checkpoint.staging import staged
from mxq.checkpoint.writer import index_of
from mxq.errors import MismatchError, UsageError
from mxq.files import write_json
from mxq.models import qwen35
from mxq.models.qwen35 import base_name
from mxq.progress import note, progress
from mxq.verify.claims import claims_of
from mxq.verify.findings import Report
from mxq.verify.opening import Opened, open_checked
from mxq.verify.run import verify
from mxq.verify.structure import found_packed, modules

_BYTES_AT_ONCE = 16 << 20


def fix(
    path: Path, out: Path, report: Report, against: Path | Checkpoint | None = None, *, rows: int = 16, seed: int = 0
) -> str:
    """Write the checkpoint in ``path`` to ``out`` with all of its problems put right; return in words what was done.

    Args:
        path: a quantized checkpoint.
        out: must not exist or be empty; it appears when it is complete and verified.
        report: what :func:`mxq.verify.run.verify` found in ``path``.
        against: as for :func:`mxq.verify.run.verify`, which the result has to pass.
        rows: see ``against``.
        seed: see ``against``.

    Raises:
        UsageError: there is nothing to fix, or as :func:`mxq.checkpoint.staging.staged`.
        MismatchError: a problem lies in the weights, or mxq made the checkpoint; nothing was written.
        MxqError, InterruptedRunError: as :func:`mxq.checkpoint.staging.staged`.
    """
    problems = report.problems
    if not problems:
        raise UsageError(f"{path} has no problem, so there is nothing to fix", "use it as it is")
    refused = [problem for problem in problems if not problem.rewritable]
    if refused:
        count = f"{len(refused)} of {len(problems)} problems" if len(problems) > 1 else "this problem"
        raise MismatchError(
            f"{out} was not written: {count} cannot be fixed by writing config, index or headers anew: "
            f"{refused[0].what}",
            refused[0].fix,
        )
    if (path / MANIFEST).exists():
        raise MismatchError(f"{out} was not written: mxq made {path}, and its manifest would be wrong", "convert again")
    opened = open_checked(path, Report())
    assert opened is not None  # or there would be a problem that cannot be fixed
    files = list(opened.checkpoint.metadata)
    with staged(out, sum((path / file).stat().st_size for file in files)) as directory:
        done = [*_config(opened, directory, report), *_shards(opened, directory), *_index(opened, directory)]
        for name in _beside(path):
            shutil.copyfile(inside(path, name), directory / name)
        for name in (*opened.leftover, *left_files(path)):
            note(f"not copied: {name}")
        left = verify(directory, against, rows=rows, seed=seed).problems
        if left:
            raise MismatchError(f"{out} was not written: it would still be wrong: {left[0].what}", left[0].fix)
    return ", ".join(done)


def _beside(path: Path) -> list[str]:
    names = copied_files(path)
    return [*names, CARD] if (path / CARD).is_file() else names


def _config(opened: Opened, directory: Path, report: Report) -> list[str]:
    checkpoint = opened.checkpoint
    config: dict[str, Any] = json.loads(json.dumps(checkpoint.config))
    wrong = any(check.problems for check in report.checks if check.name == "config")
    done = []
    if wrong:
        claims = claims_of(config, str(checkpoint.path))
        assert claims is not None
        quantization = config["quantization_config"]
        packed = found_packed(modules(checkpoint))
        quantization[claims.listing] = exclude_entries(_kept(opened, packed), packed)
        done.append(f"{claims.listing} written anew ({len(quantization[claims.listing])} entries)")
        if isinstance(claims, Quark):
            complete = quark_config([], weight_only=False, rule="even")
            for key in ("export", "layer_type_quant_config"):
                if not isinstance(quantization.get(key), dict):
                    quantization[key] = complete[key]
                    done.append(f"{key} added")
    write_json(directory / "config.json", config)
    return done


def _kept(opened: Opened, packed: set[str]) -> list[str]:
    """Return the modules that are matrices and not packed, experts stored fused also under that name."""
    kept = []
    for name, tensor in opened.checkpoint.tensors.items():
        held = [piece.module for piece in qwen35.pieces(name, tensor.shape)]
        if len(tensor.shape) > 1 and not name.endswith("_scale") and not packed & set(held):
            kept += [base_name(name), *held]
    return list(dict.fromkeys(kept))


def _shards(opened: Opened, directory: Path) -> list[str]:
    checkpoint = opened.checkpoint
    relabel = set(opened.relabelled)
    written = 0
    sizes = {file: (checkpoint.path / file).stat().st_size for file in checkpoint.metadata}
    with progress("copying", sum(sizes.values()), "B") as advance:
        for file, metadata in checkpoint.metadata.items():
            source = inside(checkpoint.path, file)
            held = {name for name in relabel if checkpoint.tensors[name].file.name == file}
            if held or metadata.get("format") != "pt":
                _with_header(source, directory / file, held)
                written += 1
            else:
                shutil.copyfile(source, directory / file)
            advance(sizes[file])
    done = [f"{len(relabel)} scales labelled U8"] if relabel else []
    if written:
        done.append(f"{written} of {len(sizes)} headers written anew")
    return [*done, "weights copied as they are"]


def _with_header(source: Path, target: Path, relabel: set[str]) -> None:
    """Copy a safetensors file, its metadata with ``format: pt`` and the types of ``relabel`` as U8."""
    with source.open("rb") as stream, target.open("xb") as out:
        header = parse_json(stream.read(int.from_bytes(stream.read(8), "little")), f"the header of {source}")
        metadata = header.pop("__metadata__", {}) | {"format": "pt"}
        for name in relabel:
            header[name]["dtype"] = "U8"
        out.write(encode_header({"__metadata__": metadata} | header))
        shutil.copyfileobj(stream, out, _BYTES_AT_ONCE)


def _index(opened: Opened, directory: Path) -> list[str]:
    """Write the index that the files need, none for a single one; say so if it was another."""
    checkpoint = opened.checkpoint
    if list(checkpoint.metadata) == [SINGLE]:
        return ["the index left out: one file needs none"] if checkpoint.index is not None else []
    tensors = checkpoint.tensors.values()
    index = index_of({checkpoint.stored.get(t.name, t.name): (t.nbytes, t.file.name) for t in tensors})
    write_json(directory / INDEX, index)
    return [] if index == checkpoint.index else ["index written anew"]
