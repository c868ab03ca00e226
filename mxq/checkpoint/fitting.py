"""Do a target and what drafts for it belong together? By config.json and headers alone, before anything is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxq.checkpoint.reader import Checkpoint
from mxq.errors import MxqError, UsageError
from mxq.models.dflash import DFlashConfig


def check_dflash(checkpoint: Checkpoint, target: Path, text_config: Mapping[str, Any]) -> DFlashConfig:
    """Return the configuration of the DFlash drafter ``checkpoint`` if it can be right, and right for a target.

    ``text_config`` is the text model's part of the config.json in ``target``. Raises UsageError for a drafter that
    belongs to another target, MxqError for one that is broken, both naming the file and the key.
    """
    where = f"{checkpoint.path}/config.json"
    try:
        config = DFlashConfig.from_dict(checkpoint.config)
    except KeyError as error:
        raise MxqError(
            f"{where}: {error.args[0]} is missing",
            "a DFlash drafter names its mask_token_id and target_layer_ids in dflash_config",
        ) from None
    except ValueError as error:
        raise MxqError(f"{where}: {error}", "correct the drafter's configuration") from None
    _check_fits(config, target, text_config, where)
    check_layer_count(checkpoint, config.num_hidden_layers)
    return config


def check_mtp(checkpoint: Checkpoint) -> None:
    """Raise MxqError if a checkpoint has no MTP head."""
    if not any(name.startswith("mtp.") for name in checkpoint.tensors):
        raise MxqError(
            f"{checkpoint.path}: no mtp.* tensors, so there is no MTP head to draft with",
            "tools that save through transformers drop them; take the original checkpoint",
        )


def check_layer_count(checkpoint: Checkpoint, layers: int) -> None:
    """Raise MxqError for more layers than the checkpoint could have, before as many modules are built."""
    held = len(checkpoint.tensors)
    if layers > held:
        raise MxqError(
            f"{checkpoint.path}/config.json: {layers} layers, but the checkpoint holds {held} tensors",
            "the weights and config.json do not belong together",
        )


def _check_fits(config: DFlashConfig, target: Path, text_config: Mapping[str, Any], where: str) -> None:
    layers = text_config.get("num_hidden_layers")
    if type(layers) is not int:
        raise MxqError(f"{target}/config.json: num_hidden_layers is {layers!r}", "correct the target's configuration")
    hint = f"the drafter was trained for another target than {target}"
    for what, drafter_has, target_has in (
        ("hidden_size", config.hidden_size, text_config.get("hidden_size")),
        ("vocab_size", config.vocab_size, text_config.get("vocab_size")),
        ("num_target_layers", config.num_target_layers, layers),
    ):
        if drafter_has is not None and drafter_has != target_has:
            name = what.removeprefix("num_target_")
            raise UsageError(f"{where}: {what} is {drafter_has}, the target's {name} {target_has}", hint)
    outside = [layer for layer in config.target_layer_ids if not 0 <= layer < layers]
    if outside or not config.target_layer_ids:
        ids = list(config.target_layer_ids)
        raise UsageError(f"{where}: target_layer_ids is {ids}, the target's layers are 0 to {layers - 1}", hint)
