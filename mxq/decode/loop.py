"""The verify loop: draft k tokens, run the target over them once, keep what it agrees with.

What is counted (vLLM's definitions, ``v1/spec_decode/metrics.py``). The prompt's own token is no verify pass. Each pass
drafts k tokens and accepts n of them, so that over any set of requests

* pooled acceptance length = 1 + sum(accepted) / number of passes,
* output tokens = 1 + sum(accepted + 1) - overshoot, per request, where overshoot is what the last pass committed beyond
  ``max_new_tokens`` or the end of text.

The last pass counts in full although ``max_new_tokens`` cuts its tokens. k is smaller only where the model's longest
sequence leaves no room. One difference from vLLM: drafts behind an end of text do not count as accepted, since no user
would ever see them; vLLM counts those too.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from mxq.decode.drafting import Drafter
from mxq.decode.sampling import GREEDY, Sampling, accept_greedy, accept_sampled, choose
from mxq.decode.target import Target
from mxq.errors import UsageError

_PROMPT_PIECE = 1024
"""Tokens of a prompt run at once: bounds the attention mask and what a drafter must take in."""


@dataclass(frozen=True)
class Generation:
    """One request's output and how it came about."""

    token_ids: list[int]
    """The output, an end-of-text token included."""
    accepted: list[int]
    """Drafts accepted per verify pass."""
    drafted: list[int]
    """Drafts proposed per verify pass."""
    finish_reason: Literal["stop", "length"]
    ttft_s: float
    """Seconds to the first token."""
    duration_s: float
    """Seconds to the last."""
    target_s: float
    """Of these, in the target's passes over prompt and drafts."""
    draft_s: float
    """Of these, in the drafter: its passes and the choice of its tokens."""


class _Clock:
    """Adds up the time of two kinds of work; on a GPU it waits for the work to end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = time.perf_counter()
        self.target_s = self.draft_s = 0.0

    def elapsed(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._started

    @contextmanager
    def target(self) -> Iterator[None]:
        before = self.elapsed()
        yield
        self.target_s += self.elapsed() - before

    @contextmanager
    def draft(self) -> Iterator[None]:
        before = self.elapsed()
        yield
        self.draft_s += self.elapsed() - before


@torch.inference_mode()
def generate(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    drafter: Drafter | None = None,
    num_speculative_tokens: int = 0,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_token_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue one prompt, autoregressively or, with a ``drafter``, by verifying ``num_speculative_tokens`` at a time.

    The output's distribution does not depend on the drafter, and greedy output only where two tokens are so nearly
    equal that passes of different length round differently. (MXFP4 activations make that likelier: a value beside a
    rounding boundary moves by a whole step.) ``generator``, on the target's device, makes sampled output repeatable.
    The output ends with the first of ``eos_token_ids``, after ``max_new_tokens``, or where the model's longest sequence
    ends. Raises UsageError for a request that cannot be run.
    """
    k = num_speculative_tokens
    _check(target, prompt_ids, drafter, k, max_new_tokens)
    clock = _Clock(target.device)
    longest = target.max_positions
    limit = min(max_new_tokens, longest - len(prompt_ids))
    capacity = min(len(prompt_ids) + limit + k, longest)
    state = target.start(capacity)
    taps = drafter.taps if drafter else ()
    session = drafter.start(capacity, k, sampling, generator) if drafter else None

    prompt = torch.tensor(list(prompt_ids), device=target.device)
    for begin in range(0, len(prompt), _PROMPT_PIECE):
        end = begin + _PROMPT_PIECE
        with clock.target():
            seen = target.prompt(state, prompt[begin:end], taps)
        following = prompt[begin + 1 : end + 1]
        if end >= len(prompt):
            last, _ = choose(seen.logits, sampling, generator)
            tokens = last.tolist()
            ttft_s = clock.elapsed()
            following = torch.cat([following, last])
        if session is not None:
            with clock.draft():
                session.observe(seen, following)

    accepted: list[int] = []
    drafted: list[int] = []
    while len(tokens) < limit and tokens[-1] not in eos_token_ids:
        if session is None:
            with clock.target():
                seen = target.verify(state, last, taps)
            last, _ = choose(seen.logits, sampling, generator)
            new = last.tolist()
        else:
            room = longest - len(prompt_ids) - len(tokens)
            with clock.draft():
                draft = session.propose(last, min(k, room))
            with clock.target():
                seen = target.verify(state, torch.cat([last, draft.tokens]), taps)
            if draft.probabilities is None:
                n, new = accept_greedy(seen.logits, draft.tokens)
            else:
                n, new = accept_sampled(seen.logits, draft.tokens, draft.probabilities, sampling, generator)
            new = _up_to_end(new, eos_token_ids)
            accepted.append(min(n, len(new)))
            drafted.append(len(draft.tokens))
        tokens += new
        if len(tokens) >= limit or tokens[-1] in eos_token_ids:
            break
        target.commit(state, len(new))
        if session is not None:
            committed = torch.tensor(new, device=target.device)
            last = committed[-1:]
            with clock.draft():
                session.observe(seen.first(len(new)), committed)

    del tokens[limit:]
    stopped = tokens[-1] in eos_token_ids
    return Generation(
        token_ids=tokens,
        accepted=accepted,
        drafted=drafted,
        finish_reason="stop" if stopped else "length",
        ttft_s=ttft_s,
        duration_s=clock.elapsed(),
        target_s=clock.target_s,
        draft_s=clock.draft_s,
    )


def _up_to_end(tokens: list[int], eos_token_ids: Collection[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens


def _check(target: Target, prompt_ids: Sequence[int], drafter: Drafter | None, k: int, max_new_tokens: int) -> None:
    if not prompt_ids:
        raise UsageError("the prompt is empty", "give it at least one token")
    vocabulary = target.config.vocab_size
    outside = [token for token in prompt_ids if not 0 <= token < vocabulary]
    if outside:
        raise UsageError(
            f"prompt token {outside[0]} is outside the vocabulary of {vocabulary}",
            "tokenize with the target's own tokenizer",
        )
    if len(prompt_ids) >= target.max_positions:
        raise UsageError(
            f"the prompt has {len(prompt_ids)} tokens and the model takes {target.max_positions}, output included",
            "shorten the prompt",
        )
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}", "ask for at least one token")
    if (drafter is None) != (k == 0) or k < 0:
        raise UsageError(
            f"{k} speculative tokens {'without' if drafter is None else 'with'} a drafter",
            "give a drafter and a positive number, or neither",
        )
