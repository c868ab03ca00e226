"""The target model: Qwen3.5's text model, run a block of tokens at a time from a state that can stay behind.

The layers are transformers' modules with a checkpoint's weights; only attention caches and the gated delta net's
handling of its state are mxq's, because the drafts that a verify pass rejects must leave no trace in either.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_5 import Qwen3_5TextConfig, Qwen3_5TextModel
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig, Qwen3_5MoeTextModel

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.fitting import check_layer_count
from mxq.checkpoint.fp8 import decodable
from mxq.decode.cache import KeyValueCache, causal_mask
from mxq.decode.gdn import GatedDeltaState, Update, read_block, read_prompt
from mxq.decode.loading import Placer, refuse_unused
from mxq.errors import MxqError
from mxq.models import qwen35


@dataclass(frozen=True)
class Pass:
    """What the target computed for T tokens."""

    hidden: Tensor
    """[T, hidden]: outputs after the final norm, which the MTP head reads."""
    features: Tensor | None
    """[T, taps x hidden]: outputs of the requested layers (HF ``hidden_states[layer + 1]``), concatenated."""
    logits: Tensor
    """[T, vocabulary] from a verify pass, [1, vocabulary] (the last token's) from a prompt."""

    def first(self, n: int) -> "Pass":
        """Return the part about the first ``n`` tokens."""
        features = None if self.features is None else self.features[:n]
        return Pass(self.hidden[:n], features, self.logits[:n])


@dataclass
class TargetState:
    """One sequence's committed state."""

    cache: KeyValueCache
    deltas: GatedDeltaState | None
    updates: list[Update]

    @property
    def length(self) -> int:
        """Number of committed tokens; the next one has this position."""
        return self.cache.length


class Target:
    """A Qwen3.5 text model ready to run; made by :func:`load_target`."""

    def __init__(self, path: Path, model: Any, lm_head: Tensor) -> None:
        self.path = path
        self.model = model
        self.lm_head = lm_head
        self.config = model.config
        """transformers' text configuration."""
        self.dtype: torch.dtype = lm_head.dtype
        self.device: torch.device = lm_head.device
        self._delta_layers = [layer.linear_attn for layer in model.layers if layer.block_type == "linear_attention"]
        self._full_layers = [i for i, layer in enumerate(model.layers) if layer.block_type == "full_attention"]

    @property
    def max_positions(self) -> int:
        """Longest sequence the model takes, prompt and output together, in tokens."""
        return int(self.config.max_position_embeddings)

    def start(self, capacity: int) -> TargetState:
        """Return an empty state with room for ``capacity`` tokens, drafts included."""
        config = self.config
        cache = KeyValueCache(
            self._full_layers, config.num_key_value_heads, config.head_dim, capacity, self.dtype, self.device
        )
        deltas = GatedDeltaState(self._delta_layers, self.dtype, self.device) if self._delta_layers else None
        return TargetState(cache, deltas, [])

    def prompt(self, state: TargetState, ids: Tensor, taps: Sequence[int] = ()) -> Pass:
        """Run ``ids`` [T] and commit all of them; of the logits only the last token's are computed.

        ``taps`` are 0-based ids of the layers whose outputs are wanted as features.
        """
        hidden, features = self._run(state, ids, taps, block=False)
        state.cache.length += len(ids)
        return Pass(hidden, features, self.logits(hidden[-1:]))

    def verify(self, state: TargetState, ids: Tensor, taps: Sequence[int] = ()) -> Pass:
        """Run ``ids`` [T], a last committed token and its drafts, without committing any: see :meth:`commit`."""
        hidden, features = self._run(state, ids, taps, block=True)
        return Pass(hidden, features, self.logits(hidden))

    def commit(self, state: TargetState, n: int) -> None:
        """Keep the first ``n`` tokens of the last verify pass and forget the others."""
        if state.deltas is not None:
            state.deltas.commit(state.updates, n)
        state.updates.clear()
        state.cache.length += n

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of ``ids``."""
        return self.model.embed_tokens(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the output head's logits [..., vocabulary] for ``hidden``, which must have passed a final norm."""
        return F.linear(hidden, self.lm_head)

    def read(self, x: Tensor, first: int, last: int) -> Tensor:
        """Run layers ``first`` up to ``last``, which is not run, over a whole text.

        ``x`` [T, hidden]: what goes into the first of them, of layer 0 the embeddings. Returns what comes out of the
        last of them, before any norm.
        """
        return self._layers(self.start(len(x)), x[None], range(first, last), block=False)[0][0]

    def _run(self, state: TargetState, ids: Tensor, taps: Sequence[int], block: bool) -> tuple[Tensor, Tensor | None]:
        state.updates.clear()
        x, outputs = self._layers(state, self.embed(ids[None]), range(len(self.model.layers)), block, taps)
        features = torch.cat([outputs[layer_id] for layer_id in taps], dim=-1) if taps else None
        return self.model.norm(x)[0], features

    def _layers(
        self, state: TargetState, x: Tensor, layers: range, block: bool, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run ``layers`` over ``x`` [1, T, hidden]; returns what comes out of the last and of those in ``taps``."""
        past, length = state.length, x.shape[1]
        positions = torch.arange(past, past + length, device=self.device)[None, None]
        rotary = self.model.rotary_emb(x, positions)
        mask = causal_mask(length, past, self.device)
        tapped: dict[int, Tensor] = {}
        delta = sum(layer.block_type != "full_attention" for layer in self.model.layers[: layers.start])
        for index in layers:
            layer = self.model.layers[index]
            normed = layer.input_layernorm(x)
            if layer.block_type == "full_attention":
                mixed = layer.self_attn(
                    hidden_states=normed, position_embeddings=rotary, attention_mask=mask, past_key_values=state.cache
                )[0]
            else:
                assert state.deltas is not None
                recurrent, convolution = state.deltas.recurrent[delta], state.deltas.convolution[delta]
                if block:
                    mixed, update = read_block(layer.linear_attn, normed, recurrent, convolution)
                    state.updates.append(update)
                else:
                    mixed = read_prompt(layer.linear_attn, normed, recurrent, convolution)
                delta += 1
            x = x + mixed
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index in taps:
                tapped[index] = x[0]
        return x, tapped


def load_target(path: Path, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> Target:
    """Load the text model of a Qwen3.5 checkpoint directory, dense or MoE, bf16, block-FP8 or MXFP4.

    Weights become ``dtype``, block-FP8 ones by way of bf16; MXFP4 weights are dequantized, and activations are
    fake-quantized where the checkpoint's ``quantization_config`` says so. Raises MxqError for a checkpoint that is
    incomplete, holds tensors that its config does not account for, or is none of these models.
    """
    checkpoint = decodable(Checkpoint.open(path))
    device = torch.device(device)
    model = _empty_text_model(checkpoint)
    placer = Placer(checkpoint, dtype, device)
    multimodal = any(name.startswith("model.language_model.") for name in checkpoint.tensors)
    prefix = "model.language_model." if multimodal else "model."
    placer.fill(model, prefix)
    if _tied(checkpoint.config):
        _check_tied(checkpoint, f"{prefix}embed_tokens.weight")
        lm_head = model.embed_tokens.weight
        placer.used.add("lm_head.weight")
    else:
        holder = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False, device="meta")
        placer.fill(holder, "lm_head.")
        lm_head = holder.weight
    refuse_unused(checkpoint, placer.used, ignored=("model.visual.", "mtp."))
    model.rotary_emb = type(model.rotary_emb)(model.config).to(device)
    return Target(checkpoint.path, model.eval(), lm_head)


def _empty_text_model(checkpoint: Checkpoint) -> Any:
    """Return the text model that config.json describes, its parameters on the meta device."""
    model_class, config = text_model_class(checkpoint)
    try:
        with torch.device("meta"):
            return model_class._from_config(config, attn_implementation="sdpa")
    except Exception as error:  # as below
        raise no_model(checkpoint, error) from error


def text_model_class(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return transformers' class and configuration of the text model that config.json describes.

    Raises MxqError if it describes none, or more layers than the checkpoint could have.
    """
    moe = qwen35.family(checkpoint.config, str(checkpoint.path)) == "qwen3_5_moe"
    config_class, model_class = (
        (Qwen3_5MoeTextConfig, Qwen3_5MoeTextModel) if moe else (Qwen3_5TextConfig, Qwen3_5TextModel)
    )
    try:
        config = config_class.from_dict(copy.deepcopy(qwen35.text_config(checkpoint.config)))
        check_layer_count(checkpoint, config.num_hidden_layers)
    except MxqError:
        raise
    except Exception as error:  # whatever transformers' own checks and the arithmetic on hostile values raise
        raise no_model(checkpoint, error) from error
    return model_class, config


def no_model(checkpoint: Checkpoint, error: Exception) -> MxqError:
    """Return what to raise where transformers cannot build what config.json describes."""
    return MxqError(
        f"{checkpoint.path}/config.json: no model can be built from it: {error}", "correct the text model's values"
    )


def _tied(config: dict[str, Any]) -> bool:
    """Say whether the output head is the embedding: the outer config's word counts before the text model's."""
    inner = (config.get("text_config") or {}).get("tie_word_embeddings", False)
    return bool(config.get("tie_word_embeddings", inner))


def _check_tied(checkpoint: Checkpoint, embedding: str) -> None:
    """Raise MxqError if the checkpoint stores an output head that is not, byte for byte, its embedding."""
    if "lm_head.weight" not in checkpoint.tensors:
        return
    head, embedded = checkpoint.read("lm_head.weight"), checkpoint.read(embedding)
    same_kind = head.dtype == embedded.dtype and head.shape == embedded.shape
    if not same_kind or not torch.equal(head.view(torch.uint8), embedded.view(torch.uint8)):
        raise MxqError(
            f"{checkpoint.path}/config.json: tie_word_embeddings is true, but lm_head.weight differs from {embedding}",
            "say false if the model has an output head of its own; engines that believe config.json ignore it",
        )
