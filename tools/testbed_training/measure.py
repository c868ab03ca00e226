"""How good the trained models are, on held-out prompts: acceptance lengths, right answers, use of the experts.

Greedy speculative decoding emits the target's own greedy tokens, so acceptance follows from them alone: draft at every
position of a greedy answer at once, then walk from draft to draft. The table that counts is made by the real verify
loop (``tools/measure_testbed.py``); this one is a first look at the end of training.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from mxq.decode.dflash import DFlashModel
from mxq.decode.mtp import MTPModel

from . import dflash, mtp
from .features import Answers
from .target import CausalLM
from .text import Example

TIMEOUT_S = 10  # for a reply's code and its tests


@torch.inference_mode()
def mtp_drafts(model: MTPModel, target: CausalLM, data: Answers, budget: int, batch: int = 32) -> Tensor:
    """Return the drafts of every position as anchor [rows, length, budget]; an anchor's own token is not drafted."""
    parts = []
    for begin in range(0, len(data), batch):
        part = Answers(
            *(getattr(data, name)[begin : begin + batch] for name in ("tokens", "start", "end", "hidden", "taps"))
        )
        logits = mtp.chain(model, target.model.embed_tokens, target.lm_head, part, budget, true_tokens=False)
        drafts = torch.stack([each.argmax(-1) for each in logits], -1)
        parts.append(drafts.roll(1, 1))  # the chain started at position i drafts for the anchor i + 1
    return torch.cat(parts)


@torch.inference_mode()
def dflash_drafts(model: DFlashModel, target: CausalLM, data: Answers, budget: int) -> Tensor:
    """Return the drafts of every position of the answers as anchor [rows, length, budget]."""
    rows, length = data.tokens.shape
    drafts = torch.full((rows, length, budget), -1, device=data.tokens.device)
    for row in range(rows):
        part = data.rows(torch.tensor([row], device=data.tokens.device))
        anchors = torch.arange(int(part.start), int(part.end), device=data.tokens.device)
        one = Answers(
            *(
                getattr(part, n).expand(len(anchors), *getattr(part, n).shape[1:])
                for n in ("tokens", "start", "end", "hidden", "taps")
            )
        )
        hidden = dflash.blocks(model, target.model.embed_tokens, one, anchors[:, None], budget + 1)
        drafts[row, anchors] = target.lm_head(hidden[:, 0, 1:]).argmax(-1)
    return drafts


def acceptance(data: Answers, drafts: Tensor, budget: int) -> float:
    """Return the pooled acceptance length: tokens committed per verify pass, bonus included."""
    tokens, drafts = data.tokens.cpu(), drafts[..., :budget].cpu()
    passes = accepted = 0
    for row, (start, end) in enumerate(zip(data.start.tolist(), data.end.tolist(), strict=True)):
        anchor = start
        while anchor < end - 1:
            goal = tokens[row, anchor + 1 : min(anchor + 1 + budget, end)]
            right = int((drafts[row, anchor, : len(goal)] == goal).cumprod(0).sum())
            passes += 1
            accepted += right
            anchor += right + 1
    return 1 + accepted / max(passes, 1)


def right(example: Example, reply: str) -> bool | None:
    """Say whether a reply is right; None where nothing decides that (open conversation)."""
    if example.answer is not None:
        found = re.findall(r"answer is (-?\d+)", reply)
        return bool(found) and found[-1] == example.answer
    if example.tests is not None:
        code = re.search(r"```python\n(.*?)```", reply, re.DOTALL)
        return code is not None and _passes(code.group(1), example.tests)
    return None


def judge(examples: list[Example], replies: list[str]) -> list[bool]:
    """Return what :func:`right` says of each reply, where it says anything."""
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(right, examples, replies))
    return [verdict for verdict in verdicts if verdict is not None]


def _passes(code: str, tests: str) -> bool:
    """Run a reply's code and its tests in an interpreter of their own."""
    try:
        command = [sys.executable, "-I", "-c", f"{code}\n{tests}"]
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@torch.inference_mode()
def expert_shares(model: CausalLM, rows: list[list[int]]) -> list[list[float]]:
    """Return, for each mixture-of-experts layer, the share of routed tokens that each expert gets."""
    counts: dict[int, Tensor] = {}
    hooks = []
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            experts = model.config.num_experts

            def count(_: nn.Module, __: object, output: tuple[Tensor, ...], i: int = i, n: int = experts) -> None:
                counts[i] = counts.get(i, 0) + torch.bincount(output[2].flatten(), minlength=n).cpu()

            hooks.append(layer.mlp.gate.register_forward_hook(count))
    for row in rows:
        model.model(input_ids=torch.tensor([row], device=model.lm_head.weight.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return [(c / c.sum()).tolist() for c in counts.values()]
