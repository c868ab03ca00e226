"""Are a checkpoint's tensors those of as many layers and experts as its config.json says?"""

from collections import defaultdict

from mxq.checkpoint import Checkpoint
from mxq.errors import UsageError
from mxq.models import qwen35
from mxq.models.qwen35 import Piece


def check_complete(source: Checkpoint, held: dict[str, list[Piece]]) -> None:
    """Make sure that the tensors are those of as many layers and experts as config.json says.

    Raises:
        UsageError: some are missing or too many.
    """
    config = qwen35.text_config(source.config)
    numbers: set[str] = set()
    experts: dict[str, set[str]] = defaultdict(set)
    for name, pieces in held.items():
        layer = name.partition("layers.")[2].partition(".")[0]
        if qwen35.part(name) == "text" and layer.isdecimal():
            numbers.add(layer)
        for piece in pieces:
            block = qwen35.experts_module(piece.module)
            if block is not None:
                experts[block].add(piece.module.removeprefix(block + "."))
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or len(numbers) != layers or numbers != set(map(str, range(layers))):
        raise UsageError(
            f"{source.path}: config.json says {layers} layers, the tensors are of {len(numbers)}",
            "the checkpoint is incomplete or its config.json is of another model",
        )
    for block, found in experts.items():
        count = config.get("num_experts")
        present = {module.partition(".")[0] for module in found}
        if len(present) != count:
            raise UsageError(f"{source.path}: config.json says {count} experts, but {block} has {len(present)}")
        wanted = {f"{expert}.{part}_proj" for expert in range(len(present)) for part in ("gate", "up", "down")}
        if missing := wanted - found:
            raise UsageError(f"{source.path}: {block}.{min(missing)} is missing", "the checkpoint is incomplete")
