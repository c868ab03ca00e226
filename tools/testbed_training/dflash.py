"""Train the DFlash drafter: many blocks of one row at once, each seeing only the context before its anchor.

Source: the public recipes of speculators and SpecForge for DFlash (random anchors, cross-entropy to the target's own
tokens, slots weighted exp(-(k - 1) / gamma)).
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxq.decode.dflash import DFlashModel
from mxq.models.dflash import DFlashConfig

from .features import Answers
from .target import CausalLM, Log, _adamw, _descend, _set_lr


def initial(config: DFlashConfig, seed: int) -> DFlashModel:
    """Return a drafter with small random weights."""
    torch.manual_seed(seed)
    model = DFlashModel(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = (
                (2 * config.num_hidden_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            )
            parameter.data.normal_(0, 0.5 * scale * parameter.shape[-1] ** -0.5)
    return model


def block_mask(anchors: Tensor, block: int, length: int) -> Tensor:
    """Who sees what: [rows, 1, anchors x block, length + anchors x block], True where a slot may look.

    A block sees the context strictly before its anchor (at inference the anchor has not been run through the target
    yet) and all of itself, never another block.
    """
    rows, count = anchors.shape
    context = torch.arange(length, device=anchors.device) < anchors[..., None]
    own = (
        torch.eye(count, dtype=torch.bool, device=anchors.device)
        .repeat_interleave(block, 0)
        .repeat_interleave(block, 1)
    )
    mask = torch.cat([context.repeat_interleave(block, 1), own.expand(rows, -1, -1)], -1)
    return mask[:, None]


def blocks(model: DFlashModel, embed: nn.Module, data: Answers, anchors: Tensor, block: int) -> Tensor:
    """Return the hidden states of one block per anchor [rows, anchors, block, hidden]; ``anchors`` [rows, anchors]."""
    rows, count = anchors.shape
    length = data.tokens.shape[1]
    device = anchors.device
    ids = torch.full((rows, count, block), model.config.mask_token_id, device=device)
    ids[..., 0] = data.tokens.gather(1, anchors)
    position = anchors[..., None] + torch.arange(block, device=device)
    context = model.context(data.taps, torch.arange(length, device=device).expand(rows, length))
    mask = block_mask(anchors, block, length)
    hidden = model(embed(ids).flatten(1, 2), position.flatten(1), context, [mask] * model.config.num_hidden_layers)
    return hidden.unflatten(1, (count, block))


def train(
    model: DFlashModel,
    target: CausalLM,
    data: Answers,
    steps: int,
    batch: int,
    lr: float,
    anchors: int,
    gamma: float,
    device: str,
    log: Log,
) -> None:
    """Train with ``anchors`` random blocks in each of ``batch`` rows a step."""
    model.train().to(device)
    optimizer = _adamw(model, lr, weight_decay=0.01, device=device)
    generator = torch.Generator(device).manual_seed(0)
    full = model.config.block_size
    # One drafter serves smaller budgets too, with fewer masks in a block; half of the steps show it those blocks.
    sizes = [full, full, full // 2, full // 4]
    started = time.monotonic()
    for step in range(steps):
        _set_lr(optimizer, lr, step, steps, warmup=min(100, steps // 10))
        part = data.rows(torch.randint(len(data), (batch,), device=device, generator=generator))
        span = (part.end - 1 - part.start).clamp(min=1)[:, None]
        block = sizes[step % len(sizes)]
        chosen = torch.rand(batch, anchors, device=device, generator=generator)
        at = part.start[:, None] + (chosen * span).long()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = target.lm_head(blocks(model, target.model.embed_tokens, part, at, block)[:, :, 1:])
        goal_at = at[..., None] + torch.arange(1, block, device=device)
        valid = goal_at < part.end[:, None, None]
        goal = part.tokens.gather(1, goal_at.clamp(max=part.tokens.shape[1] - 1).flatten(1)).view_as(goal_at)
        loss = F.cross_entropy(logits.flatten(0, 2).float(), goal.flatten(), reduction="none").view_as(goal)
        weight = valid * torch.exp(-torch.arange(block - 1, device=device) / gamma)
        loss = (loss * weight).sum() / weight.sum()
        _descend(model, optimizer, loss)
        if step % 200 == 0 or step == steps - 1:
            right = ((logits.argmax(-1) == goal) | ~valid).cumprod(-1) * valid
            spent = time.monotonic() - started
            pace = f"{spent:.0f} s, {spent / (step + 1) * 1e3:.0f} ms a step"
            length = 1 + right.sum(-1).float().mean().item()
            log(f"dflash {step + 1}/{steps} loss {loss.item():.4f} training acceptance length {length:.2f} ({pace})")
    model.eval()
