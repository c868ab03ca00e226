"""One decoder block of a checkpoint at a time, as transformers' text model of a single layer."""

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.headers import DTYPES
from mxq.decode.loading import Placer
from mxq.decode.target import no_model, text_model_class
from mxq.errors import MxqError, UsageError

_FITS = "tokenizer, weights and config.json do not belong together"


class Blocks:
    """The decoder blocks of a checkpoint.

    Attributes:
        prefix: ``model.language_model.`` or ``model.``: what the names of the text model's tensors begin with.
        count: how many there are.
    """

    def __init__(self, source: Checkpoint, device: torch.device) -> None:
        self._source, self._device = source, device
        self._class, self._config = text_model_class(source)
        self.prefix = (
            "model.language_model." if "model.language_model.embed_tokens.weight" in source.tensors else "model."
        )
        self.count: int = self._config.num_hidden_layers

    def name(self, index: int) -> str:
        """Return what the names of block ``index`` begin with."""
        return f"{self.prefix}layers.{index}."

    def index_of(self, module: str) -> int | None:
        """Return the block that ``module`` is in, None if in none."""
        found = re.match(rf"{re.escape(self.prefix)}layers\.(\d+)\.", module)
        return int(found[1]) if found and int(found[1]) < self.count else None

    def type_of(self, tensor: str) -> torch.dtype:
        """Return the type in which the source stores a tensor."""
        return DTYPES[self._source.info(tensor).dtype]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ``ids``, float32 [..., hidden]; only their rows are read."""
        name = f"{self.prefix}embed_tokens.weight"
        held = self._source.info(name).shape[0]
        if int(ids.max()) >= held:
            raise UsageError(
                f"{self._source.path}: {name} has {held:,} rows, the text has token {int(ids.max()):,}", _FITS
            )
        known, places = torch.unique(ids, return_inverse=True)
        rows = torch.cat([self._source.read_rows(name, row, row + 1) for row in known.tolist()]).float()
        self._check_finite(name, rows)
        return rows[places]

    def load(self, index: int) -> Any:
        """Return a text model whose only layer is block ``index``, in float32; it takes ``inputs_embeds``."""
        try:
            config = copy.deepcopy(self._config)
            config.layer_types = [config.layer_types[index]]
            config.num_hidden_layers = 1
            config.use_cache = False
            with torch.device("meta"):
                model = self._class._from_config(config, attn_implementation="sdpa")
            rotary = type(model.rotary_emb)(config).to(self._device)
        except Exception as error:  # as in text_model_class
            raise no_model(self._source, error) from error
        model.embed_tokens, model.norm, model.rotary_emb = nn.Identity(), nn.Identity(), rotary
        Placer(self._source, torch.float32, self._device).fill(model.layers[0], self.name(index))
        for name, parameter in model.layers[0].named_parameters():
            self._check_finite(self.name(index) + name, parameter)
        return model.eval()

    def _check_finite(self, name: str, values: Tensor) -> None:
        if not values.isfinite().all():
            raise MxqError(
                f"{self._source.path}: {name} holds values that are NaN or infinite",
                "the source is damaged: get it again",
            )

    @staticmethod
    @torch.no_grad()
    def run(model: Any, batches: Sequence[Tensor]) -> list[Tensor]:
        """Return what a block returns for each of its inputs."""
        return [model(inputs_embeds=batch).last_hidden_state for batch in batches]
