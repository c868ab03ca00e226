"""The MTP head's network: one extra decoder layer that predicts the token after next.

Entry i combines the target's hidden state at position i (after its final norm) with the embedding of token i + 1 and
predicts token i + 2; chained, its own output after ``norm`` stands in for the hidden state of the next entry. Embedding
and output head are the target's. Parameter names are those of the published checkpoints below ``mtp.``.

Source: vLLM's ``qwen3_5_mtp.py`` (input order ``[embedding, hidden]``, rotary position of entry i is i).
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer


class MTPModel(nn.Module):
    """``fc``, two input norms, one full-attention decoder layer, and the final norm.

    ``config`` is the target's text configuration (transformers' ``Qwen3_5TextConfig`` or ``Qwen3_5MoeTextConfig``);
    a mixture-of-experts target has a mixture-of-experts MTP layer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.num_hidden_layers = 1
        config.layer_types = ["full_attention"]
        self.config = config
        layer = Qwen3_5MoeDecoderLayer if getattr(config, "num_experts", None) else Qwen3_5DecoderLayer
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.norm = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3_5TextRotaryEmbedding(config)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any = None
    ) -> Tensor:
        """Return the entries' hidden states after ``norm`` [batch, length, hidden].

        ``embeddings`` [batch, length, hidden] of tokens i + 1, ``hidden`` [batch, length, hidden] of the target (or of
        this head, when chained) at positions i, ``positions`` [batch, length] the i themselves; ``mask`` as
        transformers' attention takes it (None: single query that sees all keys, or causal); ``cache`` anything with
        ``update(key, value, layer_idx)``.
        """
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1))
        rotary = self.rotary_emb(x, positions[None])
        x = self.layers[0](x, position_embeddings=rotary, attention_mask=mask, past_key_values=cache)
        return self.norm(x)
