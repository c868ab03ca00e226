"""Keys and values of attention layers in memory taken once; taking back tokens costs nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class KeyValueCache:
    """Preallocated keys and values of several layers, one sequence.

    ``length`` positions are committed. :meth:`update` writes behind them and returns everything up to and including
    what it wrote, but does not move ``length``: whoever runs the pass sets it to what is to stay, and the next pass
    overwrites the rest. transformers' attention modules take it as their ``past_key_values``.
    """

    def __init__(
        self,
        layers: Sequence[int],
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length = 0
        self._layers = {
            layer: torch.empty(2, 1, heads, capacity, head_dim, dtype=dtype, device=device).unbind() for layer in layers
        }

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store ``key`` and ``value`` [1, heads, T, head dim] behind the committed ones; return all of the layer's."""
        keys, values = self._layers[layer_idx]
        end = self.length + key.shape[2]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def get(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return a layer's committed keys and values, [1, heads, length, head dim] each."""
        keys, values = self._layers[layer_idx]
        return keys[:, :, : self.length], values[:, :, : self.length]


def causal_mask(queries: int, past: int, device: torch.device) -> Tensor | None:
    """Return what ``queries`` new tokens behind ``past`` others may look at, or None where no mask is needed.

    Boolean [1, 1, queries, past + queries], True where a query may look. transformers' attention takes None to mean
    everything for a single query and the causal triangle without a past.
    """
    if queries == 1 or past == 0:
        return None
    return torch.ones(1, 1, queries, past + queries, dtype=torch.bool, device=device).tril_(past)
