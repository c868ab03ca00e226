"""Tokens per second, speedups, the best budget and the break-even acceptance, from the time of a step."""

import math
from dataclasses import dataclass, replace
from typing import Any

from mxq.errors import UsageError
from mxq.hardware.acceptance import Accepted
from mxq.hardware.cost import Parts, Setup
from mxq.hardware.memory import Need, fits, need, running
from mxq.hardware.shape import BF16


@dataclass(frozen=True)
class Load:
    """What is asked of a server.

    Attributes:
        concurrency: requests in flight.
        context: mean tokens before a step.
        prompt_tokens, output_tokens: of a request; prefill is counted where they are given.
    """

    concurrency: int
    context: float
    prompt_tokens: int = 0
    output_tokens: int | None = None

    @classmethod
    def of_request(cls, concurrency: int, prompt_tokens: int, output_tokens: int) -> "Load":
        """Return the load of requests of one length, whose prefill is counted."""
        return cls(concurrency, prompt_tokens + output_tokens / 2, prompt_tokens, output_tokens)

    @property
    def longest(self) -> float:
        """Tokens of the longest text."""
        return self.context if self.output_tokens is None else self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Prediction:
    """One configuration at one load.

    Attributes:
        method, k, load: what is predicted.
        acceptance_length: that it was predicted with; 1 of plain decoding.
        parts: seconds of a step by part.
        tokens_per_s: output tokens of all requests per second.
        speedup_same, speedup_bf16: over plain decoding of the same target, and of the bf16 one, at this concurrency;
            the second is None where bf16 does not fit.
        break_even: acceptance length from which it is faster than plain decoding of the same target; None for that,
            and where none is.
        best_k: budget with the most tokens per second of those up to ``k``, and these; None for plain decoding.
        running: requests that memory has room for at once; a step is one of so many.
        memory: what one GPU holds with these.
    """

    method: str
    k: int
    load: Load
    acceptance_length: float
    parts: Parts
    tokens_per_s: float
    speedup_same: float
    speedup_bf16: float | None
    break_even: float | None
    best_k: tuple[int, float] | None
    running: int
    memory: Need

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "method": self.method,
            "k": self.k,
            "concurrency": self.load.concurrency,
            "context": self.load.context,
            "acceptance_length": self.acceptance_length,
            "tokens_per_s": self.tokens_per_s,
            "speedup_same_precision": self.speedup_same,
            "speedup_over_bf16": self.speedup_bf16,
            "break_even_acceptance_length": self.break_even,
            "best_k": None if self.best_k is None else {"k": self.best_k[0], "tokens_per_s": self.best_k[1]},
            "step_s": self.step_s,
            "parts_s": self.parts,
            "running": self.running,
            "memory_bytes": self.memory.total,
        }


def check_setup(setup: Setup, method: str, k: int) -> None:
    """Raise UsageError where the method, the budget or the precision is not one that this setup has."""
    if setup.packed.any and setup.machine.mxfp4 is None:
        raise UsageError(
            f"{setup.machine.gpu} has no kernel for MXFP4: engines emulate it there, slower than bf16",
            "predict bf16, or other hardware",
        )
    if method == "mtp" and not setup.target.has_mtp:
        raise UsageError("the model has no MTP head", "predict DFlash")
    if method == "dflash" and setup.drafter is None:
        raise UsageError("DFlash needs the shape of a drafter", "give --drafter MODEL, or its config.json")
    if method == "dflash" and setup.drafter is not None and k >= setup.drafter.block:
        raise UsageError(
            f"K {k} with a drafter of block {setup.drafter.block}", f"give -k {setup.drafter.block - 1} at most"
        )


def tokens_per_s(setup: Setup, method: str, k: int, load: Load, acceptance_length: float) -> float:
    """Return output tokens of all requests per second.

    Requests that find no room in memory wait. Where lengths are given, all requests are sent at once, and it is over
    the time until the last one ends: for each group that runs at once its prompts, which give the first token of each,
    and steps until the last.

    Raises:
        MxqError: not even one request fits the machine's memory.
    """
    most = running(setup, method, k, load.concurrency, load.longest)
    if load.output_tokens is None:
        return most * acceptance_length / _step_s(setup, method, k, most, load.context)
    steps = (load.output_tokens - 1) / acceptance_length
    groups, rest = divmod(load.concurrency, most)
    whole = 0.0
    for count, requests in ((groups, most), (1, rest)):
        if requests:
            decoding = steps * _step_s(setup, method, k, requests, load.context)
            whole += count * (setup.prompts(requests, load.prompt_tokens) + decoding)
    return load.concurrency * load.output_tokens / whole


def _step_s(setup: Setup, method: str, k: int, requests: int, context: float) -> float:
    return sum(setup.step(method, k, requests, context).values())


def predict(setup: Setup, method: str, load: Load, accepted: Accepted | None) -> Prediction:
    """Predict one configuration; ``accepted`` is None for plain decoding.

    Raises:
        UsageError: there is no such configuration.
        MxqError: it does not fit the machine's memory.
    """
    k = 0 if accepted is None else accepted.k
    check_setup(setup, method, k)
    requests = running(setup, method, k, load.concurrency, load.longest)
    length = 1.0 if accepted is None else accepted.length(k)
    rate = tokens_per_s(setup, method, k, load, length)
    parts = setup.step(method, k, requests, load.context)
    plain = tokens_per_s(setup, "ar", 0, load, 1)
    wide = replace(setup, packed=BF16)
    best = None
    if accepted is not None:
        rates = [
            (budget, tokens_per_s(setup, method, budget, load, accepted.length(budget))) for budget in range(1, k + 1)
        ]
        best = max(rates, key=lambda pair: pair[1])
    return Prediction(
        method=method,
        k=k,
        load=load,
        acceptance_length=length,
        parts=parts,
        tokens_per_s=rate,
        speedup_same=rate / plain,
        speedup_bf16=rate / tokens_per_s(wide, "ar", 0, load, 1) if fits(wide, "ar", 0, 1, load.longest) else None,
        break_even=None if accepted is None else _break_even(setup, method, k, load, plain),
        best_k=best,
        running=requests,
        memory=need(setup, method, k, requests, load.longest),
    )


def _break_even(setup: Setup, method: str, k: int, load: Load, plain: float) -> float | None:
    """Return the length at which a rate is ``plain``: the time per token is what no length shortens, and the rest."""
    fixed = 1 / tokens_per_s(setup, method, k, load, math.inf)
    rest = 1 / tokens_per_s(setup, method, k, load, 1) - fixed
    return max(1.0, rest / (1 / plain - fixed)) if 1 / plain > fixed else None
