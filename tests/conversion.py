"""Converting, in a line."""

from pathlib import Path
from typing import Any

from mxq.checkpoint import Checkpoint
from mxq.convert import recipe
from mxq.convert.plan import plan
from mxq.convert.run import run


def convert(source: Path, out: Path, name: str = "mxfp4", **options: Any) -> Path:
    """Convert ``source`` by a recipe; ``options`` are those of the plan. Returns ``out``."""
    run(plan(Checkpoint.open(source), recipe.load(name), **options), out, str(source))
    return out
