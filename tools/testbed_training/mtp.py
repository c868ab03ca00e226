"""Train the MTP head, chained: each position drafts a few tokens in a row from its own output, as it will be used."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb, repeat_kv

from mxq.decode.mtp import MTPModel

from .features import Answers
from .target import CausalLM, Log, _adamw, _descend, _set_lr

KeyValue = tuple[Tensor, Tensor]


def initial(target: CausalLM, seed: int) -> MTPModel:
    """Start from what is known: ``fc`` adds its two inputs, the layer is the target's last full-attention layer."""
    torch.manual_seed(seed)
    mtp = MTPModel(target.config)
    size = target.config.hidden_size
    mtp.fc.weight.data = 0.5 * torch.eye(size).repeat(1, 2) + torch.randn(size, 2 * size) * 0.01
    last = max(i for i, kind in enumerate(target.config.layer_types) if kind == "full_attention")
    mtp.layers[0].load_state_dict({k: v.float().cpu() for k, v in target.model.layers[last].state_dict().items()})
    return mtp


def chain(
    mtp: MTPModel,
    embed: Callable[[Tensor], Tensor],
    head: Callable[[Tensor], Tensor],
    data: Answers,
    steps: int,
    true_tokens: bool,
) -> list[Tensor]:
    """Return the logits of ``steps`` chained entries started at every position: [rows, length, vocabulary] each.

    Entry s of the chain at position i reads token i + 1 + s and predicts token i + 2 + s. It attends to the entries
    made from true hidden states up to i, and to the chain's own. With ``true_tokens`` the chain reads the answer's
    tokens (training), else its own predictions (drafting).
    """
    layer: Any = mtp.layers[0]
    rows, length = data.tokens.shape
    device = data.tokens.device
    position = torch.arange(length, device=device).expand(rows, length)
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    tokens = data.tokens.roll(-1, 1)
    hidden = data.hidden
    own: list[KeyValue] = []
    first: KeyValue | None = None
    logits = []
    for step in range(steps):
        x = mtp.fc(torch.cat([mtp.pre_fc_norm_embedding(embed(tokens)), mtp.pre_fc_norm_hidden(hidden)], -1))
        query, gate, key, value = _project(mtp, layer.input_layernorm(x), position + step)
        if first is None:
            first = key, value
        else:
            own.append((key, value))
        x = x + layer.self_attn.o_proj(_attend(query, first, own, causal) * torch.sigmoid(gate))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden = mtp.norm(x)
        logits.append(head(hidden))
        tokens = data.tokens.roll(-(step + 2), 1) if true_tokens else logits[-1].argmax(-1)
    return logits


def _project(mtp: MTPModel, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    attention: Any = mtp.layers[0].self_attn
    query, gate = attention.q_proj(x).unflatten(-1, (-1, 2 * attention.head_dim)).chunk(2, -1)
    query = attention.q_norm(query).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(x).unflatten(-1, (-1, attention.head_dim))).transpose(1, 2)
    value = attention.v_proj(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    cos, sin = mtp.rotary_emb(x, position[None])
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    groups = attention.num_key_value_groups
    return query, gate.flatten(-2), repeat_kv(key, groups), repeat_kv(value, groups)


def _attend(query: Tensor, first: KeyValue, own: list[KeyValue], causal: Tensor) -> Tensor:
    scale = query.shape[-1] ** -0.5
    score = (query @ first[0].transpose(-1, -2)).float() * scale
    score = score.masked_fill(~causal, float("-inf"))
    more = [(query * key).sum(-1, keepdim=True).float() * scale for key, _ in own]
    share = torch.softmax(torch.cat([score, *more], -1), -1).to(query.dtype)
    out = share[..., : causal.shape[0]] @ first[1]
    for i, (_, value) in enumerate(own):
        out = out + share[..., causal.shape[0] + i, None] * value
    return out.transpose(1, 2).flatten(-2)


def train(
    mtp: MTPModel,
    target: CausalLM,
    data: Answers,
    steps: int,
    batch: int,
    lr: float,
    chained: int,
    device: str,
    log: Log,
) -> None:
    """Cross-entropy of ``chained`` entries from every position whose prediction lies in the answer."""
    mtp.train().to(device)
    optimizer = _adamw(mtp, lr, weight_decay=0.01, device=device)
    generator = torch.Generator(device).manual_seed(0)
    started = time.monotonic()
    for step in range(steps):
        _set_lr(optimizer, lr, step, steps, warmup=min(50, steps // 10))
        part = data.rows(torch.randint(len(data), (batch,), device=device, generator=generator))
        index = torch.arange(part.tokens.shape[1], device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = chain(mtp, target.model.embed_tokens, target.lm_head, part, chained, true_tokens=True)
        loss = torch.zeros((), device=device)
        for s, each in enumerate(logits):
            predicted = index + 2 + s
            valid = (predicted >= part.start[:, None]) & (predicted < part.end[:, None])
            goal = part.tokens.roll(-(2 + s), 1)
            loss = loss + F.cross_entropy(each[valid].float(), goal[valid]) / chained
        _descend(mtp, optimizer, loss)
        if step % 200 == 0 or step == steps - 1:
            spent = time.monotonic() - started
            pace = f"{spent:.0f} s, {spent / (step + 1) * 1e3:.0f} ms a step"
            log(f"mtp {step + 1}/{steps} loss {loss.item():.4f} ({pace})")
    mtp.eval()
