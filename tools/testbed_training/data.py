"""From generated text to rows of token ids: training text packed into rows, and prompts to answer."""

import dataclasses
import multiprocessing

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import text
from . import tokenizer as tok

# What the drafters learn from. Published drafters, too, are trained on mathematics and code more than on conversation,
# and accept accordingly; it is the number of answers seen that decides how much of a family's wording a drafter knows.
ANSWER_MIX = {"arithmetic": 0.31, "maths": 0.38, "functions": 0.18, "programs": 0.075, "chat": 0.055}
PROMPT_WEIGHT = 0.1  # what a prompt's tokens count in the loss, beside 1 for an answer's


@dataclasses.dataclass(frozen=True)
class Packed:
    """Training text: ``tokens`` [rows, length] and the loss weight of each token, prompts less than answers."""

    tokens: Tensor
    weights: Tensor


def generate(
    seed: str, count: int, excluded: frozenset[str], mix: dict[str, float], workers: int
) -> list[tuple[str, str]]:
    """Return ``count`` (conversation up to the answer, answer with its end) pairs; the same for the same seed."""
    shard = 2000
    jobs = [(f"{seed}/{i}", min(shard, count - i * shard), excluded, mix) for i in range((count + shard - 1) // shard)]
    if workers <= 1:
        parts = [_generate_shard(job) for job in jobs]
    else:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            parts = pool.map(_generate_shard, jobs)
    return [pair for part in parts for pair in part]


def _generate_shard(job: tuple[str, int, frozenset[str], dict[str, float]]) -> list[tuple[str, str]]:
    seed, count, excluded, mix = job
    return [
        (tok.conversation(example.prompt), f"{example.response}{tok.END}\n")
        for example in text.training(seed, count, excluded, mix)
    ]


def pack(pairs: list[tuple[str, str]], tokenizer: Tokenizer, length: int) -> Packed:
    """Join conversations end to end and cut them into rows of ``length`` tokens; a last, short row is dropped."""
    prompts = tokenizer.encode_batch_fast([prompt for prompt, _ in pairs])
    answers = tokenizer.encode_batch_fast([answer for _, answer in pairs])
    tokens: list[int] = []
    weights: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens += prompt.ids
        tokens += answer.ids
        weights += [PROMPT_WEIGHT] * len(prompt.ids)
        weights += [1.0] * len(answer.ids)
    rows = len(tokens) // length
    return Packed(
        torch.tensor(tokens[: rows * length], dtype=torch.int32).view(rows, length),
        torch.tensor(weights[: rows * length], dtype=torch.float16).view(rows, length),
    )


def prompts(seed: str, count: int, excluded: frozenset[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return ``count`` tokenized prompts for the target to answer, families mixed as ``ANSWER_MIX`` says."""
    chosen = [tok.conversation(e.prompt) for e in text.training(seed, count, excluded, ANSWER_MIX)]
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(chosen)]
