"""RMS norms with one row of weights per layer, which vLLM's operator for processors takes the first row of for all.

The keys of a DFlash drafter's layers are normalized in one call, with weights [layers, head size] (vLLM 0.32,
``qwen3_dflash.py`` and ``laguna_dflash.py``, ``_normalize_context_k``). On GPUs the operator picks each layer's row. On
processors every layer gets the first one's: drafts are worse and fewer of them are accepted, without a word.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_EPSILON = 1e-6
Norm = Callable[[Tensor, Tensor, Tensor | None, float], None]


def install(logger: Any) -> None:
    """Mend vLLM's ``rms_norm``, if it needs it."""
    from vllm import _custom_ops as operators

    if not picks_rows(operators.rms_norm):
        operators.rms_norm = row_by_row(operators.rms_norm, logger)


def picks_rows(norm: Norm) -> bool:
    """Whether ``norm`` gives each layer its own row of weights."""
    x = torch.ones(2, 3, 1, 32, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    norm(out, x, torch.stack([torch.ones(32), torch.full((32,), 2.0)]).bfloat16(), _EPSILON)
    return torch.allclose(out[1], 2 * out[0])


def row_by_row(norm: Norm, logger: Any) -> Norm:
    """Return a norm that calls ``norm`` once for each layer where weights have two axes."""
    said = False

    @functools.wraps(norm)
    def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:  # noqa: A002
        nonlocal said
        if weight is None or weight.dim() < 2:
            norm(out, input, weight, epsilon)
            return
        if not said:
            said = True
            logger.info(
                "mxq normalizes the keys of the drafter's %d layers one by one: the operator takes the weights of the "
                "first for all",
                len(weight),
            )
        for layer in zip(out, input, weight, strict=True):
            norm(*layer, epsilon)

    return rms_norm
