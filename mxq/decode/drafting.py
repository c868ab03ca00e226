"""Drafters at work: what they read of the target after each pass, and the tokens they propose.

A :class:`Drafter` is loaded once; each sequence gets a :class:`Session`. After the prompt and after every verify pass
the session observes the newly committed positions with the target's true hidden states; then it proposes k tokens to
follow the last committed one. What it computed for a proposal never outlives it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.fitting import check_dflash, check_mtp
from mxq.checkpoint.fp8 import decodable
from mxq.decode.cache import KeyValueCache, causal_mask
from mxq.decode.dflash import DFlashModel, masks
from mxq.decode.loading import Placer, refuse_unused
from mxq.decode.mtp import MTPModel
from mxq.decode.sampling import Sampling, choose
from mxq.decode.target import Pass, Target
from mxq.errors import UsageError
from mxq.progress import note

Method = Literal["dflash", "mtp"]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens [k] and, unless greedy, the distributions [k, vocabulary] that they were drawn from."""

    tokens: Tensor
    probabilities: Tensor | None


class Session(Protocol):
    """One sequence's drafting state."""

    def observe(self, seen: Pass, following: Tensor) -> None:
        """Take in newly committed positions; ``following`` [T] is the committed token after each of them."""

    def propose(self, last: Tensor, k: int) -> Draft:
        """Propose ``k`` tokens to follow ``last`` [1], the one committed token that the target has not yet run."""


class Drafter(Protocol):
    """A draft model for one target."""

    @property
    def taps(self) -> Sequence[int]:
        """Target layers whose outputs it reads."""

    def start(self, capacity: int, k: int, sampling: Sampling, generator: torch.Generator | None) -> Session:
        """Begin a sequence of up to ``capacity`` positions in which at most ``k`` tokens are drafted at once."""


class MTPDrafter:
    """The checkpoint's own MTP head, chained: its output stands in for the hidden state that is not there yet."""

    taps: Sequence[int] = ()

    def __init__(self, target: Target, model: MTPModel) -> None:
        self.target = target
        self.model = model

    def start(self, capacity: int, k: int, sampling: Sampling, generator: torch.Generator | None) -> "_MTPSession":
        """Begin a sequence; any ``k`` will do."""
        return _MTPSession(self, capacity, sampling, generator)


