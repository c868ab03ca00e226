"""The target's answers as the drafters see them: token ids, final hidden states, and the tapped layers' outputs."""

import dataclasses

import torch
from torch import Tensor

from .target import CausalLM


@dataclasses.dataclass(frozen=True)
class Answers:
    """Rows of prompt and answer, padded on the right, with the target's states at every position.

    ``tokens`` [rows, length]; ``start`` [rows] where the answer begins; ``end`` [rows] one past its last token;
    ``hidden`` [rows, length, hidden] after the final norm; ``taps`` [rows, length, taps x hidden].
    """

    tokens: Tensor
    start: Tensor
    end: Tensor
    hidden: Tensor
    taps: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Tensor) -> "Answers":
        """Return the chosen rows, cut to the longest of them (to a multiple of 64: few shapes are fast shapes)."""
        end = self.end[index]
        longest = -(-int(end.max()) // 64) * 64
        return Answers(
            self.tokens[index, :longest],
            self.start[index],
            end,
            self.hidden[index, :longest],
            self.taps[index, :longest],
        )


@torch.inference_mode()
def collect(
    model: CausalLM, prompts: list[list[int]], answers: list[list[int]], layer_ids: list[int], batch: int = 256
) -> Answers:
    """Run the target once over every prompt and answer; ``layer_ids`` are 0-based, a layer's output is tapped."""
    device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    count, size = len(prompts), model.config.hidden_size
    tokens = torch.zeros(count, length, dtype=torch.long)
    for i, (prompt, reply) in enumerate(zip(prompts, answers, strict=True)):
        tokens[i, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
    tokens = tokens.to(device)
    hidden = torch.empty(count, length, size, dtype=dtype, device=device)
    taps = torch.empty(count, length, size * len(layer_ids), dtype=dtype, device=device)
    outputs: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[i].register_forward_hook(lambda _, __, out, i=i: outputs.__setitem__(i, out))
        for i in layer_ids
    ]
    for begin in range(0, count, batch):
        part = slice(begin, begin + batch)
        hidden[part] = model.model(input_ids=tokens[part], use_cache=False).last_hidden_state
        taps[part] = torch.cat([outputs[i] for i in layer_ids], -1)
    for hook in hooks:
        hook.remove()
    start = torch.tensor([len(p) for p in prompts], device=device)
    end = torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)], device=device)
    return Answers(tokens, start, end, hidden, taps)
