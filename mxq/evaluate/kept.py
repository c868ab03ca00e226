"""What a run directory keeps of what it was made from, so that analysis needs nothing but the run."""

import json
import shutil
from pathlib import Path

from mxq import files
from mxq.checkpoint.beside import LAYERS
from mxq.checkpoint.reader import inside
from mxq.evaluate.matrix import Plan


def keep_prompts(path: Path, plan: Plan) -> None:
    """Write every workload as it is measured, with reference answers where there are any; raises OSError."""
    (path / "workloads").mkdir(exist_ok=True)
    for tokenized in plan.workloads:
        kept = path / "workloads" / f"{tokenized.workload.name}.jsonl"
        if not kept.exists():
            with files.atomic_write(kept) as stream:
                for line in tokenized.workload.lines():
                    stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def keep_layers(path: Path, plan: Plan) -> None:
    """Copy the errors of each target's matrices, where mxq has converted it; raises OSError.

    Raises MxqError for a link that leads out of the target's directory.
    """
    for target, model in plan.targets.items():
        kept, source = layers_of(path, target), inside(model.path, LAYERS)
        if not kept.exists() and source.is_file():
            kept.parent.mkdir(exist_ok=True)
            with source.open("rb") as layers, files.atomic_write(kept, "wb") as stream:
                shutil.copyfileobj(layers, stream)


def layers_of(path: Path, target: str) -> Path:
    """Return where a run keeps the layers.jsonl of a target; it has none of a model that mxq has not converted."""
    return path / "targets" / f"{target}-{LAYERS}"