class _MTPSession:
    def __init__(
        self, drafter: MTPDrafter, capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        target = drafter.target
        self._target = target
        self._model = drafter.model
        self._sampling = sampling
        self._generator = generator
        config = target.config
        self._cache = KeyValueCache(
            [0], config.num_key_value_heads, config.head_dim, capacity, target.dtype, target.device
        )
        self._hidden: Tensor | None = None

    def observe(self, seen: Pass, following: Tensor) -> None:
        """Run the head over the new positions with true hidden states; their keys and values stay."""
        self._hidden = self._run(seen.hidden, following)[-1:]
        self._cache.length += len(following)

    def propose(self, last: Tensor, k: int) -> Draft:
        assert self._hidden is not None, "propose before observe"
        true_length, hidden = self._cache.length, self._hidden
        tokens: list[Tensor] = []
        probabilities: list[Tensor] = []
        for step in range(k):
            if step:
                hidden = self._run(hidden, tokens[-1])
                self._cache.length += 1
            token, distribution = choose(self._target.logits(hidden), self._sampling, self._generator)
            tokens.append(token)
            if distribution is not None:
                probabilities.append(distribution)
        self._cache.length = true_length
        return Draft(torch.cat(tokens), torch.cat(probabilities) if probabilities else None)

    def _run(self, hidden: Tensor, following: Tensor) -> Tensor:
        past, length = self._cache.length, len(following)
        device = hidden.device
        positions = torch.arange(past, past + length, device=device)[None]
        mask = causal_mask(length, past, device)
        embeddings = self._target.embed(following[None])
        return self._model(embeddings, hidden[None], positions, mask, self._cache)[0]


class DFlashDrafter:
    """A DFlash checkpoint: all k tokens in one pass over a block of masks, the same weights for every k."""

    def __init__(self, target: Target, model: DFlashModel, path: Path) -> None:
        self.target = target
        self.model = model
        self.path = path
        self._warned = False

    @property
    def taps(self) -> Sequence[int]:
        """Target layers whose outputs make up the context features."""
        return self.model.config.target_layer_ids

    def start(self, capacity: int, k: int, sampling: Sampling, generator: torch.Generator | None) -> "_DFlashSession":
        """Begin a sequence; warn, once, if ``k`` is more than the drafter was trained for."""
        trained = self.model.config.block_size - 1
        if k > trained and not self._warned:
            self._warned = True
            note(
                f"warning: {k} speculative tokens, but {self.path} was trained to draft {trained} "
                f"(block_size {trained + 1}); expect the last ones to be poor"
            )
        return _DFlashSession(self, capacity, sampling, generator)


class _DFlashSession:
    def __init__(
        self, drafter: DFlashDrafter, capacity: int, sampling: Sampling, generator: torch.Generator | None
    ) -> None:
        self._target = drafter.target
        self._model = drafter.model
        self._sampling = sampling
        self._generator = generator
        config = drafter.model.config
        self._layers = range(config.num_hidden_layers)
        self._cache = KeyValueCache(
            self._layers,
            config.num_key_value_heads,
            config.head_dim,
            capacity,
            self._target.dtype,
            self._target.device,
        )

    def observe(self, seen: Pass, following: Tensor) -> None:
        """Turn the new positions' features into context keys and values, at their true positions."""
        assert seen.features is not None
        past = self._cache.length
        positions = torch.arange(past, past + len(following), device=seen.features.device)[None]
        for layer, (key, value) in enumerate(self._model.context(seen.features[None], positions)):
            self._cache.update(key, value, layer)
        self._cache.length += len(following)

    def propose(self, last: Tensor, k: int) -> Draft:
        past = self._cache.length
        block = torch.cat([last, last.new_full((k,), self._model.config.mask_token_id)])
        positions = torch.arange(past, past + k + 1, device=last.device)[None]
        context = [self._cache.get(layer) for layer in self._layers]
        mask = masks(self._model.config, past, k + 1, last.device)
        hidden = self._model(self._target.embed(block[None]), positions, context, mask)[0]
        # Slot j predicts the token at its own position; slot 0 holds the last committed token itself.
        return Draft(*choose(self._target.logits(hidden[1:]), self._sampling, self._generator))


def load_drafter(path: Path | None, target: Target, method: Method) -> Drafter:
    """Load the drafter for ``target``: a DFlash checkpoint directory, or the MTP head of the target's own checkpoint.

    ``path`` is needed for ``dflash`` and must be None for ``mtp``. Raises UsageError for a drafter that belongs to
    another target, MxqError for one that is broken.
    """
    if method == "mtp":
        if path is not None:
            raise UsageError(f"MTP drafts with the target's own head, not with {path}", "leave the drafter out")
        return _load_mtp(target)
    if method == "dflash":
        if path is None:
            raise UsageError("DFlash needs a drafter checkpoint", "name its directory")
        return _load_dflash(path, target)
    raise UsageError(f"unknown drafting method {method!r}", "the methods are dflash and mtp")


def _load_mtp(target: Target) -> MTPDrafter:
    checkpoint = decodable(Checkpoint.open(target.path))
    check_mtp(checkpoint)
    with torch.device("meta"):
        model = MTPModel(target.config)
    placer = Placer(checkpoint, target.dtype, target.device)
    placer.fill(model, "mtp.")
    refuse_unused(checkpoint, placer.used, ignored=("model.", "lm_head."))
    model.rotary_emb = type(model.rotary_emb)(model.config).to(target.device)
    return MTPDrafter(target, model.eval())


def _load_dflash(path: Path, target: Target) -> DFlashDrafter:
    checkpoint = Checkpoint.open(path)
    config = check_dflash(checkpoint, target.path, target.config.to_dict())
    with torch.device("meta"):
        model = DFlashModel(config)
    placer = Placer(checkpoint, target.dtype, target.device)
    placer.fill(model, "")
    refuse_unused(checkpoint, placer.used, ignored=())
    return DFlashDrafter(target, model.eval(), checkpoint.path)
