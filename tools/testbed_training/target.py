"""Train a target on packed text, and let it answer prompts in large batches."""

import math
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from .data import Packed
from .export import Shape, served, text_config

Log = Callable[[str], None]

CausalLM = Any
"""A causal language model of transformers, which leaves its parts untyped."""


def build(config: dict[str, Any], shape: Shape, seed: int) -> CausalLM:
    """Return a freshly initialised causal language model of transformers for ``config``."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    torch.manual_seed(seed)
    model = (Qwen3_5MoeForCausalLM if shape.moe else Qwen3_5ForCausalLM)(text_config(config))
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            # transformers starts with dt near 1 and A up to 16, a state that forgets at once.
            dt = torch.exp(torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(0.1)))
            parameter.data = torch.log(torch.expm1(dt))
        elif parameter.ndim >= 2 and not name.endswith("conv1d.weight"):
            scale = (
                1 / math.sqrt(2 * shape.layers)
                if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj"))
                else 1
            )
            parameter.data.normal_(0, 0.02 if "embed" in name else 0.5 * scale / math.sqrt(parameter.shape[-1]))
    return model


def load(model: nn.Module, directory: Path) -> dict[str, Tensor]:
    """Give ``model`` the weights that :func:`export.save_target` wrote to ``directory``; return its vision tower's."""
    text, vision = "model.language_model.", "model.visual."
    tensors = {name: t for file in directory.glob("model*.safetensors") for name, t in load_file(file).items()}
    state = {"model." + name.removeprefix(text): t for name, t in tensors.items() if name.startswith(text)}
    state["lm_head.weight"] = tensors["lm_head.weight"]
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return {name.removeprefix(vision): tensor for name, tensor in tensors.items() if name.startswith(vision)}


def train(model: CausalLM, data: Packed, steps: int, batch: int, lr: float, device: str, log: Log) -> None:
    """Next-token training: AdamW, warm-up and cosine; a load-balancing loss keeps all experts in use."""
    model.train().to(device)
    routers = _make_experts_dense(model)
    optimizer = _adamw(model, lr, weight_decay=0.1, device=device)
    tokens, weights = data.tokens.to(device), data.weights.to(device)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0)).to(device)
    started = time.monotonic()
    for step in range(steps):
        _set_lr(optimizer, lr, step, steps, warmup=min(100, steps // 10))
        rows = order[torch.arange(step * batch, (step + 1) * batch, device=device) % len(order)]
        ids, weight = tokens[rows].long(), weights[rows].float()[:, 1:]
        with torch.autocast(device, dtype=torch.bfloat16):
            routers.clear()
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        loss = (loss * weight.flatten()).sum() / weight.sum()
        balance = sum((_balance(r) for r in routers), torch.zeros((), device=device))
        _descend(model, optimizer, loss + 0.01 * balance)
        if step % 100 == 0 or step == steps - 1:
            spent = time.monotonic() - started
            pace = f"{spent:.0f} s, {spent / (step + 1) * 1e3:.0f} ms a step"
            log(f"target {step + 1}/{steps} loss {loss.item():.4f} ({pace})")
    model.eval()


def as_served(model: CausalLM, device: str) -> CausalLM:
    """Round the weights to the precision they are stored in, so that drafters learn from the model that is served."""
    model.load_state_dict(served(dict(model.state_dict())))
    return model.to(device=device, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def answer(
    model: CausalLM, prompts: list[list[int]], stop: set[int], limit: int, temperature: float, batch: int, seed: int
) -> list[list[int]]:
    """Return the model's answers (greedy at temperature 0), each ending with the stop token or at ``limit`` tokens."""
    from transformers import DynamicCache

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    stops = torch.tensor(sorted(stop), device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(by_length), batch):
        rows = by_length[start : start + batch]
        longest = max(len(prompts[i]) for i in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest + limit, dtype=torch.long)
        for r, i in enumerate(rows):  # left padding; the model zeroes its layers' input there
            ids[r, longest - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[r, longest - len(prompts[i]) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        emitted = []
        done = torch.zeros(len(rows), dtype=torch.bool, device=device)
        step_ids, seen = ids, longest
        for _ in range(limit):
            hidden = model.model(
                input_ids=step_ids,
                attention_mask=mask[:, :seen],
                position_ids=positions[:, seen - step_ids.shape[1] : seen],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1:]
            logits = model.lm_head(hidden)[:, 0].float()
            if temperature:
                noise = torch.empty_like(logits).exponential_(generator=generator)
                token = (torch.softmax(logits / temperature, -1) / noise).argmax(-1)
            else:
                token = logits.argmax(-1)
            emitted.append(token)
            done |= torch.isin(token, stops)
            step_ids, seen = token[:, None], seen + 1
            if len(emitted) % 16 == 0 and bool(done.all()):
                break
        for i, row in zip(rows, torch.stack(emitted, 1).tolist(), strict=True):
            end = next((n + 1 for n, token in enumerate(row) if token in stop), len(row))
            answers[i] = row[:end]
    return answers


def _make_experts_dense(model: CausalLM) -> list[Tensor]:
    """Let every expert see every token in training (no host synchronisation); returns where router logits arrive."""
    seen: list[Tensor] = []

    def forward(self: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        share = torch.zeros(len(x), self.num_experts, device=x.device, dtype=weight.dtype).scatter(1, index, weight)
        gate, up = torch.einsum("th,eih->eti", x, self.gate_up_proj).chunk(2, -1)
        out = torch.einsum("eti,ehi->eth", self.act_fn(gate) * up, self.down_proj)
        return torch.einsum("eth,te->th", out, share)

    for module in model.modules():
        if type(module).__name__ == "Qwen3_5MoeSparseMoeBlock":
            module.experts.forward = types.MethodType(forward, module.experts)
            module.gate.register_forward_hook(lambda _, __, output: seen.append(output[0]))
    return seen


def _balance(router_logits: Tensor, top_k: int = 2) -> Tensor:
    """Switch-style balance: experts x sum over experts of (share of tokens routed) x (mean probability); 1 is even."""
    probability = torch.softmax(router_logits.float(), -1)
    experts = probability.shape[-1]
    routed = F.one_hot(probability.topk(top_k, -1).indices, experts).sum(1).float().mean(0) / top_k
    return experts * (routed * probability.mean(0)).sum()


def _adamw(model: nn.Module, lr: float, weight_decay: float, device: str) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device == "cuda")


def _descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step down ``loss``, with gradients of norm 1 at most."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _set_lr(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int, warmup: int) -> None:
    """Linear warm-up, then cosine to a tenth."""
    if step < warmup:
        lr = peak * (step + 1) / warmup
    else:
        lr = peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))))
    for group in optimizer.param_groups:
        group["lr"] = lr
